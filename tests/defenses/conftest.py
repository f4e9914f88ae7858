"""Small complete CLIPs for the prompt-tuning defences."""

from __future__ import annotations

from pathlib import Path

import pytest

import react_clip as rc
import tiny_clip
from react_clip import Encoder

from .prompt_toys import F64, classifier


@pytest.fixture(scope="module")
def places(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checkpoint = tiny_clip.write_open_clip(tiny_folder, tmp_path_factory.mktemp("open_clip"))
    return {"hf": str(tiny_folder), "open_clip": f"open_clip:{tiny_clip.OPEN_CLIP_NAME}/{checkpoint}"}


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
