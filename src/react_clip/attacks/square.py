"""Square attack (Andriushchenko et al., 2020): random search over squares of the image, without gradients."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.base import Attack
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.config import Count

_FIRST_FRACTION = 0.8
# After these queries the fraction of pixels that a square covers halves. Like AutoAttack's, the schedule is not
# stretched to the number of queries at hand.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


class Square(Attack):
    r"""Repaint one random square at a time and keep what raises the margin; an image rests once it is broken.

    The start is stripes one pixel wide, :math:`\pm\epsilon` per column and channel. Each query sets a square of
    :math:`\sqrt{pHW}` pixels a side to :math:`x \pm \epsilon`, one sign a channel, clamped to [0, 1], with p = 0.8
    halving on the paper's schedule. ``queries`` counts the stripes and the squares; the clean and the last pass come
    on top. Works on models without gradients.

    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 4, 4), 0.505), torch.tensor([0])
    >>> Square(eps=4/255, queries=200)(model, x, y).success
    tensor([True])
    """

    kind: ClassVar[str] = "square"
    queries: Count = 5000
    """Most answers asked for per image."""

    def search(self, problem: Problem) -> Tensor:
        """The images of largest margin; images that the target gets wrong already are returned as they are."""
        return run_in_turn(problem, problem.candidates(problem.x), [self._paint]).images

    def _paint(self, problem: Problem, rows: Tensor) -> Candidates:
        best = problem.candidates(_stripes(problem.fork(0)))
        problem.tick()
        for query in range(1, self.queries):
            active = (best.wrong < 1).nonzero().squeeze(1)
            if len(active) == 0:
                break
            part, current = problem.take(active), best.take(active)
            painted = _repaint(part.fork(query), current.images, _side(query, problem.x.shape))
            best = best.put(active, current.or_better(part.candidates(painted)))
            problem.tick()
        return best


def _stripes(problem: Problem) -> Tensor:
    batch, channels, _, width = problem.x.shape
    signs = _signs(noise.uniform(problem.keys, channels * width)).reshape(batch, channels, 1, width)
    return problem.ball.step(problem.x, signs, problem.ball.eps)


def _repaint(problem: Problem, images: Tensor, side: int) -> Tensor:
    """The images with one square repainted, at a random position with random signs."""
    batch, channels, height, width = images.shape
    draws = noise.uniform(problem.keys, 2 + channels)
    inside_rows = interval(draws[:, 0], side, height)[:, None, :, None]
    inside_columns = interval(draws[:, 1], side, width)[:, None, None, :]
    signs = _signs(draws[:, 2:]).reshape(batch, channels, 1, 1)
    painted = problem.ball.step(problem.x, signs, problem.ball.eps)
    return torch.where(inside_rows & inside_columns, painted, images)


def interval(draw: Tensor, side: int, length: int) -> Tensor:
    """``[n, length]``: which positions lie in a run of ``side`` (at most all), starting where a uniform draw says."""
    side = min(side, length)
    start = (draw * (length - side + 1)).long()[:, None]
    positions = torch.arange(length, device=draw.device)
    return (positions >= start) & (positions < start + side)


def _side(query: int, shape: torch.Size) -> int:
    """Side of the square at this query."""
    halvings = sum(query > mark for mark in _HALVINGS)
    return max(1, round(math.sqrt(_FIRST_FRACTION * 0.5**halvings * shape[2] * shape[3])))


def _signs(draws: Tensor) -> Tensor:
    return torch.where(draws < 0.5, -1.0, 1.0)
