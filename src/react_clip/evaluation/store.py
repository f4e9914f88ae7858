"""The folder of a run: its recipe and its shards, the finished pieces of work.

A shard is a safetensors file that is written whole or not at all. Its header (one JSON text, ``react-clip``) says what
it was computed from and holds the SHA-256 of its tensors. Reading compares both: a truncated file, a flipped bit or a
shard of other weights, data, settings or code is logged and computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip import storage
from react_clip.errors import ReactClipError, first_line
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.results import IMAGES, RESULT
from react_clip.evaluation.yaml import read_yaml
from react_clip.optional import require
from react_clip.preprocess import to_float

log = logging.getLogger("react_clip.evaluation")

RECIPE, SHARDS = "recipe.yaml", "shards"
PIXELS = "images"
"""Name of shards that hold pixels, and of the pixels in them."""
CLASSES = "classes"
"""Name of shards that hold class features."""
PLAIN = "plain"
"""Name of shards that hold the answers of undefended CLIP on clean photos."""

Tensors = dict[str, Tensor]
_HEADER = "react-clip"


def run_folder(name: str, recipe: Recipe) -> Path:
    """Where a run goes by default: another folder for every recipe, such as ``runs/MyDefense-1a2b3c4d``."""
    return Path("runs") / f"{name}-{recipe.fingerprint()[:8]}"


@contextmanager
def open_run(folder: Path, recipe: Recipe) -> Iterator[ShardStore]:
    """Lock the folder for this process, check or write its recipe, and give the store of its shards.

    Packages that the end of a run needs are imported first: a missing one must not show after hours of work.
    """
    for package in ("pandas", "pyarrow.parquet"):
        require(package, "evaluating", extra="eval")
    with storage.held_folder(folder):
        store = ShardStore(folder / SHARDS)
        _check_or_write_recipe(folder, recipe)
        for leftover in store.folder.rglob(".*.part"):  # of processes that were killed
            leftover.unlink(missing_ok=True)
        yield store


_GROWING = ("datasets", "attacks", "defenses", "seeds")
_DESCRIBING = ("title", "paper", "worst_of", "self_check")
"""Keys that change no shard."""


def _check_or_write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into a new folder, or one that a finished or interrupted run has grown to.

    Data sets, attacks, defences and seeds may be added, never changed or left out: no answer of a run is lost.
    """
    path, asked = folder / RECIPE, recipe.to_dict()
    if path.exists():
        try:
            stored = read_yaml(path)
        except ReactClipError as error:
            raise ReactClipError(f"{error}; remove it to continue, or choose another --out") from None
        if stored.keys() != asked.keys():
            raise ReactClipError(f"{path} is of another version of react-clip; choose another --out")
        for key in [key for key in asked if key not in _DESCRIBING]:
            if key in _GROWING:
                lost = [item for item in stored[key] if item not in asked[key]]
            else:
                lost = [stored[key]] if stored[key] != asked[key] else []
            for item in lost:
                name = item["label"] if key in ("attacks", "defenses") else item
                raise ReactClipError(
                    f"{folder} holds a run of {stored['title']!r} with {name!r} in its {key}, which is missing now or "
                    "differs; a run only grows: ask for it as it was, or choose another --out"
                )
    elif existing := [name for name in (RESULT, IMAGES) if (folder / name).exists()]:
        raise ReactClipError(f"{folder} has a {existing[0]} but no {RECIPE}; choose another --out")
    recipe.save(path)


# ---------------------------------------------------------------------- shards


@dataclass(frozen=True, eq=False)
class Shard:
    """The tensors of a shard and their digest, which names them as the source of later shards."""

    tensors: Tensors
    digest: str


@dataclass(frozen=True)
class ShardStore:
    """Shards below one folder, addressed by a path of labels."""

    folder: Path

    def read(self, path: tuple[str, ...], about: dict[str, Any]) -> Shard | None:
        """The shard at ``path`` if it is intact and was computed from exactly ``about``, otherwise ``None``."""
        file = self._file(path)
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as stored:
                header = json.loads((stored.metadata() or {})[_HEADER])
                tensors = {name: stored.get_tensor(name) for name in sorted(stored.keys())}
            if storage.tensor_digest(tensors) != header["sha256"]:
                raise ValueError("its content does not match its hash")
            before, about = dict(header["about"]), json.loads(json.dumps(about))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            log.warning("%s is damaged (%s); it is computed again", file, first_line(error))
            return None
        if changed := sorted(key for key in {*before, *about} if before.get(key) != about.get(key)):
            others = ", ".join(changed)
            log.warning("%s was computed from something else (other %s); it is computed again", file, others)
            return None
        return Shard(tensors, header["sha256"])

    def write(self, path: tuple[str, ...], about: dict[str, Any], tensors: Tensors) -> Shard:
        """Write a finished shard."""
        # Clones, because safetensors refuses tensors that share memory, as unmeasured diagnostics may.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in sorted(tensors.items())}
        digest = storage.tensor_digest(tensors)
        # One entry, because safetensors writes several in no fixed order and equal content must give equal files.
        header = json.dumps({"about": about, "sha256": digest}, sort_keys=True)
        storage.write_tensors(self._file(path), tensors, {_HEADER: header})
        return Shard(tensors, digest)

    def get(self, path: tuple[str, ...], about: dict[str, Any], compute: Callable[[], Tensors]) -> Shard:
        """The shard at ``path``, read back, or computed and written."""
        return self.read(path, about) or self.write(path, about, compute())

    def _file(self, path: tuple[str, ...]) -> Path:
        *folders, name = (slug(part) for part in path)
        return self.folder.joinpath(*folders, f"{name}.safetensors")


def slug(text: str) -> str:
    """A file name for any label: readable, and different for different labels.

    >>> slug("pgd-10"), slug("ReACT tau 0.4")
    ('pgd-10', 'react-tau-0.4-823df1')
    """
    plain = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.")[:48]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def stored_image(folder: Path, index: int, *labels: str) -> Tensor | None:
    """The image ``[3, S, S]`` in [0, 1] that a run stored for photo ``index``; ``None`` where it stored none.

    The labels are the data set, then ``clean`` or the title of the attack, then the defence that the attack knows.
    """
    place = folder.joinpath(SHARDS, *map(slug, labels), PIXELS)
    files = [file for file in sorted(place.glob("*.safetensors")) if int(file.stem) <= index]
    if not files:
        return None
    try:
        with safe_open(files[-1], framework="pt") as stored:
            row = (stored.get_tensor("index") == index).nonzero().flatten()
            return to_float(stored.get_slice(PIXELS)[int(row[0])]) if len(row) else None
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
