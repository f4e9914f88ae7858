"""Test-time transformation ensembling (TTE, ICCV workshops 2021)."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, Whole
from react_clip.defenses.base import Defended, Defense, answer
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

# Branch of an image's random stream.
_CROPS = 0


class TTE(Defense):
    r"""Average the logits of the image, its mirror image, padded crops, and the crops' mirror images.

    .. math:: z(x) = \frac{1}{2 + 2C} \Big[ z(x) + z(\bar x) + \sum_{i=1}^C z(x_i) + z(\bar x_i) \Big]

    with :math:`x_i` a crop of the image's own size from the zero-padded image, at an offset drawn per image.
    ``features`` are the unit mean of the views' unit features. Costs 2 + 2C forward passes and no gradients; gradients
    flow through the mean where the pixels ask for them.

    >>> TTE().cost()
    (10, 0)
    """

    kind = "tte"
    colour = "#44AA99"
    crops: Whole = 4
    padding: Annotated[float, Field(ge=0, le=0.5)] = 1 / 8
    """Zeros on each side, as a share of the side. A guess: the 4 of 32 pixels that are usual on CIFAR."""
    max_batch: Count = 64
    """Most views in one encoder call."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 2 + 2 * self.crops, 0

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        pixels = clf.encoder.prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            count, views = len(pixels), self.cost()[0]
            margin = round(self.padding * pixels.shape[-1])
            padded = F.pad(pixels, (margin,) * 4)
            offsets = self._offsets(noise.stream_keys(pixels, seed), margin)

            def build(start: int, stop: int) -> Tensor:
                """The first half of the views is upright, the second half mirrors it."""
                view = torch.arange(start, stop, device=pixels.device)
                row, image = view // count % (views // 2), view % count
                upright = _crop(padded, image, offsets[row, image], pixels.shape[-1])
                mirrored = view // count >= views // 2
                return torch.where(mirrored[:, None, None, None], upright.flip(-1), upright)

            unit = clf.encoder.encode_in_batches(views * count, self.max_batch, build).reshape(views, count, -1)
            features, logits = functional.normalize(unit.mean(0)), clf.logits(unit).mean(0)
            return answer(clf, features, logits=logits, passes=self.cost())

    def _offsets(self, keys: Tensor, margin: int) -> Tensor:
        """Top left corners ``[1 + C, B, 2]`` in the padded image; the first is where the image itself lies."""
        draw = noise.uniform(noise.fork(keys, _CROPS), 2 * self.crops) * (2 * margin + 1)
        # A draw just below 1 can round up to the end of the range, which is outside it.
        corners = draw.long().clamp_max(2 * margin).reshape(len(keys), self.crops, 2).transpose(0, 1)
        return torch.cat([torch.full((1, len(keys), 2), margin, device=keys.device), corners])


def _crop(padded: Tensor, image: Tensor, corner: Tensor, size: int) -> Tensor:
    """Square crops ``[N, C, size, size]`` of the given images at the given corners."""
    side = torch.arange(size, device=padded.device)
    rows, columns = corner[:, :1] + side, corner[:, 1:] + side
    # Indices on both sides of the slice put the channels last.
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
