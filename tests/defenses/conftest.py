"""Small complete CLIPs for the prompt-tuning defences."""

from __future__ import annotations

from pathlib import Path

import pytest

import react_clip as rc
from react_clip import Encoder

from .prompt_toys import F64, classifier


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
