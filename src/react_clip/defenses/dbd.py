r"""DBD, directional bias-guided defence (Liu et al., ICLR 2026): follow the drift of views if they agree on it.

With f the image's unit feature and :math:`d_i = v_i - f` the drifts of the 16 views (of 31) whose predictions have the
lowest entropy,

.. math:: \bar d = \tfrac1{16} \textstyle\sum_i d_i, \qquad
          s = \tfrac1{16} \textstyle\sum_i \cos(d_i, \bar d), \qquad
          \text{answer: } f + (2.5 \text{ if } s > 0.8 \text{ else } 1)\,\bar d

The views are 16 crops of 50 to 100 % of the area with flips, three reductions to 3 bits (rounded down, to the nearest,
up), JPEG files of quality 50, 60 and 75, six copies with noise of 0.1, and filters of 5 x 5 pixels (median, mean,
Gaussian). Rounding to the nearest and up turns the brightest pixels black, because 256 becomes 0 in eight bits; that is
in the released code, and so it is here. The released code works on 8-bit images; here only the reductions and the JPEG
files do. It also takes text features from descriptions by a language model; here they are the classifier's own.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, NonNegative
from react_clip.defenses.augmix import AugMix
from react_clip.defenses.base import Defended, Defense, answer, encode_with_views, straight_through
from react_clip.defenses.prompt_tuning import most_confident
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

VIEWS = 31
NOISE = 0.1


class DBD(Defense):
    """Correct every image along the mean drift of its surest views, and 2.5 times as far where these views agree.

    ``score`` is s, ``gated`` is s > threshold. Gradients flow through all of it where the pixels ask for them; the
    reductions to 3 bits and the JPEG files count as the identity there.

    >>> DBD().cost()
    (32, 0)
    """

    kind = "dbd"
    colour = "#BBAA33"
    selected: Annotated[int, Field(ge=1, le=VIEWS)] = 16
    """Number of views, those of lowest entropy, whose drifts are averaged."""
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.8
    """Mean cosine of the drifts with their mean above which an image counts as attacked."""
    alpha: NonNegative = 2.5
    """Strength of the correction of attacked images; that of the others is 1, the mean of the views."""
    max_batch: Count = 64
    """Most views in one encoder call."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 1 + VIEWS, 0

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        pixels = clf.encoder.prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            plain, views = encode_with_views(clf.encoder, pixels, seed, make_views, VIEWS, self.max_batch)
            sure = most_confident(clf.logits(views), self.selected)
            chosen = views[torch.arange(len(views), device=views.device)[:, None], sure]
            features, score, gated = self.correct(plain, chosen)
            return answer(clf, features, passes=self.cost(), score=score.detach(), gated=gated)

    def correct(self, plain: Tensor, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Corrected unit features ``[B, D]``, s and s > threshold ``[B]``; from features ``[B, D]`` and ``[B, V, D]``.

        >>> DBD(alpha=1.0).correct(torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.6, 0.8], [0.6, 0.8]]]))
        (tensor([[0.6000, 0.8000]]), tensor([1.]), tensor([True]))
        """
        drifts = views - plain[:, None]
        mean = drifts.mean(1)
        score = (_direction(drifts) * _direction(mean)[:, None]).sum(-1).mean(1)
        gated = score > self.threshold
        strength = torch.where(gated, self.alpha, 1.0)[:, None]
        return functional.normalize(plain + strength * mean), score, gated


def _direction(vectors: Tensor) -> Tensor:
    """Vectors of unit length, as released: rounding errors of a view equal to the image have no direction."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / (length + 1e-8)


def make_views(images: Tensor, first: int, keys: Tensor) -> Tensor:
    """One view per image ``[N, 3, S, S]``: row n has view ``first`` + n, counted around the 31."""
    views = images
    for start, stop, operation in _OPERATIONS:
        rows = [row for row in range(len(images)) if start <= (first + row) % VIEWS < stop]
        if rows:
            chosen = torch.tensor(rows, device=images.device)
            views = views.index_copy(0, chosen, operation(images[chosen], keys[chosen]))
    return views


Operation = Callable[[Tensor, Tensor], Tensor]
"""From images ``[n, 3, S, S]`` and their random streams ``[n]`` to views of them."""


def _reduce(rounding: Callable[[Tensor], Tensor]) -> Operation:
    """Reduction to 3 bits; 256 wraps around to 0."""

    def reduce(images: Tensor, keys: Tensor) -> Tensor:
        levels = (255.0 * images.detach()).round()
        return straight_through(rounding(levels / 32.0) * 32.0 % 256.0 / 255.0, images)

    return reduce


def _jpeg(quality: int) -> Operation:
    """A JPEG file written and read again."""

    def compress(images: Tensor, keys: Tensor) -> Tensor:
        read = []
        for pixels in (255.0 * images.detach()).round().byte().permute(0, 2, 3, 1).cpu().numpy():
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=quality)
            read.append(np.array(Image.open(file)))
        stack = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2).to(images)
        return straight_through(stack / 255.0, images)

    return compress


def _add_noise(images: Tensor, keys: Tensor) -> Tensor:
    return noise.noisy_view(images, keys, images.new_full((len(images),), NOISE)).clamp(0.0, 1.0)


def _median(images: Tensor, keys: Tensor) -> Tensor:
    windows = F.pad(images, (2, 2, 2, 2), mode="replicate").unfold(2, 5, 1).unfold(3, 5, 1)
    return windows.flatten(4).median(-1).values


def _filter(weights: list[float]) -> Operation:
    """A separable filter with these weights in both directions; borders are mirrored."""

    def convolve(images: Tensor, keys: Tensor) -> Tensor:
        line = torch.tensor(weights, device=images.device, dtype=images.dtype) / sum(weights)
        kernel = (line[:, None] * line).expand(3, 1, 5, 5)
        return F.conv2d(F.pad(images, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)

    return convolve


_OPERATIONS: tuple[tuple[int, int, Operation], ...] = (
    (0, 16, AugMix(area=(0.5, 1.0), chains=0)),
    *((16 + i, 17 + i, _reduce(rounding)) for i, rounding in enumerate((torch.floor, torch.round, torch.ceil))),
    *((19 + i, 20 + i, _jpeg(quality)) for i, quality in enumerate((50, 60, 75))),
    (22, 28, _add_noise),
    (28, 29, _median),
    (29, 30, _filter([1.0] * 5)),
    (30, 31, _filter([1.0, 4.0, 6.0, 4.0, 1.0])),
)
"""First view, the one after the last, and what makes them."""
