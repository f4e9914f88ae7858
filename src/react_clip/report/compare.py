"""Two runs compared photo by photo under the attacks and for the defences that both have, and what does not match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from react_clip.config import read_length
from react_clip.errors import ReactClipError
from react_clip.evaluation.numbers import attacks_of
from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.results import EvaluationResult
from react_clip.intervals import bootstrap_difference, mcnemar
from react_clip.report.tables import Cell, Table, defenses_of

_PROTOCOL = ("model", "dtype", "attack_dtype", "scoring", "threat", "seeds", "package")


@dataclass(frozen=True)
class Comparison:
    """The table of paired tests, and one line for each thing in which the runs differ."""

    table: Table
    differences: tuple[str, ...]


def compare(first: EvaluationResult, second: EvaluationResult) -> Comparison:
    """Compare two runs; raises if they have no photo under the same attack and defence.

    Photos are matched by the digest of their pixels, in runs that have none by their place in a set of the same
    content. Accuracy is strict. McNemar's test takes a photo as right if more than half of the draws are; the
    difference takes the fraction of draws, and resamples photos within each set.
    """
    differences = tuple(_differences(first, second))
    by_pixels = all("photo" in run.images for run in (first, second))
    answers = [_fractions_right(run, by_pixels) for run in (first, second)]
    paired = pd.concat(answers, axis="columns", keys=["first", "second"], join="inner")
    if paired.empty:
        raise ReactClipError(f"the runs share no photo under the same attack and defence: {'; '.join(differences[:3])}")
    sets = paired.groupby("dataset").size().index
    rows = []
    for (attack, label), own in paired.groupby(["attack", "defense"], sort=False):
        groups = [group for _, group in own.groupby("dataset")]
        value, low, high = bootstrap_difference([(group["second"] - group["first"]).to_numpy() for group in groups])
        right = own > 0.5
        only = [int((right[one] & ~right[other]).sum()) for one, other in (("first", "second"), ("second", "first"))]
        means = [Cell(100 * float(own.groupby("dataset")[name].mean().mean())) for name in own]
        counts = [Cell(number, digits=0) for number in (len(own), *only)]
        cells = (counts[0], *means, Cell(100 * value, 100 * low, 100 * high), *counts[1:])
        rows.append(((str(attack), str(label)), (*cells, Cell(mcnemar(*only), digits=4))))
    caption = (
        f"{first.title} (1) and {second.title} (2) on the photos that both have, of {', '.join(sets)}. Accuracy in %, "
        "mean over data sets; an attacked photo counts as right if the defence is right about it clean and attacked. "
        "The interval is a 95 % bootstrap interval; p is McNemar's exact test of the photos that only one gets right, "
        "not corrected for the number of rows."
    )
    header = ("attack", "defence", "photos", "accuracy 1", "accuracy 2", "2 − 1", "only 1 right", "only 2 right", "p")
    return Comparison(Table("comparison", caption, header, tuple(rows)), differences)


def _fractions_right(run: EvaluationResult, by_pixels: bool) -> pd.Series[float]:
    """Fraction of draws in which each defence is right about each photo under each attack."""
    images = run.images
    content = images["dataset"].map({info.name: info.fingerprint for info in run.sets}).astype(str)
    titles = {at: title_of(*at) for at in attacks_of(images)}
    columns: dict[str, Any] = {
        "dataset": images["dataset"].astype(str),
        "attack": [titles[at] for at in zip(images["attack"], images["eps"], strict=True)],
        "defense": images["defense"].astype(str),
        "photo": images["photo"] if by_pixels else content + images["index"].astype(str),
    }
    return (
        images["robust"].groupby([pd.Series(value, images.index, name=name) for name, value in columns.items()]).mean()
    )


def _differences(first: EvaluationResult, second: EvaluationResult) -> Iterator[str]:
    """What does not match, one line each."""
    for what in _PROTOCOL:
        if getattr(first, what) != getattr(second, what):
            yield f"{what} is {getattr(first, what)} in the first and {getattr(second, what)} in the second"
    for what, one, other in zip(("data set", "attack", "defence"), _parts(first), _parts(second), strict=True):
        for mine, others, place in ((one, other, "first"), (other, one, "second")):
            if lost := [name for name in mine if name not in others]:
                yield f"only the {place} has the {what}{'s' * (len(lost) > 1)} {', '.join(lost)}"
        for name, mine in one.items():
            theirs = other.get(name, mine)
            if changed := [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]:
                values = (f"{key} is {mine.get(key)} in the first, {theirs.get(key)} in the second" for key in changed)
                yield f"{what} {name}: {'; '.join(values)}"


def _parts(run: EvaluationResult) -> tuple[dict[str, dict[str, Any]], ...]:
    """Data sets, attacks and defences of a run by name, each with what decides about its numbers."""
    sets = {
        info.name: {"number of photos": info.images, "digest of the photos": info.fingerprint[:16]} for info in run.sets
    }
    entries = {title_of(entry["label"], read_length(entry.get("eps", 0.0))): entry for entry in run.recipe["attacks"]}
    attacks = {title_of(*at): entries.get(title_of(*at), {}) for at in attacks_of(run.images)}
    return sets, attacks, defenses_of(run)
