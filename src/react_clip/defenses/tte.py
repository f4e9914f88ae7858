"""Test-time transformation ensembling (TTE, ICCV workshops 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, Whole
from react_clip.defenses.base import Defended, Defense, answer
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

# Branch of an image's random stream.
CROPS = 0


class TTE(Defense):
    r"""Average the logits of the image and of padded crops of it, and those of its mirror image and of crops of that.

    .. math:: z(x) = \frac{1}{2 + 2C} \Big[ z(x) + z(\bar x) + \sum_{i=1}^C z(x_i) + z(\bar x_i) \Big]

    with :math:`x_i` a crop of the image's own size from the zero-padded image, at an offset of 0 to 2 ``padding`` - 1
    pixels drawn per image, and :math:`\bar x_i` the crop of the mirror image at the same offset. The paper's C crops
    differ; in the released code they are one and the same crop, which counts C times (and is encoded once here).
    ``features`` are the unit mean of the views' unit features. No gradients are needed; they flow through the mean
    where the pixels ask for them.

    >>> TTE().cost(), TTE(different=True).cost()
    ((4, 0), (10, 0))
    """

    kind = "tte"
    colour = "#44AA99"
    crops: Whole = 4
    """C."""
    different: bool = False
    """Draw every crop on its own, as the paper's text has it."""
    padding: Count = 4
    """Zeros on each side, in pixels: the released value, for images of 32 pixels."""
    max_batch: Count = 64
    """Most views in one encoder call."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 2 + 2 * self._encoded_crops, 0

    @property
    def _encoded_crops(self) -> int:
        return self.crops if self.different else min(self.crops, 1)

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        pixels = clf.encoder.prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            count, views = len(pixels), self.cost()[0]
            padded = F.pad(pixels, (self.padding,) * 4)
            offsets = self._offsets(noise.stream_keys(pixels, seed))

            def build(start: int, stop: int) -> Tensor:
                """The first half of the views is from the image, the second from its mirror image."""
                view = torch.arange(start, stop, device=pixels.device)
                row, image = view // count % (views // 2), view % count
                mirrored = (view // count >= views // 2)[:, None, None, None]
                source = torch.where(mirrored, padded[image].flip(-1), padded[image])
                return _crop(source, offsets[row, image], pixels.shape[-1])

            unit = clf.encoder.encode_in_batches(views * count, self.max_batch, build).reshape(views, count, -1)
            weights = torch.ones(views // 2, dtype=unit.dtype, device=unit.device)
            weights[1:] = self.crops / max(self._encoded_crops, 1)
            mean = (weights.repeat(2)[:, None, None] * unit).sum(0) / (2 + 2 * self.crops)
            return answer(clf, functional.normalize(mean), logits=clf.logits(mean), passes=self.cost())

    def _offsets(self, keys: Tensor) -> Tensor:
        """Top left corners ``[1 + crops, B, 2]`` in the padded image; the first is where the image itself lies."""
        draw = noise.uniform(noise.fork(keys, CROPS), 2 * self._encoded_crops) * (2 * self.padding)
        # A draw just below 1 can round up to the end of the range, which is outside it.
        corners = draw.long().clamp_max(2 * self.padding - 1).reshape(len(keys), self._encoded_crops, 2).transpose(0, 1)
        return torch.cat([torch.full((1, len(keys), 2), self.padding, device=keys.device), corners])


def _crop(padded: Tensor, corner: Tensor, size: int) -> Tensor:
    """Square crops ``[N, C, size, size]`` of the images at the given corners ``[N, 2]``."""
    side = torch.arange(size, device=padded.device)
    rows, columns = corner[:, :1] + side, corner[:, 1:] + side
    image = torch.arange(len(padded), device=padded.device)
    # Indices on both sides of the slice put the channels last.
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
