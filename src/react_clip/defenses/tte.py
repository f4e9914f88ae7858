"""Test-time transformation ensembling (TTE, ICCV workshops 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.config import Count
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
    differ; in the released code, as here, they are one and the same crop, which counts C times: 4 passes. ``features``
    are the unit mean of the views' unit features.

    >>> TTE().crops
    4
    """

    kind = "tte"
    colour = "#44AA99"
    removed: ClassVar[dict[str, Any]] = {**Defense.removed, "different": False}
    crops: Count = 4
    """C."""
    padding: Count = 4
    """Zeros on each side, in pixels: the released value, for images of 32 pixels."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the views' features and of their logits."""
        mirrored = x.changed(lambda images: images.flip(-1))
        crops = [x.drawn(self._crop, CROPS), x.drawn(lambda images, keys: self._crop(images.flip(-1), keys), CROPS)]
        image, mirror, crop, mirror_crop = x.encode_together(x.image, mirrored, *crops)
        mean = (image + mirror + self.crops * (crop + mirror_crop)) / (2 + 2 * self.crops)
        return normalize(mean), {"logits": x.logits(mean)}

    def _crop(self, images: Tensor, keys: Tensor) -> Tensor:
        """One crop of each padded image."""
        # A draw just below 1 can round up to the end of the range, which is outside it.
        draw = (noise.uniform(keys, 2) * (2 * self.padding)).long().clamp_max(2 * self.padding - 1)
        padded = F.pad(images, (self.padding,) * 4)
        image, side = (torch.arange(count, device=images.device) for count in (len(images), images.shape[-1]))
        rows, columns = draw[:, :1] + side, draw[:, 1:] + side
        # Indices on both sides of the slice put the channels last.
        return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
