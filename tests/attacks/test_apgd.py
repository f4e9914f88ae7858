from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from react_clip.attacks import APGD, PGD
from react_clip.attacks.apgd import checkpoints
from react_clip.attacks.losses import cross_entropy

from .conftest import Record, Task, problem_of


@pytest.mark.parametrize("steps", [1, 5, 10, 50, 100, 1000])
def test_checkpoints_follow_the_paper(steps: int) -> None:
    marks = checkpoints(steps)
    assert marks == sorted(marks)
    assert marks[0] == -(-22 * steps // 100)
    assert marks[-1] <= steps
    if steps == 1000:
        assert marks == [220, 410, 570, 700, 800, 870, 930, 990]


def plain_apgd(
    net: Callable[[Tensor], Tensor], start: Tensor, x: Tensor, y: Tensor, eps: float, steps: int
) -> list[Tensor]:
    """The paper's algorithm for one image, with plain numbers and lists; returns all points visited."""

    def project(point: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(point, (x - eps).clamp(0, 1)), (x + eps).clamp(0, 1))

    def loss_and_slope(point: Tensor) -> tuple[float, Tensor]:
        point = point.clone().requires_grad_()
        value = torch.nn.functional.cross_entropy(net(point), y)
        return value.item(), torch.autograd.grad(value, point)[0]

    marks, visited, eta = checkpoints(steps), [start], 2 * eps
    point, previous = start, start
    value, slope = loss_and_slope(point)
    best = (value, point, slope)
    history, mark, best_at_mark, eta_at_mark = [value], 0, value, 0.0
    for k in range(1, steps + 1):
        target = project(point + eta * slope.sign())
        a = 1.0 if k == 1 else 0.75
        point, previous = project(point + a * (target - point) + (1 - a) * (point - previous)), point
        value, slope = loss_and_slope(point)
        visited.append(point)
        history.append(value)
        if value > best[0]:
            best = (value, point, slope)
        if k in marks:
            rises = sum(later > earlier for earlier, later in itertools.pairwise(history))
            if rises < 0.75 * (k - mark) or (eta == eta_at_mark and best[0] == best_at_mark):
                value, point, slope = best
                eta_at_mark, eta = eta, eta / 2
            else:
                eta_at_mark = eta
            best_at_mark, mark, history = best[0], k, [value]
    return visited


@pytest.mark.parametrize("seed", range(6))
def test_visits_the_points_of_a_plain_loop(seed: int) -> None:
    """On a model with many tops inside the ball, in fp64, so that rounding does not decide between them."""
    generator = torch.Generator().manual_seed(seed)
    weight = 3 * torch.randn(3, 12, generator=generator, dtype=torch.float64)
    x = torch.rand(1, 3, 2, 2, generator=generator)

    def wavy(x: Tensor) -> Tensor:
        return (x.double().flatten(1) @ weight.T).sin()

    y = wavy(x).argmax(1)
    record = Record(wavy)
    APGD(eps=0.2, steps=60)(record, x, y, seed=seed)
    visited = record.seen[1:-1]  # less the clean and the last pass
    expected = plain_apgd(wavy, visited[0], x, y, 0.2, 60)
    assert len({point.sum().item() for point in expected}) > 20, "a walk that stands still proves nothing"
    torch.testing.assert_close(torch.cat(visited), torch.cat(expected), rtol=0, atol=1e-6)


def test_each_restart_has_its_own_start(task: Task) -> None:
    x, y = task.head(1)
    record = Record(task.net)
    result = APGD(eps=1e-4, steps=1, restarts=3)(record, x, y)
    assert not result.success
    starts = torch.cat(record.seen[1:-1:2])
    assert len(starts) == 3
    assert bool((torch.pdist(starts.flatten(1)) > 1e-4).all())


def test_beats_pgd_where_its_fixed_steps_cannot_reach(task: Task) -> None:
    x, y = task.head(150)
    ours, plain = APGD(eps=16 / 255, steps=10)(task.net, x, y), PGD(eps=16 / 255, steps=10)(task.net, x, y)
    assert ours.loss.mean() > 1.2 * plain.loss.mean()


def test_restarts_run_only_on_images_that_stand(task: Task) -> None:
    x, y = task.clear_cut(5)
    attack = APGD(eps=8 / 255, steps=10, restarts=3)
    result = attack(task.net, x, y)
    assert result.success.tolist() == [True] * 5 + [False] * 5
    # The clean and the last pass, and for each restart the start and 10 steps.
    assert result.queries.tolist() == [2 + 11] * 5 + [2 + 3 * 11] * 5
    first = APGD(eps=8 / 255, steps=10)(task.net, x, y)
    assert torch.equal(result.images[:5], first.images[:5])


def test_images_that_are_wrong_already_come_back_unchanged(task: Task) -> None:
    x, y = task.head(4)
    result = APGD(steps=5)(task.net, x, (y + 1) % 5)
    assert torch.equal(result.images, x)
    assert result.success.all()
    assert result.queries.tolist() == [2, 2, 2, 2]


def test_eot_averages_gradient_loss_and_logits() -> None:
    """A model that goes through four heads in turn: four passes must give their exact mean."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(4, 3, 12, generator=generator)
    x, y = torch.rand(2, 3, 2, 2, generator=generator), torch.tensor([0, 2])
    calls = 0

    def model(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.flatten(1) @ heads[calls % 4].T

    problem = problem_of(model, x, y, 0.1)
    logits, value, slope = problem.gradient(x, cross_entropy, eot=4)
    pixels = x.clone().requires_grad_()
    each = torch.stack([cross_entropy(pixels.flatten(1) @ head.T, y) for head in heads])
    torch.testing.assert_close(slope, torch.autograd.grad(each.mean(0).sum(), pixels)[0])
    torch.testing.assert_close(value, each.mean(0).detach())
    torch.testing.assert_close(logits, x.flatten(1) @ heads.mean(0).T)
    assert problem.spent.tolist() == [[4, 4], [4, 4]]
