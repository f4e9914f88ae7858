"""Find the images of a collection, cut it into numbered chunks, and read the images of a chunk.

Sources are photos, tar shards in webdataset's layout and Parquet files, at local paths or at any URL that fsspec
understands. A chunk is some photos, a byte range of a tar (one range request to an object store) or a range of Parquet
rows. Tar files are read with ``tarfile``: webdataset reads shards from their first byte only, so that several workers
could not share one.
"""

from __future__ import annotations

import hashlib
import itertools
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.errors import MissingFileError, ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import DEFAULT_LIMITS

SHARD_SUFFIXES = (".tar", ".parquet")
_SUFFIXES = (*PHOTO_SUFFIXES, *SHARD_SUFFIXES)
_HEADER_READERS = 16
"""Shards whose headers are read at the same time; most of that time is waiting."""

Piece = tuple[int, int, int]
"""A piece of a shard: start and stop (bytes of a tar, rows of a Parquet file) and its number of images."""

Item = tuple[str, bytes | ReactClipError]
"""The key of an image and its encoded bytes, or why there are none."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the collection: its name as the caller would write it, and its length in bytes."""

    url: str
    size: int

    @property
    def suffix(self) -> str:
        """The lower-case ending of the name."""
        return PurePosixPath(self.url).suffix.lower()


@dataclass(frozen=True)
class Chunk:
    """Images that are read, defended and written together; never more than the job's chunk size."""

    name: str
    """Number of the shard (0: photos) and number within it, such as ``000012-000003``."""
    count: int
    files: tuple[File, ...]
    """The photos, or the one shard that ``start`` and ``stop`` refer to."""
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        return f"chunk {self.name} ({self.files[0].url})"


# ---------------------------------------------------------------------- files


