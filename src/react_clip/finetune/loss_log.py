"""``log.csv``: the loss of every step, once each, whatever happens to the process that writes it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch import Tensor

from react_clip import storage
from react_clip.errors import ReactClipError

Progress = Callable[[int, int, float], None]
"""Called with the steps done, the steps in all, and the latest loss."""

_HEADER = "step,loss,lr"


@dataclass(frozen=True)
class Row:
    """One step, counted from 1."""

    step: int
    loss: float
    lr: float


def read_log(path: Path) -> list[Row]:
    """The whole rows of a log, as far as they go without a gap; a row cut off by a kill is none."""
    if not path.is_file():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="ascii", errors="replace").splitlines(keepends=True)[1:]:
        parts = line.split(",")
        try:
            row = Row(int(parts[0]), float(parts[1]), float(parts[2]))
        except (ValueError, IndexError):
            break
        if not line.endswith("\n") or row.step != len(rows) + 1:
            break
        rows.append(row)
    return rows


class LossLog:
    """Rows are written one step late: reading a loss at once would leave the device idle until the next step."""

    def __init__(self, path: Path, *, done: int, total: int, progress: Progress | None) -> None:
        """Continue a log after ``done`` steps; rows of steps that will be done again are dropped."""
        kept = read_log(path)[:done]
        storage.write_text(path, "".join([f"{_HEADER}\n", *map(_line, kept)]))
        self._path, self._total, self._progress = path, total, progress
        self._pending: tuple[int, Tensor, float] | None = None
        self._stream: TextIO = path.open("a", encoding="ascii")

    def add(self, step: int, loss: Tensor, lr: float) -> None:
        """Note a step, counted from 1, and write the one before it."""
        before, self._pending = self._pending, (step, loss, lr)
        self._write(before)

    def flush(self) -> None:
        """Write what is left, and have it on the disk."""
        before, self._pending = self._pending, None
        self._write(before)
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()

    def _write(self, pending: tuple[int, Tensor, float] | None) -> None:
        if pending is None:
            return
        row = Row(pending[0], float(pending[1]), pending[2])
        if not math.isfinite(row.loss):
            raise ReactClipError(
                f"the loss is {row.loss} at step {row.step}; the last checkpoint is kept: try a smaller learning rate "
                "(--lr) or --dtype fp32, in another --out"
            )
        try:
            self._stream.write(_line(row))
            self._stream.flush()
        except OSError as error:
            raise self._failure(error) from error
        if self._progress is not None:
            self._progress(row.step, self._total, row.loss)

    def _failure(self, error: OSError) -> ReactClipError:
        return ReactClipError(f"cannot write {self._path}: {error.strerror}; free some space and run it again")


def _line(row: Row) -> str:
    # repr keeps every bit, so that two logs can be compared.
    return f"{row.step},{row.loss!r},{row.lr!r}\n"
