"""Test-time counterattack (TTC, CVPR 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import (
    Counterattack,
    ascend,
    distance_from,
    gradient,
    relative_distance,
)
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier

# Branch of an image's random stream.
_START = 0


class TTC(Counterattack):
    r"""Counterattack the images whose feature hardly changes under a small random perturbation.

    Adversarial images are "falsely stable": a random start :math:`\delta_0` changes their raw feature less than that of
    clean images. Where the change is below tau, N sign steps increase the feature distance, and the weighted mean of
    all iterates is classified:

    .. math::
        \rho = \frac{\lVert F(x + \delta_0) - F(x) \rVert}{\lVert F(x) \rVert}, \qquad
        \delta = \begin{cases} \sum_{i=0}^N w_i \delta_i,\; w_i \propto e^{\beta i} & \rho < \tau \\
                 \delta_0 & \text{else} \end{cases}, \qquad
        \delta_{i+1} = \Pi(\delta_i + s\,\mathrm{sign}\,\nabla \lVert F(x + \delta_i) - F(x) \rVert^2)

    ``score`` is :math:`\rho`, ``gated`` is :math:`\rho < \tau`. Such an image costs N + 2 forward and N backward
    passes. Any other costs 2 and 1: the pass that measures :math:`\rho` is also the answer, and its gradient is taken
    with it, before the gate is known. Gradients do not flow through this defence.

    >>> TTC().cost(), TTC(steps=5).cost()
    ((4, 2), (7, 5))
    """

    kind = "ttc"
    colour = "#D55E00"
    eps: PixelLength = 4 / 255
    steps: Count = 2
    """N; the published value against strong attacks is 5."""
    step_size: PixelLength = 1 / 255
    tau: float = 0.2
    """The counterattack is used where the relative change of the raw feature stays below this."""
    beta: float = 2.0
    """How much more each later iterate counts."""

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes an image can need."""
        return self.steps + 2, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        ball = Ball(pixels, self.eps)
        anchor = clf.encoder.raw_features(pixels)
        start = ball.random_start(noise.fork(keys, _START))
        features, slope = gradient(clf.encoder, start, distance_from(anchor))
        rho = relative_distance(features, anchor)
        gated = rho < self.tau
        output = functional.normalize(features)
        rows = gated.nonzero().flatten()
        if len(rows):
            moved = self._mixture(clf, ball.take(rows), anchor[rows], start[rows], slope[rows])
            output = output.index_copy(0, rows, clf.encoder.encode_views(moved))
        return answer(
            clf,
            features=output,
            passes=2 + self.steps * gated.long(),
            backward_passes=1 + (self.steps - 1) * gated.long(),
            score=rho,
            gated=gated,
        )

    def _mixture(self, clf: ZeroShotClassifier, ball: Ball, anchor: Tensor, start: Tensor, slope: Tensor) -> Tensor:
        """The counterattacked images: a weighted mean of the start and of all N iterates."""
        first, second, *later = (self.beta * torch.arange(self.steps + 1, dtype=torch.float64)).softmax(0).tolist()
        moved = ball.step(start, slope, self.step_size)
        mixture = first * start + second * moved
        for weight in later:
            moved = ascend(clf.encoder, moved, distance_from(anchor), ball, steps=1, step_size=self.step_size)
            mixture = mixture + weight * moved
        # Only rounding can have left the ball.
        return ball.project(mixture)
