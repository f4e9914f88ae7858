from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from react_clip.attacks import APGD, FAB, AutoAttack, Square
from react_clip.attacks.problem import Found, Problem, Steps, budgets, relay

from .conftest import CountCalls, Task


def test_the_versions_are_the_published_ones() -> None:
    ce, dlr = APGD(loss="ce", steps=100, restarts=1), APGD(loss="dlr", steps=100, restarts=1)
    assert AutoAttack(version="ttc").members == (ce, dlr)
    targeted = APGD(loss="dlr-targeted", steps=100, restarts=1, targets=9)
    assert AutoAttack().members == (ce, targeted, FAB(steps=100, targets=9), Square(queries=5000))
    rand = tuple(APGD(loss=loss, steps=100, restarts=1, eot=20) for loss in ("ce", "dlr"))  # type: ignore[arg-type]
    assert AutoAttack(version="rand").members == rand


def test_relay_passes_on_only_what_stands_and_keeps_what_broke() -> None:
    x, y, rows = torch.full((4, 1, 1, 1), 0.5), torch.zeros(4, dtype=torch.long), torch.arange(4)
    problem = Problem(lambda x: x, x, y, budgets(0.5, x), rows, rows, torch.zeros(4, dtype=torch.long), Steps(1))
    seen: list[list[int]] = []

    def attempt(pixel: float, margins: dict[int, float]) -> Callable[[Problem, Tensor], Found]:
        def run(part: Problem, rows: Tensor) -> Found:
            seen.append(part.rows.tolist())
            assert part.rows.tolist() == rows.tolist()
            logits = torch.tensor([[0.0, margins[row]] for row in rows.tolist()])
            return Found(torch.full((len(rows), 1, 1, 1), pixel), logits)

        return run

    clean = torch.tensor([[0.0, 1.0], [0.0, -9.0], [0.0, -9.0], [0.0, -9.0]])  # the first is wrong already
    first, second = attempt(0.1, {1: 2.0, 2: -1.0, 3: -1.0}), attempt(0.2, {2: -3.0, 3: 5.0})
    kept = relay(problem, clean, [first, second, attempt(0.3, {2: -2.0})])
    assert seen == [[1, 2, 3], [2, 3], [2]]
    assert kept.images.flatten().tolist() == pytest.approx([0.5, 0.1, 0.1, 0.2])
    assert kept.broken(y).tolist() == [True, True, False, True]


def test_relay_lets_a_broken_tie_win() -> None:
    """Classes with one and the same name tie exactly; argmax decides, and the relay must go by it."""
    x, y, row = torch.full((1, 1, 1, 1), 0.5), torch.tensor([1]), torch.tensor([0])
    problem = Problem(lambda x: x, x, y, budgets(0.5, x), row, row, row.clone(), Steps(1))
    clean, tied = torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert not Found(x, clean).broken(y)
    kept = relay(problem, clean, [lambda part, rows: Found(part.x - 0.25, tied)])
    assert kept.images.item() == 0.25
    assert kept.broken(y)


def test_never_weaker_than_its_first_member(task: Task) -> None:
    x, y = task.head(80)
    alone, both = (a(task.net, x, y, eps=6 / 255) for a in (APGD(), AutoAttack(version="ttc")))
    assert both.success.sum() >= alone.success.sum()
    # A broken image costs: clean and last pass; clean pass, start, 100 steps and judging pass of each member it met.
    assert set(both.queries[both.success].tolist()) <= {2 + 103, 2 + 2 * 103}
    assert set(both.queries[~both.success].tolist()) == {2 + 2 * 103}


def test_standard_with_fewer_classes_than_targets(task_of: Callable[[int], Task]) -> None:
    for classes in (2, 3):
        task = task_of(classes)
        x, y = task.head(10)
        counter = CountCalls(task.net)
        result = AutoAttack(eps=24 / 255)(counter, x, y)
        assert result.success.all()
        assert int(result.queries.sum()) == counter.images


def test_rand_breaks_a_randomised_model_with_twenty_passes_a_gradient() -> None:
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
    member = 1 + 20 * 101 + 1
    assert result.queries.tolist() == [2 + member, 2 + 2 * member]
