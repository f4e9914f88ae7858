"""Ready-made class features: one unit vector per class, with the folders its photos lie in."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip.errors import ReactClipError, first_line


@dataclass(frozen=True, eq=False)
class Head:
    """``features[k]`` is the class called ``names[k]``, whose photos lie in ``folders[k]``."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    features: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.features.shape)
        if len(shape) != 2 or shape[0] != len(self.names) or len(self.folders) != len(self.names) or not self.names:
            raise ReactClipError(
                f"features have shape {shape} for {len(self.names)} names and {len(self.folders)} folders; "
                "a head needs [classes, dimension] features, one row per name"
            )
        if not bool(torch.isfinite(self.features).all()) or bool((self.features.norm(dim=1) == 0).any()):
            raise ReactClipError("features hold a NaN, an infinity or an all-zero row; compute the head again")

    def __len__(self) -> int:
        return len(self.names)


def load_head(path: str | Path) -> Head:
    """Read a head; nothing in the file is executed.

    Either ``.npz`` with the arrays ``names`` and ``features``, or ``.safetensors`` with the tensor ``features`` and
    ``names`` as a JSON list in its metadata. Both may have ``folders``, which default to the names.
    """
    path = Path(path)
    if not path.is_file():
        raise ReactClipError(f"no head at {path}; give a .npz or .safetensors file with class names and features")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ReactClipError(f"{path} ends in {path.suffix!r}; a head is a .npz or a .safetensors file")
    try:
        names, folders, features = readers[path.suffix](path)
        return Head(tuple(names), tuple(folders or names), torch.as_tensor(features, dtype=torch.float32))
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        reason = first_line(error)
        raise ReactClipError(
            f"{path} is not a head ({reason}); write names and features with one row per name"
        ) from error


def _read_npz(path: Path) -> tuple[list[str], list[str], Any]:
    with np.load(path, allow_pickle=False) as arrays:
        folders = arrays["folders"].tolist() if "folders" in arrays.files else []
        return [str(name) for name in arrays["names"].tolist()], [str(name) for name in folders], arrays["features"]


def _read_safetensors(path: Path) -> tuple[list[str], list[str], Any]:
    with safe_open(path, framework="pt") as tensors:
        metadata = tensors.metadata() or {}
        folders = json.loads(metadata.get("folders", "[]"))
        return json.loads(metadata["names"]), folders, tensors.get_tensor("features")
