"""AugMix: its operations are Pillow's, its draws cover what is published, and every view is drawn alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from react_clip.augment import affine
from react_clip.defenses import augmix
from react_clip.defenses.augmix import AugMix, autocontrast, equalize, posterize, solarize

SIDE = 48


def pictures(count: int = 3) -> Tensor:
    """Smooth 8-bit pictures that use neither all levels nor both ends."""
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return (255 * (0.15 + 0.7 * smooth)).round() / 255


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def keys(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count)


FLAT = torch.full((3, SIDE, SIDE), 102 / 255)
TWO_LEVELS = torch.where(torch.arange(SIDE) < 20, 51 / 255, 153 / 255).expand(3, SIDE, SIDE)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (equalize, ImageOps.equalize),
        (autocontrast, ImageOps.autocontrast),
        *[(partial(posterize, bits=torch.tensor([n])), partial(ImageOps.posterize, bits=n)) for n in (1, 3, 4, 8)],
        *[
            (partial(solarize, threshold=torch.tensor([n])), partial(ImageOps.solarize, threshold=n))
            for n in (0, 90, 128, 256)
        ],
    ],
)
def test_operations_equal_pillows(ours: Any, theirs: Any) -> None:
    for image in (*pictures(), FLAT, TWO_LEVELS, torch.zeros(3, SIDE, SIDE), torch.ones(3, SIDE, SIDE)):
        # Autocontrast is not rounded to 8 bits here.
        atol = 1.01 / 255 if ours is autocontrast else 1e-6
        assert torch.allclose(ours(image[None])[0], from_pillow(theirs(to_pillow(image))), atol=atol)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("kind", range(5))
def test_geometry_equals_pillow(kind: int, sign: int) -> None:
    level = 5.05
    image = pictures(1)
    moves = augmix._moves(torch.tensor([kind]), torch.tensor([level]), torch.tensor([float(sign)]), SIDE)
    ours = affine(image, *moves)[0]
    picture, bilinear = to_pillow(image[0]), Image.Resampling.BILINEAR
    shear, shift = 0.03 * level * sign, int(level * SIDE / 30) * sign
    matrices = {
        augmix._SHEAR_X: (1, shear, 0, 0, 1, 0),
        augmix._SHEAR_Y: (1, 0, 0, shear, 1, 0),
        augmix._TRANSLATE_X: (1, 0, shift, 0, 1, 0),
        augmix._TRANSLATE_Y: (1, 0, 0, 0, 1, shift),
    }
    if kind == augmix._ROTATE:
        theirs = picture.rotate(int(3 * level) * sign, resample=bilinear)
    else:
        theirs = picture.transform((SIDE, SIDE), Image.Transform.AFFINE, matrices[kind], resample=bilinear)
    # Pillow rounds to 8 bits, and does not blend the last pixel with the black around it.
    off = (ours - from_pillow(theirs)).abs().amax(0)
    assert (off > 2 / 255).float().mean() < 0.06
    assert (ours - image[0]).abs().mean() > 0.01, "it must move something"


def test_crops_have_the_published_sizes_and_go_everywhere() -> None:
    ramp = torch.linspace(0, 1, SIDE)
    image = torch.stack([ramp.expand(SIDE, SIDE), ramp[:, None].expand(SIDE, SIDE), torch.zeros(SIDE, SIDE)])[None]
    views = AugMix(chains=0)(image.expand(600, -1, -1, -1), keys(600))
    across = views[:, 0, 0, -1] - views[:, 0, 0, 0]
    down = views[:, 1, -1, 0] - views[:, 1, 0, 0]
    share = across.abs() * down
    assert 0.02 < share.min() < 0.12
    assert share.max() > 0.9
    assert abs(float((across < 0).float().mean()) - 0.5) < 0.07, "half of the views are flipped"
    assert (down > 0).all(), "none is upside down"
    aspect = (across.abs() / down).log()
    # A pixel of a small crop is a few per cent of its side.
    assert aspect.abs().max() < 0.288 + 0.12
    assert aspect.min() < -0.2 < 0.2 < aspect.max()
    corner = views[:, 1, 0, 0]
    assert corner.min() < 0.02
    assert corner.max() > 0.5
