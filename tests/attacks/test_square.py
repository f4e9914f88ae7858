from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from react_clip.attacks import Square
from react_clip.attacks.square import _interval, _side

from .conftest import Task


def test_the_square_shrinks_on_schedule() -> None:
    shape = torch.Size((1, 3, 224, 224))
    sides = [_side(query, shape) for query in (1, 10, 11, 51, 201, 501, 1001, 2001, 4001, 6001, 8001, 99999)]
    expected = [round((0.8 * 224 * 224 / 2**k) ** 0.5) for k in (0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9)]
    assert sides == expected
    assert _side(9999, torch.Size((1, 3, 4, 4))) == 1


def test_windows_cover_every_position_alike() -> None:
    draws = (torch.arange(1000) + 0.5) / 1000
    inside = _interval(draws, side=3, length=12)
    assert bool((inside.sum(1) == 3).all())
    starts = inside.long().argmax(1).bincount(minlength=10)
    assert bool((starts == 100).all())
    assert bool(_interval(draws, side=99, length=12).all())


def test_every_pixel_stays_at_the_edge_of_the_ball(task: Task) -> None:
    x, y = task.head(20)
    result = Square(eps=4 / 255, queries=100)(task.net, x, y)
    low, high = (x - 4 / 255).clamp(0, 1), (x + 4 / 255).clamp(0, 1)
    assert bool(((result.images == low) | (result.images == high)).all())


def test_broken_images_rest(task: Task) -> None:
    x, y = task.head(60)
    result = Square(eps=8 / 255, queries=150)(task.net, x, y)
    spent = result.queries - 2  # less the clean and the last pass
    assert 5 < int(result.success.sum()) < 60
    assert bool((spent[~result.success] == 150).all())
    assert bool((spent[result.success] <= 150).all())
    assert int(spent[result.success].min()) < 20


def test_longer_searches_never_do_worse(task: Task) -> None:
    """The first queries of a longer search are those of the shorter one."""
    x, y = task.head(40)
    short, long = (Square(eps=6 / 255, queries=q)(task.net, x, y) for q in (50, 300))
    assert bool((long.success >= short.success).all())
    assert bool((long.loss[~long.success] >= short.loss[~long.success]).all())


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes(task_of: Callable[[int], Task], classes: int) -> None:
    task = task_of(classes)
    x, y = task.head(40)
    assert Square(eps=20 / 255, queries=300)(task.net, x, y).success.float().mean() > 0.8
