"""Two defences of a run on the same photos: how often only one of them is right."""

from __future__ import annotations

from dataclasses import dataclass

from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.results import EvaluationResult
from react_clip.intervals import Estimate, bootstrap_difference, mcnemar

ALL = "all attacks"
"""Title of the worst case per photo over all attacks."""


@dataclass(frozen=True)
class Pair:
    """The second defence beside the first under one attack, on the photos that both have answered."""

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


def pair(result: EvaluationResult, first: str, second: str, title: str, column: str = "robust") -> Pair:
    """Compare two defences under an attack, given by its title.

    The column is ``robust`` (right clean and attacked) or ``correct`` (the paper's score).
    """
    images = result.images[result.images["defense"].isin([first, second])].astype({"defense": str, column: float})
    titles = {at: title_of(*at) for at in set(zip(images["attack"], images["eps"], strict=True))}
    chosen = {at for at, name in titles.items() if name == title or (title == ALL and at[1])}
    images = images[[at in chosen for at in zip(images["attack"], images["eps"], strict=True)]]
    if set(images["defense"]) != {first, second}:
        raise ValueError(f"the run has no answers of {first!r} and {second!r} under {title!r}")
    photo = ["dataset", "index", "defense"]
    answers = (
        images.groupby([*photo, "attack", "eps"], observed=True)[column].mean().groupby(photo, observed=True).min()
    )
    right = answers.unstack("defense")[[first, second]].dropna()
    gain = right[second] - right[first]
    won, lost = (
        int(((right[one] > 0.5) & (right[other] <= 0.5)).sum()) for one, other in ((second, first), (first, second))
    )
    means = right.groupby("dataset", observed=True).mean().mean()
    difference = bootstrap_difference([each.to_numpy() for _, each in gain.groupby("dataset", observed=True)])
    return Pair(len(right), float(means[first]), float(means[second]), won, lost, difference, mcnemar(won, lost))
