"""Checks before a run: recipe, data, class features, weights, disk space and cost."""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from react_clip import data as data_room
from react_clip.attacks.base import ADAPTIVE
from react_clip.attacks.targets import Passes, total
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.evaluation.cost import defense_cost, disk_bytes, image_cost, work
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.sets import check_replayable, class_source, load_encoders


@dataclass(frozen=True)
class SetReport:
    """One set before the run; ``problem`` is empty if it can be run."""

    name: str
    images: int = 0
    classes: int = 0
    class_source: str = ""
    notes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Validation:
    """The outcome of a validation; passes and bytes are upper bounds."""

    title: str
    model: str
    sets: tuple[SetReport, ...]
    image_passes: Passes
    """Forward and backward passes of one image."""
    minutes: float | None
    """Time of all passes at the speed of a few measured ones; None without images or a model."""
    forward_passes: int
    backward_passes: int
    disk_bytes: int
    disk_free: int
    problems: tuple[str, ...]
    defenses: dict[str, Passes]
    """Forward and backward passes to attack and run each defence that the attacker knows; empty for other threats."""

    @property
    def ok(self) -> bool:
        """True if the run can start."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """One line per set, then the totals."""
        lines = []
        for report in self.sets:
            if not report.problem:  # problems are listed apart
                numbers = f"{report.images:,} images, {report.classes:,} classes"
                lines.append(f"{report.name}: {numbers}, {report.class_source}")
        counted = any(report.images for report in self.sets)
        totals = (self.forward_passes, self.backward_passes) if counted else self.image_passes
        unit = "" if counted else " an image"
        for label, passes in {**(self.defenses if counted else {}), "cost": totals}.items():
            lines.append(f"{label}: at most {passes[0]:,} forward and {passes[1]:,} backward passes{unit}")
        if self.minutes is not None:
            lines.append(f"time: about {self.minutes:,.0f} minutes at the speed of a few passes on this device")
        if counted:
            lines.append(f"disk: at most {_size(self.disk_bytes)} of {_size(self.disk_free)} free")
        return lines


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
    encoder, problems = None, list[str]()
    try:
        encoder, attacked = load_encoders(recipe, device)
        check_replayable(attacked, encoder)
        for item in recipe.defenses:
            item.defense.check(encoder)
    except ReactClipError as error:
        problems.append(str(error))
    reports = [_set_report(recipe, name, encoder, root, heads) for name in recipe.datasets]
    problems += [report.problem for report in reports if report.problem]
    images = sum(report.images for report in reports)
    forward, backward = total((image_cost(recipe), images))
    minutes = None
    if encoder is not None and images:
        minutes = work((forward, backward)) * _seconds_per_pass(encoder, recipe.batch) / 60
    size = encoder.image_size if encoder is not None else 0
    needed, free = sum(disk_bytes(recipe, report.images, size) for report in reports), _free(Path(folder))
    if needed > free:
        problems.append(
            f"the run may need {_size(needed)} in {folder}, but {_size(free)} are free; free some, choose another "
            "--out, or set images: {store: uint8} or {store: none}"
        )
    return Validation(
        title=recipe.title,
        model=recipe.model,
        sets=tuple(reports),
        image_passes=image_cost(recipe),
        minutes=minutes,
        forward_passes=forward,
        backward_passes=backward,
        disk_bytes=needed,
        disk_free=free,
        problems=tuple(problems),
        defenses={
            item.label: total((defense_cost(recipe, number), images))
            for number, item in enumerate(recipe.defenses if recipe.threat == ADAPTIVE else ())
        },
    )


@torch.no_grad()
def _seconds_per_pass(encoder: Encoder, batch: int) -> float:
    """Time of one image in a forward pass: the second of two small batches."""
    count = min(batch, 64 if encoder.device.type == "cuda" else 4)
    images = torch.zeros(count, 3, encoder.image_size, encoder.image_size, device=encoder.device)
    for _ in range(2):
        began = time.perf_counter()
        encoder(images).sum().item()
        seconds = (time.perf_counter() - began) / count
    return seconds


def _set_report(recipe: Recipe, name: str, encoder: Encoder | None, root: Path, heads: Path | None) -> SetReport:
    try:
        dataset = data_room.load(name, root=root, split="test")
        if encoder is None:
            return SetReport(name, len(dataset), len(dataset.class_names), "no model to check them with")
        source = class_source(encoder, dataset, heads, root)
    except ReactClipError as error:
        line = str(error)
        return SetReport(name, problem=line if line.startswith(name) else f"{name}: {line}")
    dataset = source.dataset if recipe.limit is None else source.dataset.take(recipe.limit)
    return SetReport(name, len(dataset), len(dataset.class_names), source.description, dataset.notes)


def _free(folder: Path) -> int:
    """Free bytes on the file system of a folder that may not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def _size(count: int) -> str:
    """A number of bytes as text.

    >>> _size(3_500_000)
    '3.5 MB'
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
