"""Test-time transformation ensembling (TTE, ICCV workshops 2021)."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.config import Count, Whole
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize

CROPS = 0
"""Branch of an image's random stream: the corners of the crops."""


class TTE(Defense):
    r"""Average the logits of the image and of padded crops of it, and those of its mirror image and of crops of that.

    .. math:: z(x) = \frac{1}{2 + 2C} \Big[ z(x) + z(\bar x) + \sum_{i=1}^C z(x_i) + z(\bar x_i) \Big]

    with :math:`x_i` a crop of the image's own size from the zero-padded image, at an offset of 0 to 2 ``padding`` - 1
    pixels drawn per image, and :math:`\bar x_i` the crop of the mirror image at the same offset. The paper's C crops
    differ; in the released code they are one and the same crop, which counts C times and is encoded once here: 4
    passes. ``features`` are the unit mean of the views' unit features.

    >>> TTE().crops
    4
    """

    kind = "tte"
    colour = "#44AA99"
    crops: Whole = 4
    """C."""
    different: bool = False
    """Draw every crop on its own, as the paper's text has it: 2 + 2 C passes."""
    padding: Count = 4
    """Zeros on each side, in pixels: the released value, for images of 32 pixels."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the views' features and of their logits."""
        drawn = self.crops if self.different else min(self.crops, 1)
        choices = itertools.product((False, True), range(drawn))
        crops = [x.drawn(partial(self._crop, mirror, drawn, i), CROPS) for mirror, i in choices]
        mirrored = x.changed(lambda images: images.flip(-1))
        unit = torch.stack(x.encode_together(x.image, mirrored, *crops), 1)
        weights = unit.new_full((unit.shape[1],), self.crops / max(drawn, 1))
        weights[:2] = 1.0
        mean = (weights[:, None] * unit).sum(1) / (2 + 2 * self.crops)
        return normalize(mean), {"logits": x.logits(mean)}

    def _crop(self, mirror: bool, count: int, number: int, images: Tensor, keys: Tensor) -> Tensor:
        """One of ``count`` crops of each image, or of its mirror image."""
        draw = noise.uniform(keys, 2 * count) * (2 * self.padding)
        # A draw just below 1 can round up to the end of the range, which is outside it.
        top, left = draw.long().clamp_max(2 * self.padding - 1)[:, 2 * number : 2 * number + 2].unbind(1)
        padded = F.pad(images.flip(-1) if mirror else images, (self.padding,) * 4)
        image, side = (torch.arange(count, device=images.device) for count in (len(images), images.shape[-1]))
        rows, columns = top[:, None] + side, left[:, None] + side
        # Indices on both sides of the slice put the channels last.
        return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
