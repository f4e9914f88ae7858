"""Parcels: the numbered pieces of a collection that are read, defended and written as one, and how to read them.

A parcel is some photos, a stretch of a tar shard (by bytes, so that an object store is asked for one range) or a range
of rows of a Parquet file. It never holds more than a fixed number of images, which bounds the memory of whoever works
on it.
"""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import DEFAULT_LIMITS, PHOTO_SUFFIXES
from react_clip.scale.files import File, locate

Cut = tuple[int, int, int]
"""Where a piece of a shard begins and ends (bytes of a tar, rows of a Parquet file), and how many images it holds."""

Item = tuple[str, bytes | ReactClipError]
"""An image's key and its file, or why there is none."""

_GONE = (FileNotFoundError, PermissionError, IsADirectoryError)


@dataclass(frozen=True)
class Parcel:
    """One piece of a collection; ``urls`` are its photos, or the one shard that ``start`` and ``stop`` refer to."""

    number: int
    count: int
    urls: tuple[str, ...]
    start: int = 0
    stop: int = 0

    def to_json(self) -> str:
        """As it travels to a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The opposite of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "urls": tuple(values["urls"])})


def cut_shard(file: File, base: str, parcel: int, column: str) -> list[Cut]:
    """Pieces of at most ``parcel`` images of a tar or Parquet file, from its headers alone."""
    return _cut_tar(file.url, base, parcel) if file.suffix == ".tar" else _cut_rows(file.url, base, parcel, column)


def read(parcel: Parcel, base: str, column: str) -> Iterator[Item]:
    """The images of a parcel in order; raises one line where the parcel as a whole cannot be read."""
    suffix = File(parcel.urls[0], 0).suffix
    if suffix == ".tar":
        return _read_tar(parcel, base)
    return _read_rows(parcel, base, column) if suffix == ".parquet" else _read_photos(parcel, base)


# ---------------------------------------------------------------------- photos


def _read_photos(parcel: Parcel, base: str) -> Iterator[Item]:
    gone = 0
    for url in parcel.urls:
        fs, path = locate(url, base)
        try:
            with fs.open(path, "rb") as stream:
                yield url, stream.read(DEFAULT_LIMITS.max_bytes + 1)
        except _GONE as error:
            gone += 1
            if gone == len(parcel.urls):
                # One lost photo is a row with an error; all of them mean that this machine does not see the collection.
                raise ReactClipError(f"none of the {gone} photos from {parcel.urls[0]} on can be opened") from None
            yield url, ReactClipError(f"cannot be read: {first_line(error)}")
        except Exception as error:  # object stores raise almost anything
            raise ReactClipError(f"{url} cannot be read: {first_line(error)}") from None


# ---------------------------------------------------------------------- tar shards


def _cut_tar(url: str, base: str, parcel: int) -> list[Cut]:
    fs, path = locate(url, base)
    cuts: list[Cut] = []
    start = stop = count = 0
    try:
        with fs.open(path, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                if _is_photo(member):
                    if count == parcel:
                        cuts.append((start, member.offset, count))
                        start, count = member.offset, 0
                    count += 1
                # Members are let go, or the index of a large shard would fill the memory.
                archive.members.clear()  # type: ignore[attr-defined]
                stop = archive.offset
            if stop > (size := fs.size(path)):
                raise tarfile.ReadError(f"it ends after {size:,} bytes, its last member after {stop:,}")
            # To the module a damaged header is the end of the archive; to us it is the loss of what follows.
            stream.seek(stop)
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"the header at byte {stop:,} is damaged")
    except Exception as error:  # damaged headers raise almost anything
        raise ReactClipError(f"shard {url} cannot be read ({first_line(error)}); get it again") from None
    return [*cuts, (start, stop, count)] if count else cuts


def _read_tar(parcel: Parcel, base: str) -> Iterator[Item]:
    url = parcel.urls[0]
    fs, path = locate(url, base)
    seen = 0
    try:
        with fs.open(path, "rb") as stream:
            stream.seek(parcel.start)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    after = archive.offset
                    if _is_photo(member):
                        if seen == parcel.count:
                            raise tarfile.ReadError("it was changed")
                        seen += 1
                        yield f"{url}/{member.name}", _content(archive, member)
                    if after >= parcel.stop:
                        break
    except Exception as error:
        raise ReactClipError(f"shard {url} cannot be read ({first_line(error)}); get it again") from None
    if seen != parcel.count:
        raise ReactClipError(f"shard {url} has {seen} photos where {parcel.count} were counted; it was changed")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | ReactClipError:
    if member.size > DEFAULT_LIMITS.max_bytes:
        return ReactClipError(f"the image has {member.size:,} bytes; the limit is {DEFAULT_LIMITS.max_bytes:,}")
    stream = archive.extractfile(member)
    assert stream is not None  # it is a regular file
    return stream.read()


def _is_photo(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.lower().endswith(PHOTO_SUFFIXES)


# ---------------------------------------------------------------------- Parquet


def _cut_rows(url: str, base: str, parcel: int, column: str) -> list[Cut]:
    with _Parquet(url, base) as table:
        table.check(column)
        rows = table.file.metadata.num_rows
    starts = range(0, rows, parcel)
    return [(start, min(start + parcel, rows), min(parcel, rows - start)) for start in starts]


def _read_rows(parcel: Parcel, base: str, column: str) -> Iterator[Item]:
    url = parcel.urls[0]
    with _Parquet(url, base) as table:
        table.check(column)
        for row, value in table.rows(column, parcel.start, parcel.stop):
            content = value.get("bytes") if isinstance(value, dict) else value
            if content is None:
                content = ReactClipError("the row holds no image")
            yield f"{url}#{row}", content


class _Parquet:
    """A Parquet file that says in one line what is wrong with it."""

    def __init__(self, url: str, base: str) -> None:
        self.url, self._base = url, base

    def __enter__(self) -> Self:
        parquet = require("pyarrow.parquet", "reading Parquet", extra="scale")
        fs, path = locate(self.url, self._base)
        try:
            self._stream = fs.open(path, "rb")
            self.file = parquet.ParquetFile(self._stream)
        except Exception as error:
            raise self._broken(error) from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()

    def check(self, column: str) -> None:
        """Refuse a file in which ``column`` does not hold encoded images."""
        pa = require("pyarrow", "reading Parquet", extra="scale")

        def holds_images(kind: Any) -> bool:
            if pa.types.is_struct(kind):
                return any(field.name == "bytes" and holds_images(field.type) for field in kind)
            return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

        fit = [field.name for field in self.file.schema_arrow if holds_images(field.type)]
        if column not in fit:
            choice = f"choose --column {' or '.join(fit)}" if fit else "no column of it does"
            raise ReactClipError(f"{self.url} has no column {column!r} with the bytes of images; {choice}")

    def rows(self, column: str, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Rows ``start`` to ``stop``, a few at a time; only the row groups that hold them are read."""
        sizes = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
        begins = [0, *itertools.accumulate(sizes)]
        groups = [i for i, size in enumerate(sizes) if begins[i] < stop and begins[i] + size > start]
        row = begins[groups[0]] if groups else stop
        try:
            for batch in self.file.iter_batches(batch_size=32, row_groups=groups, columns=[column]):
                low, high = max(start - row, 0), min(stop - row, len(batch))
                if low < high:
                    values = batch.column(0).slice(low, high - low).to_pylist()
                    yield from zip(range(row + low, row + high), values, strict=True)
                row += len(batch)
                if row >= stop:
                    return
        except Exception as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ReactClipError:
        return ReactClipError(f"{self.url} cannot be read as Parquet ({first_line(error)}); get it again")
