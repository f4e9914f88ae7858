"""PGD in other balls: of the Euclidean distance, and of a patch that covers a small part of the image."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, PlainSerializer
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.pgd import PGD
from react_clip.attacks.square import interval
from react_clip.config import Count, PositiveLength, read_length, write_length
from react_clip.preprocess import from_levels

_MOST = 100.0
EuclideanLength = Annotated[float, Field(ge=0, le=_MOST), BeforeValidator(read_length), PlainSerializer(write_length)]
"""A length over all pixels of an image; may be written ``"128/255"``."""
_PLACE = 1


class EuclideanBall(linf.Ball):
    r"""All images with pixels in [0, 1] and :math:`\lVert u - x \rVert_2 \le \epsilon` over all pixels and channels.

    >>> ball = EuclideanBall(torch.full((1, 1, 1, 2), 0.5), eps=0.1)
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
        """Distances minus their budgets ``[B]``, positive outside the ball."""
        return (_length(images - self.centre) - self.eps).flatten()

    def on_8_bits(self, images: Tensor) -> Tensor:
        """Images whose pixels are whole 255ths: the largest changes first, by at least a level, while eps lasts.

        Rounding each pixel to the nearest level could leave the ball, or undo a change that is small everywhere.

        >>> ball = EuclideanBall(torch.full((1, 1, 1, 3), 100 / 255), eps=1.5 / 255)
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


class L2PGD(PGD):
    """PGD in the Euclidean ball: every step moves the whole image by ``step_size`` along its gradient.

    >>> import torch
    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 2, 2), 0.6), torch.tensor([0])
    >>> result = L2PGD(eps=0.1, steps=10)(model, x, y)
    >>> round(torch.linalg.vector_norm(result.images - x).item(), 2)
    0.1
    """

    kind: ClassVar[str] = "l2-pgd"
    most: ClassVar[float] = _MOST
    eps: EuclideanLength = 128 / 255
    """Budget: the largest Euclidean distance over all pixels and channels."""
    step_size: PositiveLength | Literal["eps/4"] = "eps/4"
    """Distance of one step; ``eps/4`` follows the budget."""

    def ball(self, x: Tensor, eps: Tensor, keys: Tensor) -> linf.Ball:
        """The Euclidean ball."""
        return EuclideanBall(x, eps)


class Patch(PGD):
    """Adversarial patch (Brown et al., 2017), one for each image: PGD on the pixels of a square at a random place.

    The square is the largest that covers at most ``area`` of the image. Inside it every pixel value is allowed, so
    ``eps`` is 1; a changed pixel outside leaves the budget.

    >>> import torch
    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 20, 20), 0.6), torch.tensor([0])
    >>> patch = Patch(area=0.05)
    >>> int((patch(model, x, y).images != x).any(1).sum()), patch.name  # 4 x 4 of 400 pixels are 4 %
    (16, 'patch-5%-100')
    """

    kind: ClassVar[str] = "patch"
    area: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Largest fraction of the pixels that the patch covers."""
    steps: Count = 100
    """Gradient steps."""
    step_size: PositiveLength | Literal["eps/4"] = 8 / 255
    """Change of a pixel value per step."""
    eps: Literal[1] = 1
    """A pixel of the patch may have any value."""

    @property
    def name(self) -> str:
        """``patch-5%-100``: area and steps."""
        return f"{self.kind}-{100 * self.area:g}%-{self.steps}"

    def ball(self, x: Tensor, eps: Tensor, keys: Tensor) -> linf.Ball:
        """Images that differ inside of the squares only."""
        side = math.isqrt(int(self.area * x.shape[2] * x.shape[3]))
        places = noise.uniform(noise.fork(keys, _PLACE), 2).T
        rows, columns = (interval(*pair) for pair in ((places[0], side, x.shape[2]), (places[1], side, x.shape[3])))
        return linf.Ball(x, eps * (rows[:, :, None] & columns[:, None])[:, None])
