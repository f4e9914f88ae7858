"""Ready-made class features: one vector per class, with the folders its photos lie in."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from react_clip.errors import ReactClipError, first_line


@dataclass(frozen=True, eq=False)
class ClassFeatures:
    """``features[k]``, of ``[classes, dim]``, is the class called ``names[k]``, whose photos lie in ``folders[k]``."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    features: Tensor

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or not 0 < len(self.names) == len(self.folders) == len(self.features):
            raise ReactClipError(
                f"features have shape {tuple(self.features.shape)} for {len(self.names)} names and "
                f"{len(self.folders)} folders; they must be [classes, dimension], one row per name"
            )

    def __len__(self) -> int:
        return len(self.names)


def load_class_features(path: str | Path) -> ClassFeatures:
    """Read an ``.npz`` with the arrays ``names``, ``features`` and, unless they equal the names, ``folders``."""
    if not Path(path).is_file():
        raise ReactClipError(f"no class features at {path}; give a .npz file with names and features")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = tuple(map(str, arrays["names"].tolist()))
            folders = tuple(map(str, arrays["folders"].tolist())) if "folders" in arrays.files else names
            return ClassFeatures(names, folders, torch.as_tensor(arrays["features"], dtype=torch.float32))
    except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ReactClipError(f"{path} holds no class features ({first_line(error)}); write it again") from error
