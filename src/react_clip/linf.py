r"""The L-infinity ball around images, and sign-gradient ascent inside it.

Attacks, the inner attack of finetuning and the defences that move pixels all use these two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip import noise


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
    """One radius for all images, or one per image as ``[B, 1, 1, 1]``."""

    def take(self, rows: Tensor) -> Ball:
        """The ball around some of the images."""
        return Ball(self.centre[rows], self.eps[rows] if isinstance(self.eps, Tensor) else self.eps)

    def project(self, images: Tensor) -> Tensor:
        """The nearest images in the ball.

        Each bound is rounded once, so it is exact to 1 ulp of the larger pixel, and exactly the centre for eps = 0.
        """
        return images.clamp((self.centre - self.eps).clamp_min(0.0), (self.centre + self.eps).clamp_max(1.0))

    def step(self, images: Tensor, direction: Tensor, size: Tensor | float) -> Tensor:
        """Move every pixel by ``size`` along the sign of ``direction``, then project."""
        return self.project(images + size * direction.sign())

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
