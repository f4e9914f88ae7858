from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from react_clip import ReactClipError
from react_clip.attacks import Corruption


def damaged(kind: str, severity: float, x: Tensor) -> Tensor:
    """Images after one kind of damage; the model and the labels play no part."""
    attack = Corruption(type=kind, severity=severity)  # type: ignore[arg-type]
    return attack(lambda x: x.mean((2, 3)), x, torch.zeros(len(x), dtype=torch.long)).images


@pytest.fixture(scope="module")
def photo() -> Tensor:
    ramp = torch.linspace(0.2, 0.8, 64)
    return torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.full((64, 64), 0.5)])[None]


def test_noise_has_the_asked_deviation_and_is_the_same_every_time(photo: Tensor) -> None:
    noisy = damaged("noise", 0.05, photo)
    assert (noisy - photo).std() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(noisy, damaged("noise", 0.05, torch.cat([photo.flip(3), photo]))[1:])


def test_brightness_and_contrast_scale_pixels(photo: Tensor) -> None:
    assert torch.allclose(damaged("brightness", 0.4, photo), 0.4 * photo, atol=1.5 / 255)
    flat = damaged("contrast", 0.4, photo)
    assert flat[0, 0].std() == pytest.approx(0.4 * float(photo[0, 0].std()), rel=0.05)


def test_blur_spreads_a_point_and_keeps_its_light() -> None:
    point = torch.zeros(1, 3, 33, 33)
    point[..., 16, 16] = 1.0
    blurred = damaged("blur", 2, point)
    assert blurred.max() < 0.1
    assert blurred[0, 0].sum() == pytest.approx(1.0, abs=0.3)  # rounding to 8 bits loses the faint rim


@pytest.mark.parametrize(("kind", "severity"), [("defocus", 3), ("motion", 9)])
def test_lens_and_motion_spread_a_point_over_their_reach(kind: str, severity: float) -> None:
    point = torch.zeros(2, 3, 33, 33)
    point[0, :, 16, 16] = point[1, :, 15, 16] = 1.0
    spread = damaged(kind, severity, point)
    far = torch.hypot(torch.arange(33.0)[:, None] - 16, torch.arange(33.0)[None] - 16) > severity + 1
    assert spread[0, 0].sum() == pytest.approx(1.0, abs=0.1)
    assert spread[0, 0, far].max() == 0
    count = int((spread[0, 0] > 0.5 * spread[0, 0].max()).sum())
    area = math.pi * severity**2 if kind == "defocus" else severity
    assert count == pytest.approx(area, rel=0.4)
    directions_differ = not torch.allclose(spread[0, :, 1:], spread[1, :, :-1])
    assert directions_differ == (kind == "motion")


def test_shot_noise_has_the_variance_of_counted_photons() -> None:
    grey = torch.full((1, 3, 64, 64), 0.5)
    noisy = damaged("shot", 60, grey)
    assert noisy.mean() == pytest.approx(0.5, abs=0.01)
    assert noisy.var() == pytest.approx(0.5 / 60, rel=0.1)


def test_fog_adds_white_light_and_pixels_become_blocks(photo: Tensor) -> None:
    foggy = damaged("fog", 0.6, photo)
    assert (foggy >= photo * 0.4 + 0.3 - 1 / 255).all()
    assert foggy.std() < photo.std()
    blocks = damaged("pixelate", 0.25, photo).unfold(2, 4, 4).unfold(3, 4, 4).flatten(4)
    assert torch.equal(blocks.amin(-1), blocks.amax(-1))


@pytest.mark.parametrize(
    ("kind", "severity"), [("jpeg", 101), ("blur", 101), ("fog", 1.5), ("pixelate", 2), ("text", 2)]
)
def test_severities_beyond_their_type_get_one_line(kind: str, severity: float) -> None:
    with pytest.raises(ReactClipError, match=rf"severity is {severity}; for {kind} it must be at most"):
        Corruption(type=kind, severity=severity)  # type: ignore[arg-type]
