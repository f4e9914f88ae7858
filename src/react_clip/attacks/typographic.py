"""Typographic damage (Goh et al., 2021): the name of another class is written on the photo."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from react_clip import noise
from react_clip.preprocess import to_float, to_image

_WIDEST = 0.9
"""Largest width of the text, as a fraction of the image's."""


def write_other_names(images: Tensor, labels: Tensor, names: Sequence[str], keys: Tensor, height: float) -> Tensor:
    """Images with the name of a random other class in white with a black rim, at a random place.

    Args:
        images: ``[B, 3, H, W]`` in [0, 1].
        labels: classes ``[B]`` of the images, whose names are not written.
        names: names of all classes, at least two.
        keys: random streams ``[B]``.
        height: of the letters, as a fraction of H; smaller where a name would be too wide.
    """
    written = []
    for image, label, draw in zip(images, labels.tolist(), noise.uniform(keys, 3).tolist(), strict=True):
        picture = to_image(image)
        other = int(draw[0] * (len(names) - 1))
        _write(picture, names[other + (other >= label)], height, draw[1:])
        written.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return to_float(torch.stack(written)).to(images)


def _write(picture: Image.Image, text: str, height: float, place: Sequence[float]) -> None:
    """Write on a picture with the font that comes with Pillow."""
    pen, size = ImageDraw.Draw(picture), max(6.0, height * picture.height)
    for _ in range(2):
        font, rim = ImageFont.load_default(size), max(1, round(size / 12))
        left, top, right, bottom = pen.textbbox((0, 0), text, font, stroke_width=rim)
        size *= min(1.0, _WIDEST * picture.width / (right - left))
    x, y = place[0] * (picture.width - right + left) - left, place[1] * (picture.height - bottom + top) - top
    pen.text((x, y), text, "white", font, stroke_width=rim, stroke_fill="black")
