"""The output folder of ``defend_dataset``: one Parquet file for each finished chunk, and ``plan.json``.

A part is written whole or not at all (through a temporary file; to an object store with one put) and never again. Its
footer holds the counts of the summary, so that a resumed job reads no rows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

from react_clip import storage
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.scale.collection import file_system, local_path, one_line

PLAN = "plan.json"
_PART = re.compile(r"part-(\d+-\d+)\.parquet")
_FOOTER = b"react-clip"
_FOOTER_READERS = 16


@dataclass(frozen=True)
class PartStats:
    """Counts over the rows of a part."""

    source: str
    """Hash of the job and the chunk that it was made from."""
    images: int
    errors: int
    gated: int
    passes: float


def part_name(chunk: str) -> str:
    """The file name of a chunk's part.

    >>> part_name("000012-000003")
    'part-000012-000003.parquet'
    """
    return f"part-{chunk}.parquet"


class OutputFolder:
    """The output folder at a local path or an fsspec URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = file_system(self.url)
        self.local = local_path(self.url)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes out of a local folder; object stores have no lock."""
        return nullcontext() if self.local is None else storage.held_folder(self.local)

    def read_plan(self) -> Any:
        """The content of ``plan.json``, ``None`` without one."""
        with one_line(f"{self.url}/{PLAN} cannot be read", "choose another --out"), suppress(FileNotFoundError):
            return json.loads(self._fs.cat_file(f"{self._root}/{PLAN}"))
        return None

    def claim(self, plan: Mapping[str, Any], *, resume: bool) -> dict[str, PartStats]:
        """Write ``plan.json`` and return the finished parts by chunk name; raises if they belong to another plan."""
        names, earlier = self._part_chunks(), self.read_plan()
        if names:
            if not isinstance(earlier, dict):
                raise ReactClipError(f"{self.url} has a {part_name(names[0])} but no {PLAN}; choose another --out")
            if other := sorted(key for key in {**plan, **earlier} if plan.get(key) != earlier.get(key)):
                raise ReactClipError(
                    f"{self.url} holds another job (other {', '.join(other)}); ask for the same again to continue it, "
                    "or choose another --out"
                )
            if not resume:
                raise ReactClipError(
                    f"{self.url} holds {len(names)} finished parts of this job; continue it with --resume, or choose "
                    "another --out"
                )
        if plan != earlier:
            self._write(PLAN, (json.dumps(plan, indent=1) + "\n").encode())
        with ThreadPoolExecutor(_FOOTER_READERS) as pool:
            return dict(zip(names, pool.map(self._read_stats, names), strict=True))

    def finished(self, chunk: str) -> PartStats | None:
        """The counts of a chunk's part, ``None`` without one."""
        return self._read_stats(chunk) if self._fs.exists(f"{self._root}/{part_name(chunk)}") else None

    def write(self, chunk: str, table: Any, stats: PartStats) -> None:
        """Write the part of a finished chunk."""
        parquet = require("pyarrow.parquet", "writing Parquet", extra="scale")
        buffer = io.BytesIO()
        parquet.write_table(table.replace_schema_metadata({_FOOTER: json.dumps(asdict(stats)).encode()}), buffer)
        self._write(part_name(chunk), buffer.getvalue())

    def _read_stats(self, chunk: str) -> PartStats:
        parquet = require("pyarrow.parquet", "reading Parquet", extra="scale")
        problem = f"{self.url}/{part_name(chunk)} cannot be read"
        with (
            one_line(problem, "remove it to have it made again"),
            self._fs.open(f"{self._root}/{part_name(chunk)}", "rb") as stream,
        ):
            return PartStats(**json.loads(parquet.read_schema(stream).metadata[_FOOTER]))

    def _part_chunks(self) -> list[str]:
        """Names of the chunks whose parts are there."""
        self._fs.invalidate_cache()
        paths: list[str] = []
        with one_line(f"{self.url} cannot be listed", "choose another --out"), suppress(FileNotFoundError):
            paths = self._fs.ls(self._root, detail=False)
        matches = (_PART.fullmatch(path.rstrip("/").rpartition("/")[2]) for path in paths)
        return sorted(match[1] for match in matches if match)

    def _write(self, name: str, content: bytes) -> None:
        if self.local is not None:
            with storage.atomic_path(self.local / name) as temporary:
                temporary.write_bytes(content)
            return
        with one_line(f"cannot write {self.url}/{name}", "choose another --out"):
            self._fs.pipe_file(f"{self._root}/{name}", content)
