"""MAC: counterattacks of the image and of a weakly augmented view."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from react_clip import noise
from react_clip.augment import JitterFirst
from react_clip.config import Count, PixelLength, Positive
from react_clip.defenses.base import Defense
from react_clip.defenses.batch import straight_through
from react_clip.defenses.ttc import distance_from
from react_clip.defenses.view import View
from react_clip.functional import normalize, relative_distance
from react_clip.linf import Ball

VIEW, START, PROBE = range(3)
"""Branches: of an image's random stream, the views; of each view's stream, its start and its augmentation."""


class MAC(Defense):
    r"""Counterattack the image and a weakly augmented view, each weighted by how far augmentation moves its feature.

    For each view v, with :math:`\delta` from sign steps up :math:`\lVert F(v + \delta) - F(v) \rVert^2` from a uniform
    start in the ball, and T' another draw of the augmentation T,

    .. math:: w = \mathrm{sigmoid}\Big(\frac{1}{T}\Big[\frac{\lVert F(T'v) - F(v) \rVert}{\lVert F(v) \rVert}
              - \tau\Big]\Big), \qquad z = \tfrac1V \textstyle\sum_v z(v + w\,\delta)

    ``score`` is the largest relative change over the views; where it reaches :math:`\tau`, some view moved by half its
    counterattack or more. ``features`` are the unit mean of the views' unit features. Costs (``steps`` + 3) forward and
    ``steps`` backward passes per view.

    >>> MAC().views, MAC().tau
    (2, 0.7)
    """

    kind = "mac"
    colour = "#009E73"
    eps: PixelLength = 8 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 4
    """Gradient steps."""
    step_size: PixelLength = 2 / 255
    """Change of a pixel value per step."""
    tau: float = 0.7
    temperature: Positive = 0.01
    views: Count = 2
    """The image itself and its augmentations."""
    augmentation: JitterFirst = field(default_factory=JitterFirst)
    """T and T'."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the views' features and of their logits."""
        features, ratios = [], []
        for number in range(self.views):
            keys = noise.fork(x.keys(VIEW), number)
            view = x.pixels if number == 0 else self.augmentation(x.pixels, keys)
            moved, ratio = self._counterattack(x, view.detach(), keys)
            moved = straight_through(moved, view) if torch.is_grad_enabled() else moved
            features.append(x.encode(x.given(moved)))
            ratios.append(ratio)
        unit = torch.stack(features, 1)
        return normalize(unit.mean(1)), {"logits": x.logits(unit).mean(1), "score": torch.stack(ratios).amax(0)}

    def _counterattack(self, x: View, view: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The counterattacked view, and how far the augmentation moved its raw feature."""
        ball, anchor = Ball(view, self.eps), x.raw(view)
        ratio = relative_distance(x.raw(self.augmentation(view, noise.fork(keys, PROBE))), anchor)
        start = ball.random_start(noise.fork(keys, START))
        moved = x.ascend(distance_from(anchor), start, ball, steps=self.steps, step_size=self.step_size)
        weight = ((ratio - self.tau) / self.temperature).sigmoid().to(view.dtype)[:, None, None, None]
        return ball.project(view + weight * (moved - view)), ratio
