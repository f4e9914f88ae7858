r"""AugMix views in [0, 1], as test-time prompt tuning draws them: random resized crop, flip, then a mix of chains.

.. math:: v = m\,c + (1 - m) \sum_i w_i\,(o_{i,d_i} \circ \dots \circ o_{i,1})(c), \qquad
          w \sim \mathrm{Dirichlet}(1), \quad m \sim U(0, 1)

where c is the flipped crop and every o is one of nine operations. Published (in the code that TPT and its heirs share):
the nine operations and their magnitudes at severity 1, three chains of one to three operations, crops of 8 to 100 % of
the area with an aspect of 3/4 to 4/3. Different here: images stay floating-point numbers between operations where the
published code rounds to 8 bits after each, and crops blend with the neighbouring pixels at their edge.

The operations are written here because those of torchvision, an optional package, take one level for a whole batch, and
each view has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import noise
from react_clip.augment import affine
from react_clip.config import Configuration, FractionRange, Whole
from react_clip.preprocess import from_levels

ASPECT = (3 / 4, 4 / 3)
"""Width over height of a crop, drawn uniformly on the logarithmic scale."""
DEPTH = 3
"""Most operations in a chain. Each has a level of 10, drawn from U(0.1, 1)."""
_ATTEMPTS = 10
"""Crops drawn until one fits, as in torchvision; if none fits, the whole image is used."""

# Branches of a view's random stream.
_CROP, _MIX, _CHAINS = range(3)
# The operations, by the number that draws them; the first five are one affine map each.
_ROTATE, _SHEAR_X, _SHEAR_Y, _TRANSLATE_X, _TRANSLATE_Y, _AUTOCONTRAST, _EQUALIZE, _POSTERIZE, _SOLARIZE = range(9)
_OPERATIONS = 9


class AugMix(Configuration):
    """One random view per image and stream; ``chains=0`` leaves the crop and the flip alone.

    >>> views = AugMix()(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))
    >>> views.shape, bool(views.min() >= 0), bool(views.max() <= 1)
    (torch.Size([2, 3, 32, 32]), True, True)
    """

    removed: ClassVar[dict[str, Any]] = {"aspect": (3 / 4, 4 / 3), "depth": 3, "severity": 1.0}

    area: FractionRange = (0.08, 1.0)
    """Fraction of the image that a crop covers."""
    chains: Whole = 3
    """The published code sets 3 on ordinary data sets and 0 on ImageNet and its variants."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """One view per image ``[N, 3, S, S]``, drawn from its stream."""
        base = self._crop_and_flip(images, noise.uniform(noise.fork(keys, _CROP), 2 * _ATTEMPTS + 3))
        if not self.chains:
            return base
        draw = noise.uniform(noise.fork(keys, _MIX), self.chains + 1).to(images.dtype)
        # Dirichlet(1) is a set of exponentials over their sum.
        weight = noise.tabulated(_exponential, draw[:, 1:])
        weight = weight / reduce(torch.add, weight.unbind(1))[:, None]
        streams = noise.fork(keys, _CHAINS)
        ends = torch.stack([self._chain(base, noise.fork(streams, i)) for i in range(self.chains)], 1)
        mixed = (weight[:, :, None, None, None] * ends).sum(1)
        share = draw[:, 0, None, None, None]
        return (share * base + (1.0 - share) * mixed).clamp(0.0, 1.0)

    def _crop_and_flip(self, images: Tensor, draw: Tensor) -> Tensor:
        side = images.shape[-1]
        area = self.area[0] + (self.area[1] - self.area[0]) * draw[:, :_ATTEMPTS]
        aspect = noise.tabulated(_aspect, draw[:, _ATTEMPTS : 2 * _ATTEMPTS])
        sizes = (side * torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 2)).round().clamp_min(1.0)
        fits = (sizes <= side).all(2)
        first = fits.int().argmax(1)
        size = sizes[torch.arange(len(sizes), device=sizes.device), first]
        whole = torch.full_like(size, side)
        size = torch.where(fits.any(1, keepdim=True), size, whole)
        corner = (draw[:, -3:-1] * (side - size + 1.0)).floor()
        # Coordinates run from -1 to 1 over the side.
        zoom, centre = size / whole, (2.0 * corner + size) / whole - 1.0
        zoom[:, 0] *= torch.where(draw[:, -1] < 0.5, -1.0, 1.0)
        return affine(images, torch.diag_embed(zoom).to(images.dtype), centre.to(images.dtype), "border")

    def _chain(self, views: Tensor, keys: Tensor) -> Tensor:
        """One to three operations in a row, each with its own kind, level and sign."""
        draw = noise.uniform(keys, 1 + 3 * DEPTH)
        depth = 1 + (draw[:, 0] * DEPTH).long()
        for step in range(DEPTH):
            kind, level, sign = draw[:, 1 + 3 * step : 4 + 3 * step].unbind(1)
            chosen = torch.where(step < depth, (kind * _OPERATIONS).long(), -1)
            level = 0.1 + 0.9 * level
            views = self._apply(views, chosen, level, torch.where(sign < 0.5, -1.0, 1.0))
        return views

    def _apply(self, views: Tensor, chosen: Tensor, level: Tensor, sign: Tensor) -> Tensor:
        """Each view with the operation chosen for it; -1 leaves it alone."""

        def move(old: Tensor, rows: Tensor) -> Tensor:
            matrices, shifts = _moves(chosen[rows], level[rows], sign[rows], views.shape[-1])
            return affine(old, matrices.to(old.dtype), shifts.to(old.dtype))

        operations: list[tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = [
            ((chosen >= _ROTATE) & (chosen <= _TRANSLATE_Y), move),
            (chosen == _AUTOCONTRAST, lambda old, rows: autocontrast(old)),
            (chosen == _EQUALIZE, lambda old, rows: equalize(old)),
            (chosen == _POSTERIZE, lambda old, rows: posterize(old, 4 - (0.4 * level[rows]).long())),
            (chosen == _SOLARIZE, lambda old, rows: solarize(old, 256 - (25.6 * level[rows]).long())),
        ]
        for mask, operation in operations:
            rows = mask.nonzero().flatten()
            if len(rows):
                views = views.index_copy(0, rows, operation(views[rows], rows))
        return views


def _exponential(uniform: Tensor) -> Tensor:
    return -torch.log1p(-uniform)


def _aspect(uniform: Tensor) -> Tensor:
    low, high = map(math.log, ASPECT)
    return torch.exp(low + (high - low) * uniform)


def _moves(kind: Tensor, level: Tensor, sign: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Matrices ``[N, 2, 2]`` and shifts ``[N, 2]`` of :func:`affine`; at level 10 30 degrees, shear 0.3, side / 3."""
    # Whole degrees and pixels, as published: at severity 1 some of these operations do nothing.
    angle = torch.where(kind == _ROTATE, (3.0 * level).floor() * sign, 0.0) * math.radians(1.0)
    shift = (level * (side / 30.0)).floor() * sign * (2.0 / side)
    shear = 0.03 * level * sign
    shear_x, shear_y = torch.where(kind == _SHEAR_X, shear, 0.0), torch.where(kind == _SHEAR_Y, shear, 0.0)
    # A shear keeps the first row or column where it is: it turns about the corner, a rotation about the centre.
    shift_x = torch.where(kind == _TRANSLATE_X, shift, shear_x)
    shift_y = torch.where(kind == _TRANSLATE_Y, shift, shear_y)
    # Sines of GPUs are others than those of CPUs; for 3 degrees these series differ by less than 1e-8.
    square = angle * angle
    cos, sin = 1.0 - square * (0.5 - square * (1 / 24)), angle * (1.0 - square * (1 / 6))
    matrices = torch.stack([cos, shear_x - sin, shear_y + sin, cos], 1).reshape(-1, 2, 2)
    return matrices, torch.stack([shift_x, shift_y], 1)