@contextmanager
def one_line(problem: str, way_out: str) -> Iterator[None]:
    """Raise any error of this block as ``problem (reason); way_out``.

    Object stores and damaged files raise almost any exception.
    """
    try:
        yield
    except ReactClipError:
        raise
    except Exception as error:
        raise ReactClipError(f"{problem} ({first_line(error)}); {way_out}") from None


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path there."""
    fsspec = require("fsspec", "reading collections", extra="scale")
    with one_line(f"{url} cannot be reached", "check the URL, or install the package that it needs"):
        fs, path = fsspec.core.url_to_fs(url)
    return fs, path


def local_path(url: str) -> Path | None:
    """The path on this machine, ``None`` at object stores."""
    fs, path = file_system(url)
    return Path(path) if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol) else None


def find_files(sources: Sequence[str]) -> list[File]:
    """Photos, tar shards and Parquet files that the sources name: files, folders of them, or patterns with ``*``."""
    all_files: dict[str, File] = {}
    for source in sources:
        with one_line(f"{source} cannot be listed", "check the path and your access to it"):
            files = sorted(_find_one(source), key=lambda file: file.url)
        if not files:
            raise ReactClipError(f"{source} holds none of {', '.join(_SUFFIXES)}; give another folder or files")
        all_files |= {file.url: file for file in files}
    return list(all_files.values())


def _find_one(source: str) -> Iterator[File]:
    fs, root = file_system(source)
    fs.invalidate_cache()
    if fs.isfile(root):
        file = File(source, int(fs.info(root)["size"] or 0))
        if file.suffix not in _SUFFIXES:
            raise ReactClipError(
                f"{source} is no photo, tar shard or Parquet file; its name should end in one of {', '.join(_SUFFIXES)}"
            )
        yield file
        return
    if "*" in source:
        # The pattern and the paths it matches are equal up to the first *.
        shown, _, rest = source.partition("*")
        prefix, listing = root[: len(root) - len(rest) - 1], fs.glob(root, detail=True)
    elif fs.isdir(root):
        shown, prefix, listing = source.rstrip("/"), root.rstrip("/"), fs.find(root, detail=True)
    else:
        raise MissingFileError(f"{source} does not exist; check the path")
    for path, info in listing.items():
        file = File(shown + path[len(prefix) :], int(info.get("size") or 0))
        if info.get("type") != "directory" and file.suffix in _SUFFIXES:
            yield file


def fingerprints(files: Iterable[File]) -> dict[str, str]:
    """Hashes of the names and lengths of all photos, and of the names of all shards.

    A shard may have another length when the job is resumed, because it was truncated before; its parts know the length.
    """
    photos, shards = hashlib.sha256(), hashlib.sha256()
    for file in files:
        if file.suffix in SHARD_SUFFIXES:
            shards.update(f"{file.url}\0".encode())
        else:
            photos.update(f"{file.url}\0{file.size}\0".encode())
    return {"photos": photos.hexdigest()[:16], "shards": shards.hexdigest()[:16]}


# ---------------------------------------------------------------------- chunks


def cut(files: Sequence[File], size: int, column: str) -> tuple[list[Chunk], list[str]]:
    """Chunks of at most ``size`` images, photos first, and one line for each shard that cannot be read.

    A chunk's name depends on its own file only, so that it stays when another shard becomes readable.
    """
    photos = [file for file in files if file.suffix not in SHARD_SUFFIXES]
    shards = [file for file in files if file.suffix in SHARD_SUFFIXES]
    groups = [tuple(photos[start : start + size]) for start in range(0, len(photos), size)]
    chunks = [Chunk(f"{0:06d}-{i:06d}", len(group), group) for i, group in enumerate(groups)]
    problems = []
    with ThreadPoolExecutor(_HEADER_READERS) as pool:
        all_pieces = list(pool.map(partial(_pieces, size=size, column=column), shards))
    for number, (shard, pieces) in enumerate(zip(shards, all_pieces, strict=True), 1):
        if isinstance(pieces, str):
            problems.append(pieces)
            continue
        for i, (start, stop, count) in enumerate(pieces):
            chunks.append(Chunk(f"{number:06d}-{i:06d}", count, (shard,), start, stop))
    return chunks, problems


def _pieces(file: File, size: int, column: str) -> list[Piece] | str:
    """Pieces of at most ``size`` images, from the headers of a shard; a line if they cannot be read."""
    try:
        return _cut_tar(file.url, size) if file.suffix == ".tar" else _cut_rows(file.url, size, column)
    except ReactClipError as error:
        return str(error)


def read_chunk(chunk: Chunk, column: str) -> Iterator[Item]:
    """The images of a chunk in order; raises if the chunk as a whole cannot be read."""
    suffix, count = chunk.files[0].suffix, 0
    if suffix == ".tar":
        items = _read_tar(chunk)
    else:
        items = _read_rows(chunk, column) if suffix == ".parquet" else _read_photos(chunk)
    for count, item in enumerate(items, 1):
        if count <= chunk.count:
            yield item
    if count != chunk.count:
        raise ReactClipError(f"{chunk} holds {count} images and held {chunk.count} when it was listed; start again")


def _read_photos(chunk: Chunk) -> Iterator[Item]:
    lost = 0
    for file in chunk.files:
        try:
            with _opened(file.url) as stream:
                content: bytes | ReactClipError = stream.read(DEFAULT_LIMITS.max_bytes + 1)
        except ReactClipError as error:
            if not isinstance(error.__context__, FileNotFoundError | PermissionError | IsADirectoryError):
                raise
            lost += 1
            if lost == len(chunk.files):
                # One lost photo is a row with an error; if all are lost, this machine does not see the collection.
                raise ReactClipError(f"none of the {lost} photos from {chunk.files[0].url} on can be opened") from None
            content = error
        yield file.url, content


# ---------------------------------------------------------------------- shards


@contextmanager
def _opened(url: str) -> Iterator[Any]:
    """Open a file for reading; an error of this block is raised as one line."""
    fs, path = file_system(url)
    with one_line(f"{url} cannot be read", "get it again"), fs.open(path, "rb") as stream:
        yield stream


def _cut_tar(url: str, size: int) -> list[Piece]:
    pieces: list[Piece] = []
    start = stop = count = 0
    with _opened(url) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            if _is_photo(member):
                if count == size:
                    pieces.append((start, member.offset, count))
                    start, count = member.offset, 0
                count += 1
            archive.members.clear()  # type: ignore[attr-defined]  # the index of a large shard would fill the memory
            stop = archive.offset
        length = stream.seek(0, 2)
        if stop > length:
            raise tarfile.ReadError(f"it ends after {length:,} bytes, its last member after {stop:,}")
        # tarfile takes a damaged header for the end of the archive, which would lose what follows.
        stream.seek(stop)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"the header at byte {stop:,} is damaged")
    return [*pieces, (start, stop, count)] if count else pieces


def _read_tar(chunk: Chunk) -> Iterator[Item]:
    url = chunk.files[0].url
    with _opened(url) as stream:
        stream.seek(chunk.start)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                end = archive.offset
                if _is_photo(member):
                    yield f"{url}/{member.name}", _content(archive, member)
                if end >= chunk.stop:
                    break


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | ReactClipError:
    if member.size > DEFAULT_LIMITS.max_bytes:
        return ReactClipError(f"the image has {member.size:,} bytes; the limit is {DEFAULT_LIMITS.max_bytes:,}")
    stream = archive.extractfile(member)
    assert stream is not None  # it is a regular file
    return stream.read()


def _is_photo(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.lower().endswith(PHOTO_SUFFIXES)


def _parquet_file(stream: Any, url: str, column: str) -> Any:
    """A ``pyarrow.parquet.ParquetFile``; raises if ``column`` does not hold encoded images."""
    file = require("pyarrow.parquet", "reading Parquet", extra="scale").ParquetFile(stream)
    if column not in (fit := [field.name for field in file.schema_arrow if _holds_images(field.type)]):
        choice = f"choose --column {' or '.join(fit)}" if fit else "no column of it does"
        raise ReactClipError(f"{url} has no column {column!r} with the bytes of images; {choice}")
    return file


def _holds_images(kind: Any) -> bool:
    """True for an Arrow type that is bytes, or a struct with a field ``bytes``."""
    pa = require("pyarrow", "reading Parquet", extra="scale")
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_images(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _cut_rows(url: str, size: int, column: str) -> list[Piece]:
    with _opened(url) as stream:
        rows = _parquet_file(stream, url, column).metadata.num_rows
    return [(start, min(start + size, rows), min(size, rows - start)) for start in range(0, rows, size)]


def _read_rows(chunk: Chunk, column: str) -> Iterator[Item]:
    """A few rows at a time, from the row groups that hold them."""
    url = chunk.files[0].url
    with _opened(url) as stream:
        file = _parquet_file(stream, url, column)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        starts = list(itertools.accumulate(sizes, initial=0))
        groups = [i for i in range(len(sizes)) if starts[i] < chunk.stop and starts[i + 1] > chunk.start]
        batches = file.iter_batches(batch_size=32, row_groups=groups, columns=[column])
        values = (value for batch in batches for value in batch.column(0))
        for row, value in enumerate(values, starts[min(groups, default=0)]):
            if row >= chunk.stop:
                return
            if row >= chunk.start:
                content = value.as_py()
                content = content.get("bytes") if isinstance(content, dict) else content
                yield f"{url}#{row}", ReactClipError("the row holds no image") if content is None else content
