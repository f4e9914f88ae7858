"""Photos small enough to make on the spot; no test of this room reaches the network."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SavePhoto = Callable[[Path, int], Path]


def encoded(number: int, kind: str = "PNG", size: int = 8) -> bytes:
    """The bytes of a photo of its own: no two numbers give the same."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


@pytest.fixture(scope="session")
def photo_bytes() -> Callable[..., bytes]:
    return encoded


@pytest.fixture(scope="session")
def save_photo() -> SavePhoto:
    def save(path: Path, number: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number, "PNG" if path.suffix == ".png" else "JPEG"))
        return path

    return save


@pytest.fixture
def pets(tmp_path: Path, save_photo: SavePhoto) -> Path:
    """A root with a few photos of three OxfordPets classes in the folder layout, and a class of unequal size."""
    for number, (folder, count) in enumerate({"pug": 6, "Abyssinian": 4, "american_bulldog": 2}.items()):
        for photo in range(count):
            save_photo(tmp_path / "oxford_pets" / "test" / folder / f"{photo}.jpg", 100 * number + photo)
    return tmp_path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test of this room may reach the network or the user's cache."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a test reached for the network: {args}")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setenv("REACT_CLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
