"""The ball of the Euclidean distance around images, for :func:`react_clip.linf.ascend` too."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import linf, noise
from react_clip.preprocess import from_levels


class Ball(linf.Ball):
    r"""All images with pixels in [0, 1] and :math:`\lVert u - x \rVert_2 \le \epsilon` over all pixels and channels.

    >>> ball = Ball(torch.full((1, 1, 1, 2), 0.5), eps=0.1)
    >>> ball.project(torch.tensor([[[[0.8, 0.9]]]]))
    tensor([[[[0.5600, 0.5800]]]])
    """

    def project(self, images: Tensor) -> Tensor:
        """The nearest images of the sphere for those outside of it, then clamped to [0, 1], which lies nearer still."""
        move = images - self.centre
        return (self.centre + move * (self.eps / _length(move)).clamp_max(1.0)).clamp(0.0, 1.0)

    def step(self, images: Tensor, direction: Tensor, size: Tensor | float) -> Tensor:
        """Move every image by ``size`` along ``direction``, then project."""
        return self.project(images + size * direction / _length(direction))

    def random_start(self, keys: Tensor) -> Tensor:
        """Images on the sphere in uniform directions, as nearly all of a ball of so many dimensions lies there."""
        return self.step(self.centre, noise.normal(keys, self.centre.shape[1:]).to(self.centre), self.eps)

    def excess(self, images: Tensor) -> Tensor:
        """How far the distances ``[B]`` exceed their budgets."""
        return (_length(images - self.centre) - self.eps).flatten()

    def on_8_bits(self, images: Tensor) -> Tensor:
        """Images whose pixels are whole 255ths: the largest changes first, by at least a level, while eps lasts.

        Rounding each pixel to the nearest level could leave the ball, or undo a change that is small everywhere.

        >>> ball = Ball(torch.full((1, 1, 1, 3), 100 / 255), eps=1.5 / 255)
        >>> 255 * ball.on_8_bits(torch.tensor([[[[101.2 / 255, 99.7 / 255, 100 / 255]]]]))
        tensor([[[[101.,  99., 100.]]]])
        """
        move, clean, nearest = images - self.centre, 255.0 * self.centre, (255.0 * images).round()
        up, down = (clean + 1e-3).floor() + 1.0, (clean - 1e-3).ceil() - 1.0
        levels = torch.where(move > 0, nearest.maximum(up), nearest.minimum(down)).clamp(0.0, 255.0)
        levels = torch.where(move == 0, self.centre, from_levels(levels))
        order = move.abs().flatten(1).argsort(1, descending=True)
        cost = (levels - self.centre).double().square().flatten(1).gather(1, order).cumsum(1)
        paid = cost <= torch.as_tensor(self.eps).to(cost).square().reshape(-1, 1)
        kept = torch.zeros_like(paid).scatter(1, order, paid).reshape(move.shape)
        return torch.where(kept, levels, self.centre)


def _length(move: Tensor) -> Tensor:
    return move.square().sum((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-12)
