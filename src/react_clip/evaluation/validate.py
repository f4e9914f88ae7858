"""Checks before a run: recipe, data, class features and weights. No attack and no defence is run."""

from __future__ import annotations

import dataclasses
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

    sets: dict[str, str]
    """For each set that can be run: images, classes and where the class features come from."""
    crafted: int
    """Adversarial images to craft."""
    answers: int
    """Answers of defences."""
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
        ]


def validate(
    recipe: Recipe, *, root: Path | None = None, heads: Path | None = None, device: str | None = None
) -> Validation:
    """Check everything a run needs. Problems are collected: of model and defences, or else of the data sets."""
    root = data_room.default_root() if root is None else root
    recipe = recipe.with_sets_under(root)
    problems, sets, images = list[str](), dict[str, str](), 0
    try:
        encoder, attacked = load_encoders(recipe, device)
        check_replayable(attacked, encoder)
        for item in recipe.defenses:
            item.defense.check(encoder)
    except ReactClipError as error:
        problems.append(str(error))
    for name in recipe.datasets if not problems else ():
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
    return Validation(sets, crafted, answers, tuple(problems))
