"""Diversified counterattack (DOC, AAAI 2026)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, NonNegative, PixelLength
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, distance_from, gradient
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier

# Branches of an image's random stream.
_START, _PROBE, _DETOUR = range(3)


class DOC(Counterattack):
    r"""TTC's counterattack with momentum and orthogonal noise, weighted by how stable the image's feature is.

    With g the gradient of :math:`\lVert F(x + \delta) - F(x) \rVert` and n noise orthogonal to it, both of unit length,

    .. math::
        m_{t+1} = \mu\,m_t + g + \lambda n, \qquad \delta_{t+1} = \Pi(\delta_t + s\,\mathrm{sign}\,m_{t+1}), \qquad
        \delta = w\,\delta_T + (1 - w)\,\delta_0

    .. math::
        w = \mathrm{sigmoid}(\gamma\,[\tau - \hat\tau]), \qquad
        \hat\tau = 1 - \tfrac1M \textstyle\sum_i \cos\big(F(x), F(x + \epsilon\,\mathrm{sign}\,\eta_i)\big)

    ``score`` is :math:`\hat\tau`, ``gated`` is :math:`\hat\tau < \tau`, where the counterattack outweighs the random
    start. Costs ``steps`` + ``probes`` + 2 forward and ``steps`` backward passes. Gradients do not flow through this
    defence.

    The fields ``diversity``, ``momentum``, ``probes``, ``tau`` and ``gamma`` hold guesses (values of a port, none is
    published). Guesses too: that the start is uniform in the ball, the steps are sign steps, and m is the running sum
    above.

    >>> DOC().cost()
    (11, 4)
    """

    kind = "doc"
    colour = "#CC79A7"
    eps: PixelLength = 4 / 255
    steps: Count = 4
    step_size: PixelLength = 3 / 255
    diversity: NonNegative = 0.05
    """Lambda, the length of the orthogonal noise beside the unit gradient; a guess."""
    momentum: NonNegative = 0.75
    """Mu; a guess."""
    probes: Count = 5
    """M, the noisy views behind the stability estimate; a guess."""
    tau: float = 0.155
    """The counterattack has half its weight here; a guess."""
    gamma: NonNegative = 75.0
    """Steepness of the weight; a guess."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + self.probes + 2, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        ball = Ball(pixels, self.eps)
        anchor = clf.encoder.raw_features(pixels)
        shift = self._shift(clf, ball, functional.normalize(anchor), noise.fork(keys, _PROBE))
        weight = (self.gamma * (self.tau - shift)).sigmoid().to(pixels.dtype)[:, None, None, None]

        start = moved = ball.random_start(noise.fork(keys, _START))
        detours = noise.fork(keys, _DETOUR)
        direction = torch.zeros_like(pixels)
        for step in range(self.steps):
            # The squared distance has the same unit gradient as the distance, and one that is finite everywhere.
            _, slope = gradient(clf.encoder, moved, distance_from(anchor))
            direction = self.momentum * direction + self._diversified(slope, noise.fork(detours, step))
            moved = ball.step(moved, direction, self.step_size)

        # Only rounding can leave the ball between two points inside.
        output = clf.encoder.encode_views(ball.project(start + weight * (moved - start)))
        forward, backward = self.cost()
        return answer(
            clf, features=output, passes=forward, backward_passes=backward, score=shift, gated=shift < self.tau
        )

    def _shift(self, clf: ZeroShotClassifier, ball: Ball, unit: Tensor, keys: Tensor) -> Tensor:
        """Mean cosine distance under sign noise of the ball's size."""
        total = torch.zeros_like(unit[:, 0])
        for probe in range(self.probes):
            grain = noise.normal(noise.fork(keys, probe), ball.centre.shape[1:])
            noisy = clf.encoder.encode_views(ball.step(ball.centre, grain.to(ball.centre.dtype), self.eps))
            total = total + (unit * noisy).sum(-1)
        return 1.0 - total / self.probes

    def _diversified(self, slope: Tensor, keys: Tensor) -> Tensor:
        """Unit gradients plus ``diversity`` times unit noise orthogonal to them."""
        unit = F.normalize(slope.flatten(1))
        grain = noise.normal(keys, unit.shape[1:]).to(unit.dtype)
        grain = F.normalize(grain - (grain * unit).sum(1, keepdim=True) * unit)
        return (unit + self.diversity * grain).reshape(slope.shape)
