"""Fixtures for everybody: the tiny CLIP, the real tower, the shared photos, and a cache of one's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import tiny_clip
from react_clip import Encoder, ReactClipError, encoders

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with photos and heads beside the repository."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the photos and heads of ../shared, which is not here")
    return SHARED


@pytest.fixture(scope="session")
def tower() -> Encoder:
    """The real ViT-B/16 image tower, pulled on first use."""
    try:
        encoders.pull("clip-vit-b-16")
    except ReactClipError as error:
        pytest.skip(f"needs the real ViT-B/16 tower, which cannot be pulled here: {error}")
    return encoders.load("clip-vit-b-16", device="cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small complete CLIP in Hugging Face layout."""
    return tiny_clip.write_hf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small CLIP that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that a test can count what is written to it."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("REACT_CLIP_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def command() -> list[str]:
    """How to start the real command line in a process of its own."""
    return [sys.executable, "-m", "react_clip"]
