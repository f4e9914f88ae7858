"""The photos of a finetuning run: found on disk, then decoded once into memory or read ahead of the steps."""

from __future__ import annotations

import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.formats import open_tables, read_row
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.preprocess import Preprocessing, to_8bit
from react_clip.storage import tensor_digest

AHEAD = 3
"""Batches that are read while a step computes."""
_SHARDS = (".tar", ".parquet")


class Photos:
    """Square photos ``[3, side, side]`` of uint8 by index, from a tensor or from files.

    The next photo stands in for one that cannot be read, which ``unreadable`` names: so a step sees the same photos
    whether they are all in memory or read when they are needed.
    """

    def __init__(self, source: Tensor | ImageDataset, how: Preprocessing) -> None:
        self.unreadable: dict[str, str] = {}
        """Why each photo that was met and could not be read was left out, by its id."""
        self._source = source
        self._stack = source if isinstance(source, Tensor) else None
        # Crops are cut from squares as large as the paper resizes to; their centre is what an encoder sees.
        side = Preprocessing.paper(how.size).resize
        self._how = replace(how, size=side, resize=side, mode="shorter")
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))

    def __len__(self) -> int:
        return len(self._source)

    def digest(self) -> str:
        """SHA-256 of all photos."""
        return tensor_digest(self._source) if isinstance(self._source, Tensor) else self._source.fingerprint()

    def load(self, device: torch.device, *, progress: bool = False) -> None:
        """Decode all photos into the device's memory, if they take at most half of what is free there."""
        side = self._how.size if self._stack is None else self._stack.shape[-1]
        if len(self) * 3 * side**2 > free_memory(device) // 2:
            return
        if self._stack is None:
            stack = torch.empty(len(self), 3, side, side, dtype=torch.uint8, device=device)
            found = enumerate(self._pool.map(self._read, range(len(self))))
            for index, pixels in tqdm(found, "reading photos", len(self), unit="photo", disable=not progress):
                stack[index] = pixels
            self._stack = stack
        self._stack = self._stack.to(device)

    def take(self, indices: Tensor) -> Tensor:
        """The photos ``[N, 3, side, side]`` with these indices."""
        return self._begin(indices)()

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and photos of each batch; photos that are not in memory are read ahead."""
        waiting: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()
        for indices in chosen:
            waiting.append((indices, self._begin(indices)))
            if len(waiting) > AHEAD:
                first, finish = waiting.popleft()
                yield first, finish()
        for indices, finish in waiting:
            yield indices, finish()

    def _begin(self, indices: Tensor) -> Callable[[], Tensor]:
        """Begin to read; the function that comes back waits for the end."""
        stack = self._stack
        if stack is not None:
            return lambda: stack[indices.to(stack.device)]
        reading = [self._pool.submit(self._read, index) for index in indices.tolist()]
        return lambda: torch.stack([each.result() for each in reading])

    def _read(self, index: int) -> Tensor:
        assert isinstance(self._source, ImageDataset)
        for place in range(index, index + len(self)):
            photo = self._source.photos[place % len(self)]
            if photo.id not in self.unreadable:
                try:
                    return to_8bit(photo.open(), self._how)
                except ReactClipError as error:
                    self.unreadable[photo.id] = str(error)
        name, reason = next(iter(self.unreadable.items()))
        raise ReactClipError(f"none of the {len(self)} photos can be read, such as {name} ({reason}); give others")


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------- photos without labels on disk


def find_photos(path: Path) -> ImageDataset:
    """The photos of a folder with everything below it, in files, tar shards (webdataset's layout) and Parquet files.

    They have no labels. A shard that cannot be read counts as one photo that cannot be read.
    """
    suffixes = (*PHOTO_SUFFIXES, *_SHARDS)
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in suffixes)
    found = [photo for file in files for photo in _photos_of(file, str(file.relative_to(path.parent)))]
    if not found:
        raise ReactClipError(f"{path} holds no photos ({', '.join(suffixes)}); give another folder or file")
    return ImageDataset(path.name, "train", ("photo",), tuple(found))


def _photos_of(file: Path, name: str) -> Iterator[Photo]:
    if file.suffix.lower() == ".tar":
        yield from _in_tar(file, name)
    elif file.suffix.lower() == ".parquet":
        yield from _in_parquet(file, name)
    else:
        yield Photo(name, 0, file)


def _in_tar(file: Path, name: str) -> Iterator[Photo]:
    """The photos of a shard, to be read from where they begin."""
    try:
        with file.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith(PHOTO_SUFFIXES):
                    yield Photo(f"{name}/{member.name}", 0, partial(_read_part, file, member.offset_data, member.size))
            # tarfile takes a damaged header for the end of the archive, which would lose what follows in silence.
            stream.seek(archive.offset)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError("damaged header")
    except (OSError, tarfile.TarError):
        yield Photo(name, 0, file)  # no image, so it is named among what cannot be read


def _read_part(file: Path, start: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(length)


def _in_parquet(file: Path, name: str) -> Iterator[Photo]:
    """The photos of the first column of images or bytes; ``datasets`` keeps a copy with random access in the cache."""
    datasets = require("datasets", f"reading {file}", extra="data")
    try:
        table = open_tables(datasets, [file])
    except ReactClipError:
        yield Photo(name, 0, file)
        return
    column = next((name for name, kind in table.features.items() if _holds_photos(kind, datasets.Image)), None)
    if column is None:
        raise ReactClipError(f"{file} has the columns {', '.join(table.column_names)}; none holds images or bytes")
    table = table.cast_column(column, datasets.Image(decode=False))
    for row in range(len(table)):
        yield Photo(f"{name}#{row}", 0, partial(read_row, table, column, row))


def _holds_photos(kind: Any, image: type) -> bool:
    """True for a column of images, of bytes, or of structs with bytes as Hugging Face writes them."""
    fields = kind if isinstance(kind, dict) else {"bytes": kind}
    return isinstance(kind, image) or str(getattr(fields.get("bytes"), "dtype", "")).endswith("binary")
