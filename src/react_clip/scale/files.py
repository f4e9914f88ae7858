"""Files of a collection, wherever they are: local paths and every URL that fsspec understands.

A file is called as the caller wrote it (``photos/a.jpg``, ``s3://bucket/shards/0.tar``); local names count from a base
folder, so that a worker that was started elsewhere opens the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.preprocess import PHOTO_SUFFIXES

SHARD_SUFFIXES = (".tar", ".parquet")


@dataclass(frozen=True, slots=True)
class File:
    """A file's name, as the caller would write it, and its length."""

    url: str
    size: int

    @property
    def suffix(self) -> str:
        """The lower-case ending of the name."""
        return PurePosixPath(self.url).suffix.lower()


def locate(url: str, base: str) -> tuple[Any, str]:
    """The file system that holds ``url``, and the path there."""
    fsspec = require("fsspec", "reading collections", extra="scale")
    whole = url if "://" in url else str(Path(base, url))
    try:
        fs, path = fsspec.core.url_to_fs(whole)
    except (ImportError, ValueError) as error:
        raise ReactClipError(f"{url} cannot be reached: {first_line(error)}") from None
    return fs, path


def local_path(url: str, base: str) -> Path | None:
    """Where ``url`` is on this machine; ``None`` for object stores and the like."""
    fs, path = locate(url, base)
    return Path(path) if "file" in _protocols(fs) else None


def in_this_process(url: str, base: str) -> bool:
    """Whether nobody but this process sees ``url`` (fsspec's ``memory://``)."""
    return "memory" in _protocols(locate(url, base)[0])


def find(sources: Sequence[str], base: str) -> list[File]:
    """Photos, tar shards and Parquet files that the sources name: files, folders of them, or patterns with ``*``."""
    found: dict[str, File] = {}
    for source in sources:
        try:
            files = sorted(_find_one(source, base), key=lambda file: file.url)
        except ReactClipError:
            raise
        except Exception as error:  # object stores raise almost anything
            raise ReactClipError(f"{source} cannot be listed: {first_line(error)}") from None
        if not files:
            kinds = ", ".join((*PHOTO_SUFFIXES, *SHARD_SUFFIXES))
            raise ReactClipError(f"{source} holds none of {kinds}; give another folder or files")
        found |= {file.url: file for file in files}
    return list(found.values())


def _find_one(source: str, base: str) -> Iterator[File]:
    fs, root = locate(source, base)
    fs.invalidate_cache()
    if "*" in source:
        # What stands before the first * is the same in the pattern as written and in the paths it matches.
        shown, _, rest = source.partition("*")
        yield from _known(shown, root[: len(root) - len(rest) - 1], fs.glob(root, detail=True))
    elif fs.isdir(root):
        yield from _known(source.rstrip("/"), root.rstrip("/"), fs.find(root, detail=True))
    elif fs.isfile(root):
        file = File(source, int(fs.info(root)["size"] or 0))
        if file.suffix not in (*PHOTO_SUFFIXES, *SHARD_SUFFIXES):
            raise ReactClipError(
                f"{source} is no photo, tar shard or Parquet file; its name should end in one of "
                f"{', '.join((*PHOTO_SUFFIXES, *SHARD_SUFFIXES))}"
            )
        yield file
    else:
        raise ReactClipError(f"{source} does not exist; check the path")


def _known(shown: str, root: str, found: dict[str, dict[str, Any]]) -> Iterator[File]:
    """What can be read among the files found, named as the caller would."""
    for path, info in found.items():
        file = File(shown + path[len(root) :], int(info.get("size") or 0))
        if info.get("type") != "directory" and file.suffix in (*PHOTO_SUFFIXES, *SHARD_SUFFIXES):
            yield file


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
