"""Looking at a run: the photos that it kept, clean and attacked, one at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip.evaluation.images import to_float
from react_clip.evaluation.recipe import CLEAN, format_eps
from react_clip.evaluation.run_dir import SHARDS
from react_clip.evaluation.store import slug

IMAGES = "images"
"""What shards that hold pixels are called."""


class Pictures:
    """Pixels of a run's folder; ``None`` where it kept none, or where a shard cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._shards = Path(folder) / SHARDS
        self._places = cache(self._list)

    def clean(self, dataset: str, index: int) -> Tensor | None:
        """The photo as the encoder saw it, ``[3, S, S]`` in [0, 1]."""
        return self._read(dataset, CLEAN.label, index)

    def attacked(self, dataset: str, attack: str, eps: float, index: int, defense: str | None = None) -> Tensor | None:
        """The adversarial photo as it was stored, ``[3, S, S]`` in [0, 1]; ``None`` for one that was not attacked.

        Attacks that know the defence made one for each: name it.
        """
        return self._read(dataset, f"{attack} {format_eps(eps)}", index, *([] if defense is None else [defense]))

    def _read(self, dataset: str, title: str, index: int, *more: str) -> Tensor | None:
        for start, place in reversed(self._places(dataset, title, *more)):
            if start <= index:
                try:
                    return _picture(place, index)
                except (OSError, SafetensorError, ValueError, KeyError):
                    return None
        return None

    def _list(self, *path: str) -> list[tuple[int, Path]]:
        folder = self._shards.joinpath(*(slug(part) for part in path), IMAGES)
        return sorted((int(place.stem), place) for place in folder.glob("*.safetensors") if place.stem.isdigit())


def _picture(place: Path, index: int) -> Tensor | None:
    with safe_open(place, framework="pt") as stored:
        names = set(stored.keys())
        if not {IMAGES, "index"} <= names:
            return None
        row = (stored.get_tensor("index") == index).nonzero().flatten()
        return to_float(stored.get_slice(IMAGES)[int(row[0])]) if len(row) else None
