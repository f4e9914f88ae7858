"""Small complete CLIPs, photos and configurations for tests of the prompt-tuning defences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import Encoder
from react_clip.defenses import RTPT, SSTPT

F64 = torch.float64
NAMES = ["cat", "pickup truck", "giant panda", "ox", "alarm clock", "tea"]
WORDS = "a photo of a"
SMALL_RTPT = RTPT(views=9, selected=3, neighbours=4)
SMALL_SSTPT = SSTPT(views=6, selected=3)
both = pytest.mark.parametrize("guard", [SMALL_RTPT, SMALL_SSTPT], ids=["r-tpt", "ss-tpt"])


def classifier(encoder: Encoder) -> rc.ZeroShotClassifier:
    """With class features that point nowhere: the defences must not read them."""
    wrong = torch.ones(len(NAMES), encoder.dim)
    return rc.ZeroShotClassifier.from_features(encoder, NAMES, wrong)


def photos(count: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    """Smooth images: on plain noise every crop would look the same."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=F64)
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic", align_corners=False)
    return smooth.clamp(0, 1).to(dtype)


@pytest.fixture(scope="module")
def places(tiny_folder: Path, open_clip_name: str) -> dict[str, str]:
    return {"hf": str(tiny_folder), "open_clip": open_clip_name}


@pytest.fixture(scope="module", params=["hf", "open_clip"])
def encoder(request: pytest.FixtureRequest, places: dict[str, str]) -> Encoder:
    """In double precision, where two ways to compute a thing must agree to many digits."""
    encoder = rc.load(places[request.param], device="cpu", dtype=F64)
    try:
        encoder.encode_text(["x"])
    except RuntimeError as error:
        pytest.skip(f"the text tower of this transformers knows no double precision: {error}")
    return encoder


@pytest.fixture(scope="module")
def clf(places: dict[str, str]) -> rc.ZeroShotClassifier:
    return classifier(rc.load(places["hf"], device="cpu", dtype=F64))
