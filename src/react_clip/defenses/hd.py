"""HD, hedge defense (Wu et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize

START = 0
"""Branch of an image's random stream: the start in the ball."""


class HD(Defense):
    r"""Perturb the image so that the loss summed over all classes rises, then classify it.

    The true class, to which the model responds most smoothly, is expected to lose least.

    .. math:: \max_{\lVert \delta \rVert_\infty \le \epsilon} \sum_c \mathrm{CE}(x + \delta, c)
              = \max_{\lVert \delta \rVert_\infty \le \epsilon} -\sum_c \log p_c(x + \delta)

    Every image is treated, with ``steps`` + 1 forward and ``steps`` backward passes.

    >>> HD().steps
    20
    """

    kind = "hd"
    colour = "#B5A900"
    eps: PixelLength = 8 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 20
    """Gradient steps."""
    step_size: PixelLength = 4 / 255

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the moved images."""

        def loss_of_all_classes(raw: Tensor) -> Tensor:
            log_p = x.logits(normalize(raw)).log_softmax(-1)
            return -torch.where(log_p.isfinite(), log_p, 0.0).sum(-1)  # infinite for classes an image does not have

        ball = x.ball(self.eps)
        start = ball.random_start(x.keys(START))
        moved = x.ascend(loss_of_all_classes, start, ball, steps=self.steps, step_size=self.step_size)
        return x.answer_at(moved), {}
