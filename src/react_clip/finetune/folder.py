"""The folder of a finetuning run: settings, checkpoint, log, finished tower.

Only one process at a time uses it, it belongs to one configuration, and every file in it is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from react_clip import storage
from react_clip.encoders.checkpoints import RECORD, SETTINGS, TOWER
from react_clip.errors import ReactClipError, first_line

LOG, _CHECKPOINT = "log.csv", "checkpoint.pt"


class Row(NamedTuple):
    """One step of the log, counted from 1; accuracy in [0, 1] on held-out photos where they were checked."""

    step: int
    loss: float
    lr: float
    clean: float | None = None
    half: float | None = None
    """Attacked with half of the largest budget."""
    full: float | None = None
    """Attacked with all of it."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; ``identity`` holds all values that decide its outcome, as JSON."""

    path: Path
    identity: Mapping[str, Any]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for this process; refuse one that belongs to another configuration."""
        with storage.held_folder(self.path):
            self._check_identity()
            yield

    def _check_identity(self) -> None:
        """Write the identity into a fresh folder; refuse a folder that holds another one."""
        path = self.path / SETTINGS
        if not path.is_file():
            if other := [name for name in (RECORD, TOWER, _CHECKPOINT, "config.json") if (self.path / name).exists()]:
                raise ReactClipError(f"{self.path} has a {other[0]} but no {SETTINGS}; choose another --out")
            storage.write_text(path, json.dumps(self.identity, indent=2) + "\n")
        elif different := sorted(_differences(storage.read_json(path, "choose another --out"), self.identity)):
            raise ReactClipError(
                f"{self.path} holds another run (other {', '.join(different)}); give the same values to continue it, "
                "or choose another --out"
            )

    def record(self) -> dict[str, Any] | None:
        """The record of a finished run; ``None`` before it is finished."""
        if not (self.path / RECORD).is_file():
            return None
        (self.path / _CHECKPOINT).unlink(missing_ok=True)  # up to three times the size of the tower
        record: dict[str, Any] = storage.read_json(self.path / RECORD, "remove the folder and finetune again")
        return record

    def finish(self, tower: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write the tower, then the record, with which the run counts as finished."""
        tensors = {f"visual.{key}": tensor.cpu() for key, tensor in tower.items()}
        storage.write_tensors(self.path / TOWER, tensors, {"format": "pt"})
        complete = {**record, "sha256": storage.sha256_of(self.path / TOWER)}
        storage.write_text(self.path / RECORD, json.dumps(complete, indent=2) + "\n")

    def write(self, rows: Iterable[Row], checkpoint: memoryview) -> None:
        """Write the log, then the checkpoint: rows of steps after it are dropped when the run continues."""
        # ``repr`` keeps every bit of a number, so that two logs can be compared.
        lines = (",".join("" if value is None else repr(value) for value in row) for row in rows)
        storage.write_text(self.path / LOG, "\n".join([",".join(Row._fields), *lines, ""]))
        with storage.atomic_path(self.path / _CHECKPOINT) as temporary:
            temporary.write_bytes(checkpoint)

    def checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint; ``None`` where there is none."""
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises almost anything on a damaged file
            raise ReactClipError(f"{path} is damaged ({first_line(error)}); remove it to begin again") from None
        if state["identity"] != self.identity:
            raise ReactClipError(f"{path} belongs to another run; remove it, or choose another --out")
        return state


def _differences(stored: Any, given: Any, name: str = "") -> Iterator[str]:
    """Names of the values in which two configurations differ.

    >>> list(_differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    ['b.c']
    """
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in {**stored, **given}:
            yield from _differences(stored.get(key), given.get(key), f"{name}.{key}" if name else key)
    elif stored != given:
        yield name or "everything"


def read_log(path: Path) -> list[Row]:
    """The rows of a log; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    parts = ([None if value == "" else float(value) for value in line.split(",")] for line in lines)
    return [Row(int(step or 0), *rest) for step, *rest in parts]  # type: ignore[arg-type]
