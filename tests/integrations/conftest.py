"""Both layouts of the tiny CLIP, photos of several sizes, and guards that are always open or always closed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import react_clip as rc
import tiny_clip

OPEN = rc.ReACT(tau=-1.0)
CLOSED = rc.ReACT(tau=1e9)


@pytest.fixture(scope="session")
def hf_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny CLIP with the image processor that hub repositories bring."""
    from transformers import CLIPImageProcessor

    folder = Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("hf") / "tiny"))
    size = tiny_clip.SIZE
    CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(hf_folder: Path) -> rc.Encoder:
    return rc.load(hf_folder, device="cpu")


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wide, tall, large and exactly fitting photos, as files."""
    folder = tmp_path_factory.mktemp("photos")
    return [
        save(folder / f"{i}.png", size, seed=i) for i, size in enumerate([(48, 36), (33, 70), (200, 120), (32, 32)])
    ]


@pytest.fixture(scope="session")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Photos of the encoder's own size, which no preprocessing changes."""
    folder = tmp_path_factory.mktemp("fitting")
    return [save(folder / f"{i}.png", (tiny_clip.SIZE, tiny_clip.SIZE), seed=10 + i) for i in range(5)]


def check_refusals(*cases: tuple[Callable[[], object], str]) -> None:
    """Each call raises one line that matches a pattern."""
    for call, says in cases:
        with pytest.raises(rc.ReactClipError, match=says):
            call()


def save(path: Path, size: tuple[int, int], seed: int) -> Path:
    """A photo with large and small structure; the first pixels are black and white, the ends of the range."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    array = np.clip(np.asarray(coarse) + rng.normal(0, 12, (size[1], size[0], 3)), 0, 255).astype(np.uint8)
    array[0, 0], array[0, 1] = 0, 255
    Image.fromarray(array).save(path)
    return path
