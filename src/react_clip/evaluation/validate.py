"""Checks before a run: recipe, data, class features, weights and disk space. No attack and no defence is run."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from react_clip import data as data_room
from react_clip.attacks.base import ADAPTIVE
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.sets import check_replayable, class_source, load_encoders


@dataclass(frozen=True)
class Validation:
    """What a run needs; numbers are upper bounds, because it is not known before which images are attacked."""

    title: str
    model: str
    sets: dict[str, str]
    """For each set that can be run: images, classes and where the class features come from."""
    crafted: int
    """Adversarial images to craft."""
    answers: int
    """Answers of defences."""
    disk_bytes: int
    disk_free: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the run can start."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """One line per set, then the totals; problems are listed apart."""
        return [
            *(f"{name}: {text}" for name, text in self.sets.items()),
            f"work: at most {self.crafted:,} adversarial images and {self.answers:,} defended answers",
            f"disk: at most {_size(self.disk_bytes)} of {_size(self.disk_free)} free",
        ]


def validate(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: Path | None = None,
    heads: Path | None = None,
    device: str | None = None,
) -> Validation:
    """Check everything a run needs. Problems are collected, not raised one at a time."""
    root = data_room.default_root() if root is None else root
    recipe = recipe.with_sets_under(root)
    problems, sets, images, size = list[str](), dict[str, str](), 0, 0
    try:
        encoder, attacked = load_encoders(recipe, device)
        size = encoder.image_size
        check_replayable(attacked, encoder)
        for item in recipe.defenses:
            item.defense.check(encoder)
    except ReactClipError as error:
        problems.append(str(error))
    for name in recipe.datasets if size else ():
        try:
            source = class_source(encoder, data_room.load(name, root=root, split="test"), heads, root)
        except ReactClipError as error:
            problems.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
            continue
        dataset = source.dataset if recipe.limit is None else source.dataset.take(recipe.limit)
        images += len(dataset)
        sets[name] = f"{len(dataset):,} images, {len(dataset.class_names):,} classes, {source.description}"
    crafted = images * len(recipe.attacks) * (len(recipe.defenses) if recipe.threat == ADAPTIVE else 1)
    answers = images * len(recipe.defenses) * len(recipe.seeds) * (1 + len(recipe.attacks))
    # A stored image has three bytes a pixel, clean ones included; an answer about 120 in its shard and in Parquet. A
    # shard has a header, and all shards but the last of a set hold a whole batch.
    stored = 0 if recipe.images.store == "none" else 3 * size**2
    shards = (2 * images + crafted + answers) // recipe.batch + 2 * len(sets) * len(recipe.defenses) * len(recipe.seeds)
    needed, free = stored * (images + crafted) + 120 * answers + 4096 * (shards + 16), _free(Path(folder))
    if needed > free:
        problems.append(
            f"the run may need {_size(needed)} in {folder}, but {_size(free)} are free; free some, choose another "
            "--out, or set images: {store: none}"
        )
    return Validation(recipe.title, recipe.model, sets, crafted, answers, needed, free, tuple(problems))


def _free(folder: Path) -> int:
    """Free bytes on the file system of a folder that may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def _size(count: int) -> str:
    """A number of bytes as text.

    >>> _size(3_500_000)
    '3.5 MB'
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
