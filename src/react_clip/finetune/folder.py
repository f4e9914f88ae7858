"""The folder of a finetuning run: settings, checkpoint, loss log, finished tower.

Only one process at a time uses it, it belongs to one configuration, and every file in it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip import storage
from react_clip.encoders.checkpoints import RECORD, SETTINGS, TOWER
from react_clip.errors import ReactClipError, first_line

_CHECKPOINT = "checkpoint.safetensors"
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; ``identity`` holds all values that decide its outcome."""

    path: Path
    identity: Mapping[str, Any]

    @property
    def log(self) -> Path:
        """File with the loss of every step up to the last checkpoint."""
        return self.path / "log.csv"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for this process; refuse one that belongs to another configuration."""
        with storage.held_folder(self.path):
            self._check_identity()
            yield

    def record(self) -> dict[str, Any] | None:
        """The record of a finished run; ``None`` before it is finished."""
        if not (self.path / RECORD).is_file():
            return None
        (self.path / _CHECKPOINT).unlink(missing_ok=True)  # left where a kill came after the record
        advice = "remove the folder and finetune again"
        record: dict[str, Any] = storage.read_json(self.path / RECORD, advice)
        return record

    def finish(self, tower: Mapping[str, Tensor], record: Mapping[str, Any]) -> dict[str, Any]:
        """Write the tower, then the record, with which the run counts as finished; returns the record."""
        tensors = {f"visual.{key}": tensor.cpu() for key, tensor in tower.items()}
        storage.write_tensors(self.path / TOWER, tensors, {"format": "pt"})
        complete = {**record, "sha256": storage.sha256_of(self.path / TOWER)}
        storage.write_text(self.path / RECORD, json.dumps(complete, indent=2) + "\n")
        # Up to three times the size of the tower, and not needed beside it.
        (self.path / _CHECKPOINT).unlink(missing_ok=True)
        return complete

    def write(self, rows: Iterable[Row], tensors: dict[str, Tensor], step: int, seconds: float) -> None:
        """Write the log, then everything that the next step depends on into one file.

        The log comes first: rows of steps after the checkpoint are dropped when the run continues.
        """
        write_log(self.log, rows)
        header = {"step": step, "seconds": seconds, "identity": self._digest()}
        # One entry, because safetensors writes several in no fixed order.
        storage.write_tensors(self.path / _CHECKPOINT, tensors, {"react-clip": json.dumps(header)})

    def restore(self, weights: Weights, average: Weights, optimiser: torch.optim.Optimizer) -> tuple[int, float]:
        """Set weights, their average and the optimiser to the last checkpoint; returns its step and the seconds so far.

        Without a checkpoint they stay as they are, and both numbers are 0.
        """
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return 0, 0.0
        try:
            with safe_open(path, framework="pt") as stored:
                header = json.loads((stored.metadata() or {})["react-clip"])
                if header["identity"] != self._digest():
                    raise ReactClipError(f"{path} belongs to another run; remove it, or choose another --out")
                state: dict[int, dict[str, Tensor]] = {number: {} for number in range(len(weights))}
                for name in stored.keys():  # noqa: SIM118 (no mapping)
                    kind, _, key = name.partition("/")
                    tensor = stored.get_tensor(name)
                    if kind.isdigit():
                        state[int(kind)][key] = tensor
                    else:
                        (weights if kind == "weights" else average)[key].data.copy_(tensor)
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
            return int(header["step"]), float(header["seconds"])
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise ReactClipError(f"{path} is damaged ({first_line(error)}); remove it to begin again") from None

    def _check_identity(self) -> None:
        """Write the identity into a fresh folder; refuse a folder that holds another one."""
        path, given = self.path / SETTINGS, json.loads(json.dumps(self.identity))
        if not path.is_file():
            if other := [name for name in (RECORD, TOWER, _CHECKPOINT, "config.json") if (self.path / name).exists()]:
                raise ReactClipError(f"{self.path} has a {other[0]} but no {SETTINGS}; choose another --out")
            storage.write_text(path, json.dumps(given, indent=2) + "\n")
            return
        stored = storage.read_json(path, "choose another --out")
        if different := sorted(_differences(stored, given)):
            raise ReactClipError(
                f"{self.path} holds another run (other {', '.join(different)}); give the same values to continue it, "
                "or choose another --out"
            )

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


def snapshot(weights: Weights, average: Weights, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy in memory of all tensors that the next step depends on, while training changes the tensors themselves."""
    named = {f"weights/{name}": weight for name, weight in weights.items()}
    named |= {f"average/{name}": mean for name, mean in average.items()}
    # The optimiser knows the weights by their order.
    state = optimiser.state_dict()["state"]
    named |= {f"{number}/{key}": value for number, each in state.items() for key, value in each.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}


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


def write_log(path: Path, rows: Iterable[Row]) -> None:
    """Write the log; ``repr`` keeps every bit, so that two logs can be compared."""
    lines = (",".join("" if value is None else repr(value) for value in row) for row in rows)
    storage.write_text(path, "\n".join([",".join(Row._fields), *lines, ""]))


def read_log(path: Path) -> list[Row]:
    """The rows of a log; none where there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    parts = ([None if value == "" else float(value) for value in line.split(",")] for line in lines)
    return [Row(int(step or 0), *rest) for step, *rest in parts]  # type: ignore[arg-type]