def _levels(images: Tensor) -> Tensor:
    """Pixels as 8-bit numbers."""
    return (255.0 * images).round().long()


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to [0, 1]; a flat one stays.

    >>> autocontrast(torch.tensor([[[[0.25, 0.5, 0.75]]]]))
    tensor([[[[0.0000, 0.5000, 1.0000]]]])
    """
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (images - low) / torch.where(spread > 0, spread, 1.0), images)


def equalize(images: Tensor) -> Tensor:
    """Flatten the 8-bit histogram of each channel, the way Pillow does it; a channel of one level stays.

    >>> equalize(torch.arange(1024.0).reshape(1, 1, 32, 32) / 4095).max()
    tensor(1.)
    """
    levels = _levels(images).flatten(2)
    count = torch.zeros(*levels.shape[:2], 256, dtype=torch.long, device=images.device)
    count.scatter_add_(2, levels, torch.ones_like(levels))
    brightest = count.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - brightest) // 255
    below = count.cumsum(2) - count
    table = ((step // 2 + below) // step.clamp_min(1)).clamp_max(255)
    flat = from_levels(table.gather(2, levels).to(images.dtype))
    return torch.where((step > 0)[..., None], flat.reshape(images.shape), images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest bits of each 8-bit number.

    >>> 255 * posterize(torch.tensor([[[[100 / 255]]]]), torch.tensor([4]))
    tensor([[[[96.]]]])
    """
    width = (2 ** (8 - bits))[:, None, None, None]
    return from_levels((_levels(images) // width * width).to(images.dtype))


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert what is as bright as the threshold (of 255) or brighter.

    >>> solarize(torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([128]))
    tensor([[[[0.2500, 0.2500]]]])
    """
    limit = from_levels(threshold.to(images.dtype))[:, None, None, None]
    return torch.where(images < limit, images, 1.0 - images)
