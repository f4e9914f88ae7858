from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from react_clip.attacks import APGD, FAB, AutoAttack, Square, autoattack
from react_clip.attacks.problem import Candidates, Problem, relay

from .conftest import Task, problem_of


def test_the_versions_are_the_published_ones() -> None:
    ce, dlr = APGD(loss="ce", steps=100, restarts=1), APGD(loss="dlr", steps=100, restarts=1)
    assert AutoAttack(version="ttc").members == (ce, dlr)
    targeted = APGD(loss="dlr-targeted", steps=100, restarts=1, targets=9)
    assert AutoAttack().members == (ce, targeted, FAB(steps=100, targets=9), Square(queries=5000))
    rand = tuple(APGD(loss=loss, steps=100, restarts=1, eot=20) for loss in ("ce", "dlr"))  # type: ignore[arg-type]
    assert AutoAttack(version="rand").members == rand


def test_relay_passes_on_only_what_stands_and_keeps_what_broke() -> None:
    x, y = torch.full((4, 1, 1, 1), 0.5), torch.zeros(4, dtype=torch.long)
    seen: list[list[int]] = []

    def attempt(pixel: float, margins: dict[int, float]) -> Callable[[Problem, Tensor], Candidates]:
        def run(part: Problem, rows: Tensor) -> Candidates:
            seen.append(part.rows.tolist())
            assert part.rows.tolist() == rows.tolist()
            logits = torch.tensor([[0.0, margins[row]] for row in rows.tolist()])
            return Candidates.judged(torch.full((len(rows), 1, 1, 1), pixel), logits, part.y)

        return run

    clean = torch.tensor([[0.0, 1.0], [0.0, -9.0], [0.0, -9.0], [0.0, -9.0]])  # the first is wrong already
    first, second = attempt(0.1, {1: 2.0, 2: -1.0, 3: -1.0}), attempt(0.2, {2: -3.0, 3: 5.0})
    attempts = [first, second, attempt(0.3, {2: -2.0})]
    best = relay(problem_of(lambda x: x, x, y, 0.5), Candidates.judged(x, clean, y), attempts)
    assert seen == [[1, 2, 3], [2, 3], [2]]
    assert best.images.flatten().tolist() == pytest.approx([0.5, 0.1, 0.1, 0.2])
    assert best.wrong.tolist() == [1, 1, 0, 1]


def test_relay_lets_a_broken_tie_win() -> None:
    """Classes with one and the same name tie exactly; argmax decides, and the relay must go by it."""
    x, y = torch.full((1, 1, 1, 1), 0.5), torch.tensor([1])
    clean, tied = torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    best = Candidates.judged(x, clean, y)
    assert best.wrong.item() == 0
    attempts = [lambda part, rows: Candidates.judged(part.x - 0.25, tied, part.y)]
    best = relay(problem_of(lambda x: x, x, y, 0.5), best, attempts)
    assert best.images.item() == 0.25
    assert best.wrong.item() == 1


def test_members_run_only_on_images_that_stand(task: Task) -> None:
    x, y = task.clear_cut(5)
    result = AutoAttack(version="ttc")(task.net, x, y, eps=8 / 255)
    assert result.success.tolist() == [True] * 5 + [False] * 5
    # Clean and last pass; for each member that ran the clean pass, start, 100 steps and judging pass.
    assert result.queries.tolist() == [2 + 103] * 5 + [2 + 2 * 103] * 5


def test_rand_breaks_a_randomised_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = tuple(member.replace(steps=10, eot=10) for member in AutoAttack(version="rand").members)
    monkeypatch.setitem(autoattack._VERSIONS, "rand", shorter)
    generator = torch.Generator().manual_seed(0)
    counter = 0

    def noisy(x: Tensor) -> Tensor:
        nonlocal counter
        counter += len(x)
        bright = (x + 0.05 * torch.randn(x.shape, generator=generator)).mean((1, 2, 3))
        return torch.stack([bright, 1 - bright, 0 * bright], 1)

    x = torch.stack([torch.full((3, 8, 8), grey) for grey in (0.52, 0.8)])
    result = AutoAttack(eps=16 / 255, version="rand")(noisy, x, torch.tensor([0, 0]))
    assert result.success.tolist() == [True, False]
    assert int(result.queries.sum()) == counter
    member = 1 + 10 * 11 + 1
    assert result.queries.tolist() == [2 + member, 2 + 2 * member]
