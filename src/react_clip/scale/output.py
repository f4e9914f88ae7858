"""The output folder of ``defend_dataset``: Parquet files with one row per image, and their description beside it."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from react_clip import storage
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.scale.collection import file_system, is_shard


@dataclass(frozen=True)
class Summary:
    """Counts over all rows in the output folder after a job."""

    out: str
    images: int
    errors: int
    """Images that could not be decoded, and files that could not be read: rows with an error and nothing else."""
    gated: int
    """Images whose features the defence changed."""
    passes: float
    """Encoder passes spent on all images; a pass at a smaller size counts as its share of the tokens."""
    parts: int
    missing: tuple[str, ...]
    """One line for each shard that could not be read; a resumed job tries it again."""


class OutputFolder:
    """The output folder at a local path or an fsspec URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.root = file_system(self.url)
        self._parquet = require("pyarrow.parquet", "writing Parquet", extra="eval")

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes out of a local folder; object stores have no lock."""
        is_local = "file" in ((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)
        return storage.held_folder(Path(self.root)) if is_local else nullcontext()

    def claim(self, description: dict[str, Any], *, resume: bool) -> defaultdict[str, set[str]]:
        """Write the description; returns the keys of finished images by file. Raises if a part is of another job."""
        beside, parts = f"{self.root}.json", self._parts()
        if parts:
            earlier = json.loads(self.fs.cat_file(beside)) if self.fs.exists(beside) else {}
            if other := [name for name, value in description.items() if earlier.get(name) != value]:
                line = f"{self.url} holds another job (other {', '.join(other)}); continue with the same"
                raise ReactClipError(f"{line} (its seed: {earlier.get('seed')!r}), or choose another --out")
            if not resume:
                raise ReactClipError(f"{self.url} holds rows of this job; continue it with --resume, or remove them")
        else:
            self._write(beside, lambda: self.fs.pipe_file(beside, json.dumps(description, indent=1).encode()))
        done = defaultdict[str, set[str]](set)
        for file, key in itertools.chain.from_iterable(map(self._finished, parts)):
            done[file].add(key)
        return done

    def write(self, table: Any) -> None:
        """Write one part; names are in the order of time."""
        self._write_part(f"{self.root}/part-{time.time_ns()}.parquet", table)

    def _write_part(self, part: str, table: Any) -> None:
        self._write(part, lambda: self._parquet.write_table(table, part, filesystem=self.fs))

    def _write(self, path: str, write: Callable[[], object]) -> None:
        """Write a file; of a failure nothing is left."""
        try:
            write()
        except BaseException as error:  # object stores raise almost anything, and people stop a job
            with suppress(Exception):
                self.fs.rm_file(path)
            if not isinstance(error, Exception):
                raise
            raise ReactClipError(f"cannot write {path}: {first_line(error)}; --resume continues") from None

    def summary(self) -> Summary:
        """Counts over all parts."""
        if not (parts := self._parts()):
            raise ReactClipError("there is no image in the sources; give other folders or files")
        dataset = require("pyarrow.dataset", "reading Parquet", extra="eval").dataset(parts, filesystem=self.fs)
        table = dataset.to_table(["file", "key", "error", "gated", "passes"])
        failed = table.filter(table["error"].is_valid()).to_pylist()
        sums = table.select(["gated", "passes"]).group_by([]).aggregate([("gated", "sum"), ("passes", "sum")])
        return Summary(
            out=self.url,
            images=len(table),
            errors=len(failed),
            gated=sums["gated_sum"][0].as_py() or 0,
            passes=sums["passes_sum"][0].as_py() or 0.0,
            parts=len(parts),
            missing=tuple(row["error"] for row in failed if row["key"] == row["file"] and is_shard(row["file"])),
        )

    def _parts(self) -> list[str]:
        self.fs.invalidate_cache()
        return sorted(self.fs.glob(f"{self.root}/*.parquet"))

    def _finished(self, part: str) -> Iterable[tuple[str, str]]:
        """File and key of the images in a part; rows with errors are removed from it, so that they are tried again."""
        try:
            table = self._parquet.read_table(part, columns=["file", "key", "error"], filesystem=self.fs)
        except ValueError:  # the job was killed while it wrote this part
            self.fs.rm_file(part)
            return ()
        if table["error"].null_count < len(table):
            table = self._parquet.read_table(part, filesystem=self.fs)
            table = table.filter(table["error"].is_null())
            self._write_part(part, table)
        return zip(table["file"].to_pylist(), table["key"].to_pylist(), strict=True)
