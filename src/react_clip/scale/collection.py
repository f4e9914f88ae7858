"""The images of a collection: photos, tar shards in webdataset's layout and Parquet files, at paths or fsspec URLs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.data.formats import SHARD_SUFFIXES, tar_photos
from react_clip.errors import MissingFileError, ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import DEFAULT_LIMITS

_SUFFIXES = (*PHOTO_SUFFIXES, *SHARD_SUFFIXES)

Row = dict[str, Any]
"""An image: ``file``, ``key`` (unique in the collection), ``content`` (its bytes), ``error`` ("" if there is none)."""


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path there."""
    fsspec = require("fsspec", "reading collections", extra="scale")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # an unknown scheme, a missing package
        raise ReactClipError(f"{url} cannot be reached ({first_line(error)}); check the URL") from None
    return fs, path


def find_files(sources: Sequence[str]) -> list[str]:
    """Photos, tar shards and Parquet files that the sources name: files, folders of them, or patterns with ``*``."""
    found: dict[str, None] = {}
    for source in sources:
        fs, root = file_system(source)
        try:
            paths = fs.glob(root) if "*" in source else fs.find(root)
        except Exception as error:  # file systems raise almost anything
            raise ReactClipError(f"{source} cannot be listed ({first_line(error)}); check your access to it") from None
        files = [path for path in sorted(paths) if _suffix(path) in _SUFFIXES]
        if not files:
            raise MissingFileError(f"{source} does not exist or holds none of {', '.join(_SUFFIXES)}; check the path")
        found |= dict.fromkeys(files if "://" not in source else map(fs.unstrip_protocol, files))
    return list(found)


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def is_shard(path: str) -> bool:
    """True for a file that holds several images."""
    return _suffix(path) in SHARD_SUFFIXES


def read_images(item: Mapping[str, Any], column: str) -> Iterator[Row]:
    """The images of ``item["file"]`` whose keys are not in ``item["done"]``.

    The last row of a file that cannot be read says why.
    """
    file, done = item["file"], frozenset(item["done"])
    fs, path = file_system(file)
    try:
        with fs.open(path, "rb") as stream:
            for key, content in _contents(stream, file, column):
                if key not in done:
                    error = "the row holds no image" if content is None else ""
                    yield {"file": file, "key": key, "content": content or b"", "error": error}
    except Exception as error:  # object stores and damaged files raise almost anything
        yield {"file": file, "key": file, "content": b"", "error": f"{file} cannot be read ({first_line(error)})"}


def _contents(stream: Any, file: str, column: str) -> Iterator[tuple[str, bytes | None]]:
    """Keys and bytes of a file's images; a Parquet file's column holds bytes or structs with a field ``bytes``."""
    if (kind := _suffix(file)) == ".tar":
        for name, start, size in tar_photos(stream):
            stream.seek(start)
            yield f"{file}/{name}", stream.read(min(size, DEFAULT_LIMITS.max_bytes + 1))
    elif kind == ".parquet":
        table = require("pyarrow.parquet", "reading Parquet", extra="eval").ParquetFile(stream)
        if column not in (names := table.schema_arrow.names):
            raise ReactClipError(f"it has no column {column!r}; choose --column among {', '.join(names)}")
        batches = table.iter_batches(batch_size=32, columns=[column])
        for row, value in enumerate(itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)):
            content = value.get("bytes") if isinstance(value, dict) else value
            if not isinstance(content, bytes | None):
                raise ReactClipError(f"column {column!r} holds no bytes; choose --column among {', '.join(names)}")
            yield f"{file}#{row}", content
    else:
        yield file, stream.read(DEFAULT_LIMITS.max_bytes + 1)
