"""Small collections of photos, their output, and waiting: helpers of the tests in tests/scale."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import programs


def picture(seed: int) -> bytes:
    """A random photo for each seed, as a PNG file."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (36, 44, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar file with these members."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def read_parts(folder: Path) -> Any:
    """All rows of an output folder, part after part."""
    import pyarrow as pa
    from pyarrow import parquet

    return pa.concat_tables([parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


wait_for = partial(programs.wait_for, seconds=300)
"""Ray takes long to start processes, and longer on a busy machine."""
