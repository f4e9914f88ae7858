"""Targeted FAB (Croce and Hein, 2020): the nearest adversarial image, by steps along the linearised boundary."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from react_clip.attacks.base import Attack
from react_clip.attacks.losses import ranked_targets, target_margin
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.config import Count

_BIAS = 0.1  # largest pull towards the original image
_OVERSHOOT = 1.05
_RETREAT = 0.9  # an adversarial point moves back to this fraction of its distance, to look for a nearer one


class FAB(Attack):
    r"""Walk along the boundary between the label and one target class, and remember the nearest point across it.

    With :math:`d_k, d_0` the smallest L-inf moves from :math:`x_k` and from the original :math:`x` onto the linearised
    boundary :math:`\{u : z_t(u) = z_y(u)\}` inside [0, 1], and
    :math:`a = \min(\lVert d_k \rVert / (\lVert d_k \rVert + \lVert d_0 \rVert), 0.1)`,

    .. math:: x_{k+1} = (1 - a)(x_k + 1.05\, d_k) + a\,(x + 1.05\, d_0), \quad \text{clamped to } [0, 1];

    an :math:`x_{k+1}` that breaks the image is recorded if it is the nearest so far, then moved a tenth of the way back
    to :math:`x`. One run a target, strongest wrong class first, as long as the nearest point is outside the eps-ball;
    the result is that point, clipped to the ball. Nothing is random: all seeds give the same result.

    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 2, 2), 0.51), torch.tensor([0])
    >>> result = FAB(eps=4/255, steps=20)(model, x, y)
    >>> bool(result.success), round((result.images - x).abs().max().item(), 3)  # 0.01 to the boundary, then 8 bits
    (True, 0.012)
    """

    kind: ClassVar[str] = "fab"
    steps: Count = 100
    """Steps per target class."""
    targets: Count = 9
    """Wrong classes to try, the strongest first."""

    @property
    def name(self) -> str:
        """``fab-t-100``."""
        return f"fab-t-{self.steps}"

    def search(self, problem: Problem) -> Tensor:
        """The nearest adversarial images over all targets, clipped to the balls."""
        clean = problem.logits(problem.x)
        ranks = ranked_targets(clean, problem.y, self.targets).unbind(dim=1)
        attempts = [partial(self._walk, targets) for targets in ranks]
        return run_in_turn(problem, Candidates.judged(problem.x, clean, problem.y), attempts).images

    def _walk(self, targets: Tensor, problem: Problem, rows: Tensor) -> Candidates:
        """The nearest images across the boundary to the classes ``targets[rows]``, clipped to the balls."""
        origin = x = problem.x
        nearest, distance = origin, torch.full_like(x[:, :1, :1, :1], torch.inf)
        towards_target = partial(target_margin, targets=targets[rows])
        for _ in range(self.steps):
            _, height, normal = problem.gradient(x, towards_target)
            height = height.to(x.dtype)
            fall = (normal * (origin - x)).flatten(1).sum(1)
            from_x = onto_plane(x, normal, height)
            from_origin = onto_plane(origin, normal, height + fall)
            length_x, length_origin = _length(from_x), _length(from_origin)
            pull = (length_x / (length_x + length_origin).clamp_min(1e-12)).clamp_max(_BIAS)
            x = (1.0 - pull) * (x + _OVERSHOOT * from_x) + pull * (origin + _OVERSHOOT * from_origin)
            x = x.clamp(0.0, 1.0)
            broken = (problem.logits(x).argmax(dim=1) != problem.y)[:, None, None, None]
            length = _length(x - origin)
            nearer = broken & (length < distance)
            nearest, distance = torch.where(nearer, x, nearest), torch.where(nearer, length, distance)
            x = torch.where(broken, origin + _RETREAT * (x - origin), x)
            problem.tick()
        return problem.candidates(problem.ball.project(nearest))


def onto_plane(x: Tensor, normal: Tensor, height: Tensor) -> Tensor:
    r"""Smallest L-inf move :math:`d` with :math:`w \cdot d = -h` and :math:`x + d \in [0, 1]`.

    Where no such move exists, as far as the image range allows. Every pixel moves by the same amount :math:`s` against
    :math:`\mathrm{sign}(h) w`, or by the room :math:`r_i` it has if that is less, so :math:`s` solves
    :math:`\sum_i |w_i| \min(s, r_i) = |h|`. The left side is piecewise linear with kinks at the sorted rooms: find the
    piece, then divide.

    >>> x, normal = torch.tensor([0.5, 0.1]).reshape(1, 1, 1, 2), torch.tensor([1.0, 1.0]).reshape(1, 1, 1, 2)
    >>> onto_plane(x, normal, torch.tensor([0.4])).flatten()
    tensor([-0.3000, -0.1000])
    """
    weight, wanted = normal.flatten(1).abs(), height.abs()[:, None]
    downhill = -(normal * height.sign()[:, None, None, None]).sign()
    room = torch.where(downhill > 0, 1.0 - x, torch.where(downhill < 0, x, torch.zeros_like(x)))
    kinks, order = room.flatten(1).sort(dim=1)
    weight = weight.gather(1, order)
    spent = (weight * kinks).cumsum(1)  # what pixels up to here give when they use all their room
    rest = weight.flip(1).cumsum(1).flip(1)  # weight of the pixels from here on
    reached = spent + kinks * (rest - weight)  # the left side at each kink
    piece = (reached < wanted).sum(1, keepdim=True).clamp_max(weight.shape[1] - 1)
    before = (spent - weight * kinks).gather(1, piece)
    amount = (wanted - before) / rest.gather(1, piece).clamp_min(1e-12)
    amount = amount.clamp(min=0.0).minimum(kinks[:, -1:])
    return downhill * room.minimum(amount[:, :, None, None])


def _length(move: Tensor) -> Tensor:
    return move.abs().amax(dim=(1, 2, 3), keepdim=True)
