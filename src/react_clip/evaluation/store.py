"""The store of a run: finished pieces of work, each one file that is there whole or not at all.

A shard is a safetensors file. Its header (one JSON text, ``react-clip``) says what it was computed from and carries the
SHA-256 of its tensors. Reading compares both, so that a truncated file, a flipped bit or a shard of other weights, data
or settings is never mistaken for a result: it is reported in the log and computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip import storage
from react_clip.errors import first_line

log = logging.getLogger("react_clip.evaluation")

Tensors = dict[str, Tensor]
_FORMAT = "react-clip shard 2"
_HEADER = "react-clip"


@dataclass(frozen=True, eq=False)
class Shard:
    """The content of a shard, and its digest for whatever is computed from it."""

    tensors: Tensors
    digest: str


@dataclass(frozen=True)
class ShardStore:
    """Shards below one folder, found by path and accepted by content."""

    folder: Path

    def read(self, path: tuple[str, ...], about: dict[str, Any]) -> Shard | None:
        """A finished shard computed from exactly ``about``; ``None`` where there is none that can be trusted."""
        place = self._place(path)
        try:
            shard, found = _read(place)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = first_line(error)
            log.warning("%s is damaged (%s); it is computed again", place, reason)
            return None
        if found != _canonical(about):
            log.warning(
                "%s was computed from something else (%s); it is computed again", place, _difference(found, about)
            )
            return None
        return shard

    def write(self, path: tuple[str, ...], about: dict[str, Any], tensors: Tensors, note: str = "") -> Shard:
        """Keep a finished shard."""
        # Clones, because safetensors refuses tensors that share memory, as diagnostics may that nobody measured.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in sorted(tensors.items())}
        digest = _digest(tensors)
        header = {"format": _FORMAT, "about": _canonical(about), "sha256": digest, "note": note}
        # One entry, because safetensors writes several in no fixed order: the same content is to be the same file.
        storage.write_tensors(self._place(path), tensors, {_HEADER: _canonical(header)})
        return Shard(tensors, digest)

    def sweep(self) -> None:
        """Remove what a killed run left half-written."""
        for leftover in self.folder.rglob(".*.part"):
            leftover.unlink(missing_ok=True)

    def _place(self, path: tuple[str, ...]) -> Path:
        *folders, name = (slug(part) for part in path)
        return self.folder.joinpath(*folders, f"{name}.safetensors")


def slug(text: str) -> str:
    """A file name for any label: readable, and different for different labels.

    >>> slug("pgd-10"), slug("ReACT tau 0.4")
    ('pgd-10', 'react-tau-0.4-823df1')
    """
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.")[:48]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    return _digest({"": tensor.detach().cpu().contiguous()})


def _read(place: Path) -> tuple[Shard, str]:
    if not place.is_file():
        raise FileNotFoundError
    with safe_open(place, framework="pt") as stored:
        header = json.loads((stored.metadata() or {})[_HEADER])
        tensors = {name: stored.get_tensor(name) for name in sorted(stored.keys())}
    if header["format"] != _FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
    if _digest(tensors) != header["sha256"]:
        raise ValueError("its content does not match its hash")
    return Shard(tensors, header["sha256"]), header["about"]


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _canonical(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def _difference(found: str, about: dict[str, Any]) -> str:
    """Which entries differ, for the log."""
    try:
        before = json.loads(found)
        keys = sorted(key for key in {*before, *about} if before.get(key) != json.loads(_canonical(about)).get(key))
    except (ValueError, TypeError, AttributeError):
        return "its description is unreadable"
    return "other " + ", ".join(keys)
