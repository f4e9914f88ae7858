"""A classifier and photos; the tests of this folder need the scale extra."""

from __future__ import annotations

from pathlib import Path

import pytest

import react_clip as rc
from toys import picture

pytest.importorskip("ray", reason="needs the scale extra")


@pytest.fixture(scope="session")
def clf(tiny_folder: Path) -> rc.ZeroShotClassifier:
    """The tiny CLIP with three classes."""
    return rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu"), ["cat", "dog", "teapot"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twenty files in two folders; the eighth is no image."""
    folder = tmp_path / "photos"
    for i in range(20):
        path = folder / "ab"[i // 10] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if i == 7 else picture(i))
    return folder
