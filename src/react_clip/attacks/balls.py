"""PGD in other balls: of the Euclidean distance, and of a patch that covers a small part of the image."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer
from torch import Tensor

from react_clip import l2, linf, noise
from react_clip.attacks.pgd import PGD
from react_clip.attacks.square import interval
from react_clip.config import Count, PositiveLength, read_length, write_length

_MOST = 100.0
EuclideanLength = Annotated[float, Field(ge=0, le=_MOST), BeforeValidator(read_length), PlainSerializer(write_length)]
"""A length over all pixels of an image; may be written ``"128/255"``."""
_PLACE = 1


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
        return l2.Ball(x, eps)


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
