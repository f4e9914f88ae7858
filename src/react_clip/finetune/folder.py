"""A run's folder: one process at a time, one configuration for ever, and checkpoints that are whole or not there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from react_clip import storage
from react_clip.encoders.checkpoints import RECORD, SETTINGS, TOWER
from react_clip.errors import ReactClipError, first_line

LOG = "log.csv"
_CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Place:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RunFolder:
    """The folder of one finetuning run; ``identity`` is all that decides its outcome."""

    path: Path
    identity: Mapping[str, Any]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process and this configuration."""
        with storage.held_folder(self.path):
            self._claim()
            yield

    def record(self) -> dict[str, Any] | None:
        """What a finished run says about itself; ``None`` before it is finished."""
        if not (self.path / RECORD).is_file():
            return None
        self.drop_checkpoint()
        way_out = "remove the folder and finetune again"
        record: dict[str, Any] = storage.read_json(self.path / RECORD, missing=way_out, invalid=way_out)
        return record

    def finish(self, tower: Mapping[str, Tensor], record: Mapping[str, Any]) -> dict[str, Any]:
        """Write the tower, then the record that makes the run count as finished; the checkpoint has served."""
        tensors = {f"visual.{key}": tensor.cpu() for key, tensor in tower.items()}
        storage.write_tensors(self.path / TOWER, tensors, {"format": "pt"})
        whole = {**record, "sha256": storage.sha256_of(self.path / TOWER)}
        storage.write_text(self.path / RECORD, json.dumps(whole, indent=2) + "\n")
        self.drop_checkpoint()
        return whole

    def drop_checkpoint(self) -> None:
        """Three times the size of the tower, and of no use once the tower is there."""
        (self.path / _CHECKPOINT).unlink(missing_ok=True)

    def save(self, place: Place, weights: Mapping[str, nn.Parameter], optimiser: torch.optim.AdamW) -> None:
        """Keep everything that the next step depends on, in one file."""
        tensors = {f"weights/{name}": weight.detach().cpu() for name, weight in weights.items()}
        for name, weight in weights.items():
            tensors |= {f"{moment}/{name}": optimiser.state[weight][moment].cpu() for moment in _MOMENTS}
        header = {"step": place.step, "seconds": place.seconds, "identity": self._digest()}
        # One entry, because safetensors writes several in no fixed order.
        storage.write_tensors(self.path / _CHECKPOINT, tensors, {"react-clip": json.dumps(header)})

    def restore(self, weights: Mapping[str, nn.Parameter], optimiser: torch.optim.AdamW) -> Place:
        """Put weights and optimiser where the last checkpoint left them; a fresh run stays as it is."""
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return Place()
        try:
            with safe_open(path, framework="pt") as stored:
                header = json.loads((stored.metadata() or {})["react-clip"])
                if header["identity"] != self._digest():
                    raise ReactClipError(f"{path} belongs to another run; remove it, or choose another --out")
                state = {}
                for number, (name, weight) in enumerate(weights.items()):
                    with torch.no_grad():
                        weight.copy_(stored.get_tensor(f"weights/{name}"))
                    moments = {moment: stored.get_tensor(f"{moment}/{name}") for moment in _MOMENTS}
                    state[number] = {"step": torch.tensor(float(header["step"])), **moments}
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
            return Place(int(header["step"]), float(header["seconds"]))
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            reason = first_line(error)
            raise ReactClipError(f"{path} is damaged ({reason}); remove it to begin again") from None

    def _claim(self) -> None:
        """Write the configuration into a fresh folder; refuse a folder that holds another one."""
        place, ours = self.path / SETTINGS, json.loads(json.dumps(self.identity))
        if not place.is_file():
            if taken := [name for name in (RECORD, TOWER, _CHECKPOINT, "config.json") if (self.path / name).exists()]:
                raise ReactClipError(f"{self.path} has a {taken[0]} but no {SETTINGS}; choose another --out")
            storage.write_text(place, json.dumps(ours, indent=2) + "\n")
            return
        theirs = storage.read_json(place, missing="choose another --out", invalid="choose another --out")
        if other := sorted(_differences(theirs, ours)):
            raise ReactClipError(
                f"{self.path} holds another run (other {', '.join(other)}); give the same values to continue it, or "
                "choose another --out"
            )

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[str]:
    """Names of the values in which two configurations differ.

    >>> list(_differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    ['b.c']
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            yield from _differences(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
    elif theirs != ours:
        yield name or "everything"
