"""Counterattacks guided by multiple augmented views (MAC, CVPR 2026)."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from react_clip import functional, noise
from react_clip.augment import WeakAugmentation
from react_clip.config import Count, PixelLength, Positive
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, ascend, distance_from, relative_distance
from react_clip.encoders.base import Encoder
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier

# Branches of an image's random stream, and of each view's.
_VIEW, _START, _PROBE = range(3)


class MAC(Counterattack):
    r"""Counterattack the image and a weakly augmented view, each weighted by how far augmentation moves its feature.

    For each view v, with :math:`\delta` from sign steps up :math:`\lVert F(v + \delta) - F(v) \rVert^2` and T' another
    draw of the augmentation,

    .. math:: w = \mathrm{sigmoid}\Big(\frac{1}{T}\Big[\frac{\lVert F(T'v) - F(v) \rVert}{\lVert F(v) \rVert}
              - \tau\Big]\Big), \qquad z = \tfrac1V \textstyle\sum_v z(v + w\,\delta)

    ``score`` is the largest relative change over the views, ``gated`` whether it reaches :math:`\tau`, so that some
    view moved by half its counterattack or more. ``features`` are the unit mean of the views' unit features. Costs
    (``steps`` + 3) forward and ``steps`` backward passes per view. Gradients do not flow through this defence.

    >>> MAC().cost()
    (14, 8)
    """

    kind = "mac"
    colour = "#009E73"
    eps: PixelLength = 8 / 255
    steps: Count = 4
    step_size: PixelLength = 2 / 255
    tau: float = 0.7
    temperature: Positive = 0.01
    views: Count = 2
    """The image itself and its augmentations."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    """That both T and T' are draws of ReACT's weak augmentation, and that the steps start uniformly in the ball (the
    gradient is zero at the view itself), are guesses."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.views * (self.steps + 3), self.views * self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        features, ratios = [], []
        for number in range(self.views):
            stream = noise.fork(noise.fork(keys, _VIEW), number)
            view = pixels if number == 0 else self.augmentation(pixels, stream)
            unit, ratio = self._counterattack(clf.encoder, view, stream)
            features.append(unit)
            ratios.append(ratio)
        unit = torch.stack(features)
        score = torch.stack(ratios).amax(0)
        forward, backward = self.cost()
        return answer(
            clf,
            features=functional.normalize(unit.mean(0)),
            logits=clf.logits(unit).mean(0),
            passes=forward,
            backward_passes=backward,
            score=score,
            gated=score >= self.tau,
        )

    def _counterattack(self, encoder: Encoder, view: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Unit features of one counterattacked view, and how far the augmentation moved its raw feature."""
        ball = Ball(view, self.eps)
        anchor = encoder.raw_features(view)
        probe = encoder.raw_features(self.augmentation(view, noise.fork(stream, _PROBE)))
        ratio = relative_distance(probe, anchor)
        start = ball.random_start(noise.fork(stream, _START))
        moved = ascend(encoder, start, distance_from(anchor), ball, steps=self.steps, step_size=self.step_size)
        weight = ((ratio - self.tau) / self.temperature).sigmoid().to(view.dtype)[:, None, None, None]
        return encoder.encode_views(ball.project(view + weight * (moved - view))), ratio
