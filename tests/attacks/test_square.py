from __future__ import annotations

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


def test_broken_images_are_left_alone(task: Task) -> None:
    x, y = task.clear_cut(5)
    result = Square(eps=8 / 255, queries=150)(task.net, x, y)
    assert result.success.tolist() == [True] * 5 + [False] * 5
    assert bool((result.queries[:5] < 100).all())
    assert result.queries[5:].tolist() == [2 + 150] * 5


def test_longer_searches_never_do_worse(task: Task) -> None:
    """The first queries of a longer search are those of the shorter one."""
    x, y = task.head(40)
    short, long = (Square(eps=6 / 255, queries=q)(task.net, x, y) for q in (50, 300))
    assert bool((long.success >= short.success).all())
    assert bool((long.loss[~long.success] >= short.loss[~long.success]).all())
