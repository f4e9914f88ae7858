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

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import noise
from react_clip.augment import filtered, jpeg
from react_clip.config import NonNegative
from react_clip.defenses.augmix import AugMix
from react_clip.defenses.base import Defense
from react_clip.defenses.batch import straight_through
from react_clip.defenses.prompt_tuning import most_confident
from react_clip.defenses.view import View
from react_clip.functional import normalize
from react_clip.preprocess import from_levels

NOISE = 0.1
CROPS = AugMix(area=(0.5, 1.0), chains=0)
CROP_COUNT = 16


class DBD(Defense):
    """Correct every image along the mean drift of its surest views, and 2.5 times as far where these views agree.

    ``score`` is s. 32 passes. Gradients flow through all of it where the pixels ask for them; the reductions to 3 bits
    and the JPEG files count as the identity there.

    >>> DBD().selected, DBD().threshold
    (16, 0.8)
    """

    kind = "dbd"
    colour = "#BBAA33"
    selected: Annotated[int, Field(ge=1, le=31)] = 16
    """Number of views, those of lowest entropy, whose drifts are averaged."""
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.8
    """Mean cosine of the drifts with their mean from which an image counts as attacked."""
    alpha: NonNegative = 2.5
    """Strength of the correction of attacked images; that of the others is 1, the mean of the views."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The features moved along the mean drift."""
        crops = x.drawn(CROPS, None, range(CROP_COUNT))
        others = (x.drawn(operation, number) for number, operation in enumerate(OPERATIONS, start=CROP_COUNT))
        plain, cropped, *single = x.encode_together(x.image, crops, *others)
        views = torch.cat([cropped, torch.stack(single, 1)], 1)
        sure = most_confident(x.logits(views), self.selected)
        drifts = views.gather(1, sure[..., None].expand(-1, -1, views.shape[-1])) - plain[:, None]
        mean = drifts.mean(1)
        score = (_direction(drifts) * _direction(mean)[:, None]).sum(-1).mean(1)
        strength = torch.where(x.gate(score, self.threshold), self.alpha, 1.0)
        return normalize(plain + strength[:, None] * mean), {"score": score}


def _direction(vectors: Tensor) -> Tensor:
    """Vectors of unit length, as released: rounding errors of a view equal to the image have no direction."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / (length + 1e-8)


def _reduce(rounding: Callable[[Tensor], Tensor], images: Tensor, _: Tensor) -> Tensor:
    """Reduction to 3 bits; 256 wraps around to 0."""
    levels = (255.0 * images.detach()).round()
    return straight_through(from_levels(rounding(levels / 32.0) * 32.0 % 256.0), images)


def _compress(quality: int, images: Tensor, _: Tensor) -> Tensor:
    return straight_through(jpeg(images, quality), images)


def _add_noise(images: Tensor, keys: Tensor) -> Tensor:
    return noise.noisy_view(images, keys, images.new_full((len(images),), NOISE)).clamp(0.0, 1.0)


def _median(images: Tensor, _: Tensor) -> Tensor:
    windows = F.pad(images, (2, 2, 2, 2), mode="replicate").unfold(2, 5, 1).unfold(3, 5, 1)
    return windows.flatten(4).median(-1).values


def _smooth(weights: tuple[float, ...], images: Tensor, _: Tensor) -> Tensor:
    """Images filtered with these weights in both directions."""
    line = torch.tensor(weights) / sum(weights)
    return filtered(images, (line[:, None] * line).expand(len(images), -1, -1))


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *(partial(_reduce, rounding) for rounding in (torch.floor, torch.round, torch.ceil)),
    *(partial(_compress, quality) for quality in (50, 60, 75)),
    *[_add_noise] * 6,
    _median,
    partial(_smooth, (1.0,) * 5),
    partial(_smooth, (1.0, 4.0, 6.0, 4.0, 1.0)),
)
"""The views after the crops."""
