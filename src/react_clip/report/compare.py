"""Two runs compared photo by photo under the attacks and for the defences that both have, and what does not match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from react_clip.errors import ReactClipError
from react_clip.evaluation.numbers import attacks_of
from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.results import EvaluationResult, differences
from react_clip.intervals import Estimate, bootstrap_difference, mcnemar
from react_clip.report.tables import Cell, Table


@dataclass(frozen=True)
class Comparison:
    """The table of paired tests, and one line for each thing in which the runs differ."""

    table: Table
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Two answers about each of the same photos."""

    photos: int
    first: float
    second: float
    """Accuracy, mean over data sets."""
    won: int
    """Photos that only the second gets right (in more than half of the draws)."""
    lost: int
    """Photos that only the first gets right."""
    difference: Estimate
    """Second minus first: mean over data sets, with a bootstrap interval over the photos of each set."""
    p: float
    """McNemar's exact test, two-sided."""


def pair(right: pd.DataFrame) -> Pair:
    """Compare the two columns: the fraction of draws that are right, for each photo, indexed by ``dataset``."""
    first, second = (right[name] for name in right)
    lost, won = int(((first > 0.5) & (second <= 0.5)).sum()), int(((second > 0.5) & (first <= 0.5)).sum())
    gains = [gain.to_numpy() for _, gain in (second - first).groupby("dataset", observed=True)]
    means = right.groupby("dataset", observed=True).mean().mean().tolist()
    return Pair(len(right), means[0], means[1], won, lost, bootstrap_difference(gains), mcnemar(won, lost))


def compare(first: EvaluationResult, second: EvaluationResult) -> Comparison:
    """Compare two runs; raises if they have no photo under the same attack and defence.

    Photos are matched by the digest of their pixels, in runs that have none by their place in a set of the same
    content. Accuracy is strict. McNemar's test takes a photo as right if more than half of the draws are; the
    difference takes the fraction of draws, and resamples photos within each set.
    """
    unlike = tuple(line for _, line in differences(first, second))
    by_pixels = all("photo" in run.images for run in (first, second))
    answers = [_fractions_right(run, by_pixels) for run in (first, second)]
    paired = pd.concat(answers, axis="columns", keys=["first", "second"], join="inner")
    if paired.empty:
        raise ReactClipError(f"the runs share no photo under the same attack and defence: {'; '.join(unlike[:3])}")
    sets = paired.groupby("dataset").size().index
    rows = []
    for (attack, label), own in paired.groupby(["attack", "defense"], sort=False):
        one = pair(own)
        value, low, high = (100 * bound for bound in one.difference)
        means = [Cell(100 * one.first), Cell(100 * one.second), Cell(value, low, high)]
        counts = [Cell(number, digits=0) for number in (one.photos, one.lost, one.won)]
        rows.append(((str(attack), str(label)), (counts[0], *means, *counts[1:], Cell(one.p, digits=4))))
    caption = (
        f"{first.title} (1) and {second.title} (2) on the photos that both have, of {', '.join(sets)}. Accuracy in %, "
        "mean over data sets; an attacked photo counts as right if the defence is right about it clean and attacked. "
        "The interval is a 95 % bootstrap interval; p is McNemar's exact test of the photos that only one gets right, "
        "not corrected for the number of rows."
    )
    header = ("attack", "defence", "photos", "accuracy 1", "accuracy 2", "2 − 1", "only 1 right", "only 2 right", "p")
    return Comparison(Table("comparison", caption, header, tuple(rows)), unlike)


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
