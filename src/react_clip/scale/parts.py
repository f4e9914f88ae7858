"""The output folder: one Parquet file a finished parcel, whole or not there, and the plan they belong to.

Local folders are written through a temporary file, object stores with one put. A part that exists is never written
again; what it holds in sum stands in its footer, so that a job which continues reads no rows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from react_clip import storage
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.scale.files import local_path, locate
from react_clip.scale.plan import Plan

PLAN = "plan.json"
_NAME = re.compile(r"part-(\d+)\.parquet")
_META = b"react-clip"
_READERS = 16


@dataclass(frozen=True)
class Tally:
    """What a finished parcel holds in sum."""

    number: int
    images: int
    errors: int
    opened: int
    passes: int


def part_name(number: int) -> str:
    """The file of a parcel.

    >>> part_name(123)
    'part-000123.parquet'
    """
    return f"part-{number:06d}.parquet"


class Parts:
    """The output folder at a path or URL."""

    def __init__(self, url: str, base: str) -> None:
        self.url = url.rstrip("/")
        self._local = local_path(url, base)
        self._fs, self._root = locate(url, base)

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes out while this one drives the job; object stores have no such lock."""
        return nullcontext() if self._local is None else storage.held_folder(self._local)

    # ------------------------------------------------------------------ the plan

    def read_plan(self) -> Any:
        """The plan that the folder holds, ``None`` in a fresh one."""
        try:
            return json.loads(self._read(PLAN))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ReactClipError(f"{self.url}/{PLAN} is no valid JSON ({error}); choose another --out") from None

    def claim(self, plan: Plan, earlier: Any, *, resume: bool) -> dict[int, Tally]:
        """Make the folder this plan's, and say what is finished there; parts of another plan are refused."""
        names = self._names()
        if earlier is None and names:
            raise ReactClipError(f"{self.url} has a {names[0]} but no {PLAN}; choose another --out")
        if names and (other := plan.continues(earlier)):
            raise ReactClipError(
                f"{self.url} holds another job (other {', '.join(other)}); ask for the same again to continue it, or "
                "choose another --out"
            )
        if names and not resume:
            raise ReactClipError(
                f"{self.url} holds {len(names)} finished parts of this job; continue it with --resume, or choose "
                "another --out"
            )
        if (ours := plan.to_dict()) != earlier:
            self._write(PLAN, (json.dumps(ours, indent=1) + "\n").encode())
        with ThreadPoolExecutor(_READERS) as pool:
            tallies = pool.map(lambda name: self._tally(name, plan.identity), names)
            return {tally.number: tally for tally in tallies}

    # ------------------------------------------------------------------ parts

    def finished(self, number: int, identity: str) -> Tally | None:
        """What a part holds in sum; ``None`` where there is no part yet."""
        name = part_name(number)
        return self._tally(name, identity) if self._fs.exists(f"{self._root}/{name}") else None

    def write(self, table: Any, tally: Tally, identity: str) -> None:
        """Write the part of a finished parcel."""
        parquet = require("pyarrow.parquet", "writing Parquet", extra="scale")
        meta = {_META: json.dumps({"plan": identity, **asdict(tally)}).encode()}
        buffer = io.BytesIO()
        parquet.write_table(table.replace_schema_metadata(meta), buffer)
        self._write(part_name(tally.number), buffer.getvalue())

    def _tally(self, name: str, identity: str) -> Tally:
        parquet = require("pyarrow.parquet", "reading Parquet", extra="scale")
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as stream:
                meta = json.loads(parquet.read_schema(stream).metadata[_META])
        except Exception as error:  # object stores and damaged files raise almost anything
            raise ReactClipError(
                f"{self.url}/{name} cannot be read ({first_line(error)}); remove it to have it made again"
            ) from None
        if meta.pop("plan") != identity:
            raise ReactClipError(f"{self.url}/{name} belongs to another job; choose another --out")
        return Tally(**meta)

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found: Iterable[str] = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise ReactClipError(f"{self.url} cannot be listed: {first_line(error)}; choose another --out") from None
        return sorted(name for path in found if _NAME.fullmatch(name := path.rstrip("/").rpartition("/")[2]))

    # ------------------------------------------------------------------ bytes

    def _read(self, name: str) -> bytes:
        try:
            content: bytes = self._fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ReactClipError(f"{self.url}/{name} cannot be read: {first_line(error)}") from None
        return content

    def _write(self, name: str, content: bytes) -> None:
        if self._local is not None:
            with storage.atomic_path(self._local / name) as temporary:
                temporary.write_bytes(content)
            return
        try:
            self._fs.pipe_file(f"{self._root}/{name}", content)
        except Exception as error:
            raise ReactClipError(f"cannot write {self.url}/{name}: {first_line(error)}; choose another --out") from None
