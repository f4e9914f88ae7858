r"""The L-infinity ball around images, and sign-gradient ascent inside it.

Attacks, the inner attack of finetuning and the defences that move pixels all use these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from react_clip import noise
from react_clip.preprocess import from_levels


@dataclass(frozen=True, eq=False)
class Ball:
    """All images with pixels in [0, 1] that differ from ``centre`` by at most ``eps`` in every pixel.

    >>> ball = Ball(torch.tensor([[[[0.0, 0.5, 0.98]]]]), eps=0.1)
    >>> ball.project(torch.tensor([[[[-0.1, 0.7, 1.1]]]]))
    tensor([[[[0.0000, 0.6000, 1.0000]]]])
    """

    centre: Tensor
    """``[B, C, H, W]`` with pixels in [0, 1]."""
    eps: Tensor | float
    """One radius for all images, or one per image as ``[B, 1, 1, 1]``, or per pixel as ``[B, 1, H, W]``."""

    def take(self, rows: Tensor) -> Self:
        """The ball around some of the images."""
        return replace(self, centre=self.centre[rows], eps=self.eps[rows] if isinstance(self.eps, Tensor) else self.eps)

    def project(self, images: Tensor) -> Tensor:
        """The nearest images in the ball.

        Each bound is rounded once, so it is exact to 1 ulp of the larger pixel, and exactly the centre for eps = 0.
        """
        return images.clamp((self.centre - self.eps).clamp_min(0.0), (self.centre + self.eps).clamp_max(1.0))

    def step(self, images: Tensor, direction: Tensor, size: Tensor | float) -> Tensor:
        """Move every pixel by ``size`` along the sign of ``direction``, then project."""
        return self.project(images + size * direction.sign())

    def excess(self, images: Tensor) -> Tensor:
        """How far images leave their budgets ``[B]``, by their farthest pixel; at most 0 inside."""
        return ((images - self.centre).abs() - self.eps).flatten(1).amax(1)

    def on_8_bits(self, images: Tensor) -> Tensor:
        """The nearest images of the ball whose pixels are whole 255ths, as a file holds them.

        A pixel whose range has none (its clean value lies between two levels, and the budget is small) keeps that
        value.

        >>> ball = Ball(torch.full((1, 1, 1, 2), 100 / 255), eps=2 / 255)
        >>> 255 * ball.on_8_bits(torch.tensor([[[[101.6 / 255, 98.4 / 255]]]]))
        tensor([[[[102.,  98.]]]])
        """
        low = ((self.centre - self.eps).clamp_min(0.0) * 255.0 - 1e-4).ceil()
        high = ((self.centre + self.eps).clamp_max(1.0) * 255.0 + 1e-4).floor()
        # Adding zero turns -0.0 into 0.0, of which devices choose different ones.
        return torch.where(low <= high, from_levels((images * 255.0).round().clamp(low, high) + 0.0), self.centre)

    def random_start(self, keys: Tensor) -> Tensor:
        """Images drawn uniformly from the eps-cube and clamped to [0, 1]; ``keys`` are random streams ``[B]``."""
        unit = noise.uniform(keys, self.centre[0].numel()).reshape(self.centre.shape).to(self.centre.dtype)
        return self.project(self.centre + self.eps * (2.0 * unit - 1.0))


def gradient(values: Tensor, pixels: Tensor) -> Tensor | None:
    """The gradient ``[B, C, H, W]`` of values ``[B]`` in the pixels; ``None`` if they do not depend on the pixels.

    The values are summed over the batch, not averaged: a mean would shrink an image's gradient with the size of the
    batch, in half precision down to zero.
    """
    return torch.autograd.grad(values.sum(), pixels, allow_unused=True)[0] if values.requires_grad else None


def ascend(
    gradient_at: Callable[[Tensor], Tensor], start: Tensor, ball: Ball, *, steps: int, step_size: Tensor | float
) -> Tensor:
    r"""Sign-gradient ascent inside a ball; returns the last iterate.

    .. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign}\,\nabla_x \textstyle\sum_b \ell(x_k^b)\big)

    ``gradient_at`` returns the gradient at given images, for example by :func:`gradient`.

    >>> ball = Ball(torch.full((1, 1, 1, 2), 0.5), eps=0.25)
    >>> ascend(lambda images: torch.tensor([[[[3.0, -1.0]]]]), ball.centre, ball, steps=4, step_size=0.1)
    tensor([[[[0.7500, 0.2500]]]])
    """
    images = start
    for _ in range(steps):
        images = ball.step(images, gradient_at(images), step_size)
    return images
