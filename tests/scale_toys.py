"""Small collections of photos and their output: helpers of the tests in tests/scale and tests/data."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int) -> bytes:
    """A random photo for each seed, as a PNG file."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (36, 44, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def save_photo(path: Path, number: int) -> Path:
    """Write a random photo and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number))
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar file with these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def read_rows(folder: Path) -> Any:
    """All rows of an output folder as pandas reads them, sorted by key."""
    import pandas as pd

    return pd.read_parquet(folder).sort_values("key").reset_index(drop=True)


def features(rows: Any) -> Any:
    """The features ``[N, dim]`` of the rows without error."""
    return np.stack(rows.feature[rows.error.isna()])
