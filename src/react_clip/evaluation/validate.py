"""Checks before a run: recipe, data, class features, weights, disk space and cost."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip import data as data_room
from react_clip import encoders
from react_clip.defenses import BaseDefense
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.evaluation.cost import Passes, attacked_cost, defense_cost, set_cost
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.sets import check_replayable, class_source
from react_clip.evaluation.threats import ADAPTIVE
from react_clip.preprocess import as_pixels
from react_clip.zeroshot import ZeroShotClassifier


@dataclass(frozen=True)
class SetReport:
    """One set before the run; ``problem`` is empty if it can be run."""

    name: str
    images: int = 0
    classes: int = 0
    class_source: str = ""
    notes: tuple[str, ...] = ()
    forward_passes: int = 0
    backward_passes: int = 0
    disk_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class DefenseReport:
    """Most passes to attack and run one defence that the attacker knows."""

    label: str
    forward_passes: int
    backward_passes: int


@dataclass(frozen=True)
class Validation:
    """The outcome of a validation; passes and bytes are upper bounds."""

    title: str
    model: str
    sets: tuple[SetReport, ...]
    forward_passes: int
    backward_passes: int
    disk_bytes: int
    disk_free: int
    problems: tuple[str, ...]
    defenses: tuple[DefenseReport, ...] = ()
    """Cost of each defence under adaptive attacks; empty for other threat models."""

    @property
    def ok(self) -> bool:
        """Whether the run can start."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """One line per set, then the totals."""
        found = [
            f"{report.name}: {report.problem}"
            if report.problem
            else f"{report.name}: {report.images:,} images, {report.classes:,} classes, {report.class_source}"
            for report in self.sets
        ]
        found += [
            f"{report.label}: at most {report.forward_passes:,} forward and {report.backward_passes:,} backward passes"
            for report in self.defenses
        ]
        found.append(f"cost: at most {self.forward_passes:,} forward and {self.backward_passes:,} backward passes")
        found.append(f"disk: at most {_size(self.disk_bytes)} of {_size(self.disk_free)} free")
        return found


def validate(
    recipe: Recipe,
    folder: str | Path,
    *,
    root: Path | None = None,
    heads: Path | None = None,
    device: str | None = None,
) -> Validation:
    """Check everything a run needs, and count what it costs. Problems are collected, not raised one at a time."""
    root = data_room.default_root() if root is None else root
    recipe = recipe.with_sets_under(root)
    problems: list[str] = []
    try:
        encoder = encoders.load(recipe.model, device=device, dtype=recipe.dtype)
    except ReactClipError as error:
        encoder = None
        problems.append(str(error))
    if encoder is not None and recipe.transfer_model is not None:
        try:
            source = encoders.load(recipe.transfer_model, device=device, dtype=recipe.attack_dtype or recipe.dtype)
            check_replayable(source, encoder)
        except ReactClipError as error:
            problems.append(f"transfer_model: {error}")
    reports = []
    costs: list[Passes] | None = None
    for name in recipe.datasets:
        try:
            report, costs = _check_set(recipe, name, encoder, root, heads, costs)
        except ReactClipError as error:
            report = SetReport(name, problem=str(error))
            problems.append(f"{name}: {error}")
        reports.append(report)
    needed, free = sum(report.disk_bytes for report in reports), _free(Path(folder))
    if needed > free:
        problems.append(
            f"the run may need {_size(needed)} in {folder}, but {_size(free)} are free; free some, choose another "
            "--out, or set images: {store: uint8} or {store: none}"
        )
    return Validation(
        title=recipe.title,
        model=recipe.model,
        sets=tuple(reports),
        forward_passes=sum(report.forward_passes for report in reports),
        backward_passes=sum(report.backward_passes for report in reports),
        disk_bytes=needed,
        disk_free=free,
        problems=tuple(problems),
        defenses=_defense_reports(recipe, sum(report.images for report in reports), costs),
    )


def _check_set(
    recipe: Recipe, name: str, encoder: Encoder | None, root: Path, heads: Path | None, costs: list[Passes] | None
) -> tuple[SetReport, list[Passes] | None]:
    dataset = data_room.load(name, root=root, split="test")
    if encoder is None:
        return SetReport(name, len(dataset), len(dataset.class_names), "no model to check them with"), None
    source = class_source(encoder, dataset, heads, root)
    dataset = source.dataset if recipe.limit is None else source.dataset.take(recipe.limit)
    if costs is None:
        # Finds defences that cannot run on this model, such as those that need a text tower.
        photo = as_pixels(dataset.image(0), encoder.image_size)
        costs = _defense_costs(recipe, encoder, photo)
    cost = set_cost(recipe, len(dataset), encoder.image_size, costs)
    report = SetReport(
        name=name,
        images=len(dataset),
        classes=len(source.dataset.class_names),
        class_source=source.description,
        notes=dataset.notes,
        forward_passes=cost.passes.forward,
        backward_passes=cost.passes.backward,
        disk_bytes=cost.disk_bytes,
    )
    return report, costs


def _defense_reports(recipe: Recipe, images: int, costs: list[Passes] | None) -> tuple[DefenseReport, ...]:
    if costs is None or recipe.threat != ADAPTIVE:
        return ()
    reports = []
    for number, item in enumerate(recipe.defenses):
        passes = Passes(0)
        for attack in recipe.all_attacks:
            passes += attacked_cost(recipe, attack, number, costs) * images
        reports.append(DefenseReport(item.label, passes.forward, passes.backward))
    return tuple(reports)


def _defense_costs(recipe: Recipe, encoder: Encoder, photo: Tensor) -> list[Passes]:
    """Passes per image of every defence; they do not depend on the classes, so two made-up ones are used."""
    for item in recipe.defenses:
        if isinstance(item.defense, BaseDefense):
            item.defense.check(encoder)
    clf = ZeroShotClassifier.from_features(encoder, ["cat", "dog"], torch.eye(2, encoder.dim))
    return [defense_cost(item.defense, clf, photo) for item in recipe.defenses]


def _free(folder: Path) -> int:
    """Free bytes on the file system of a folder that may not exist yet."""
    place = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    return shutil.disk_usage(place).free


def _size(count: int) -> str:
    """A number of bytes as text.

    >>> _size(3_500_000)
    '3.5 MB'
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
