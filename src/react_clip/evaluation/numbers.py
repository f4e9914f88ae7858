"""The numbers of tables: groups of the rows of ``images.parquet``, with 95 % intervals."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from react_clip import intervals
from react_clip.attacks.base import ADAPTIVE
from react_clip.config import read_length, write_length
from react_clip.evaluation.recipe import CLEAN, MEAN, title_of

if TYPE_CHECKING:
    import pandas as pd

PART = "part "
"""Prefix of columns about one member of a suite."""
KEY = ["dataset", "attack", "eps", "defense"]
"""Columns that tell the rows of a table apart."""


@dataclass(frozen=True)
class Row:
    """One defence under one attack on one set, or on the mean over sets. Fractions lie in [0, 1]; NaN: not measured."""

    dataset: str
    attack: str
    eps: float
    defense: str
    threat: str
    scoring: str
    n: int
    attacked: int
    """Images that were attacked; the rest passed through the defence unperturbed."""
    accuracy: float
    """Over the whole set, the mean over draws: right on the image and, under attack, on the clean one too."""
    low: float
    high: float
    paper_accuracy: float
    """As the paper counts: right on the image, whatever the answer on the clean one."""
    paper_low: float
    paper_high: float
    by_seed: tuple[float, ...]
    """Accuracy with each seed of the defences' random draws."""
    worst: float
    """Only images that are right in every draw."""
    leakage: float
    """Label leakage: attacked images that undefended CLIP gets wrong clean and the defence gets right, mean over draws.

    An untargeted attack moves away from the true label, so a correcting defence that reverses it finds that label, even
    for images that CLIP gets wrong without attack. It is 0 if only images that CLIP gets right are attacked.
    """
    leakage_fraction: float
    """The same as a fraction of all images: the part of the paper's accuracy that is due to leakage."""
    gate_rate: float
    """Fraction of images whose gate opened, among the attacked or clean ones that undefended CLIP gets right clean."""
    passes: float
    """Encoder passes per image."""
    backward_passes: float


@dataclass(frozen=True)
class AttackRow:
    """Success and cost of an attack on one set, against undefended CLIP or the defence that it knows."""

    dataset: str
    attack: str
    eps: float
    attacked: int
    success_rate: float
    """Fraction of attacked images that undefended CLIP (or the defence, over its draws) gets wrong."""
    lost: int
    """Attacks that had succeeded before rounding to 8 bits (or under the attack's own draws of the noise), and that
    fail on the image as it was judged."""
    queries: float
    """Forward passes the attack spent per attacked image."""
    defense: str = ""
    """The defence that the attack knows; its success is then that on the defended answers. Empty for other attacks."""
    part: str = ""
    """For one member of a suite: its name; ``success_rate`` is then as the suite saw it."""


def attacks_of(images: pd.DataFrame) -> list[tuple[str, float]]:
    """The attacks of a run with their budgets, clean images among them."""
    return list(images[["attack", "eps"]].drop_duplicates().itertuples(index=False, name=None))


def rows_of(images: pd.DataFrame, recipe: Mapping[str, Any]) -> Iterator[Row]:
    """One row per set, attack, budget and defence, also for the worst case of the attacks that ``worst_of`` names."""
    for table in (images, _worst_case(images, recipe)) if recipe.get("worst_of") else (images,):
        right = table["clean_prediction"] == table["label"]
        counted = right & (table["attacked"] | (table["attack"] == CLEAN))
        leaked = table["correct"] & table["attacked"] & ~right
        table = table.assign(leakage=leaked, gate_rate=table["gated"].astype(float).where(counted))
        answers = table.groupby(KEY, sort=False, observed=True)
        means = ("robust", "correct", "gate_rate", "passes", "backward_passes")
        sets = answers.agg({"threat": "first", "scoring": "first", "leakage": "sum", **dict.fromkeys(means, "mean")})
        sets["leakage"] /= answers["draw"].nunique()
        draws = table.groupby([*KEY, "draw"], sort=True, observed=True)["robust"].mean()
        sets["by_seed"] = draws.groupby(KEY, sort=False, observed=True).agg(tuple)
        each = table.groupby([*KEY, "index"], sort=False, observed=True).agg({"attacked": "first", "robust": "mean"})
        each = each.assign(n=1, worst=each["robust"] == 1).groupby(KEY, observed=True)
        sets = sets.join(each.agg({"n": "sum", "attacked": "sum", "worst": "mean"})).reset_index()
        for numbers in sets.rename(columns={"robust": "accuracy", "correct": "paper_accuracy"}).to_dict("records"):
            yield _mean([numbers], numbers["dataset"])


def means_of(rows: Sequence[Row]) -> Iterator[Row]:
    """The unweighted mean over sets of every attack and defence; counts are summed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row.attack, row.eps, row.defense), []).append(dataclasses.asdict(row))
    return (_mean(sets, MEAN) for sets in groups.values())


def _mean(sets: Sequence[Mapping[str, Any]], dataset: str) -> Row:
    """The row of one set or several, from the numbers of each; intervals are computed anew."""
    sizes = [numbers["n"] for numbers in sets]
    values = {name: sum(numbers[name] for numbers in sets) for name in ("n", "attacked", "leakage")}
    for prefix in ("", "paper_"):
        estimate = intervals.mean_over_sets([numbers[f"{prefix}accuracy"] for numbers in sets], sizes)
        values |= zip((f"{prefix}accuracy", f"{prefix}low", f"{prefix}high"), estimate, strict=True)
    for name in ("worst", "gate_rate", "passes", "backward_passes"):
        measured = [numbers[name] for numbers in sets if not math.isnan(numbers[name])]
        values[name] = math.fsum(measured) / len(measured) if measured else math.nan
    values["by_seed"] = tuple(
        math.fsum(each) / len(sets) for each in zip(*(numbers["by_seed"] for numbers in sets), strict=True)
    )
    leaked = values["leakage"] / values["n"]
    return Row(**{**sets[0], **values, "dataset": dataset, "leakage_fraction": leaked})


def distinct_attacks(recipe: Mapping[str, Any], attacks: Sequence[tuple[str, float]]) -> int:
    """The number of different attacks: at 4/255, steps of eps/4 are steps of 1/255 under another name."""
    settings = {}
    for entry in recipe.get("attacks", ()):
        eps, values = read_length(entry.get("eps", 0.0)), {**entry, "label": ""}
        if entry.get("step_size") == "eps/4":
            values["step_size"] = write_length(eps / 4)
        settings[title_of(entry["label"], eps)] = json.dumps(values, sort_keys=True)
    return len({settings.get(title, title) for title in (title_of(*at) for at in attacks)})


def _worst_case(images: pd.DataFrame, recipe: Mapping[str, Any]) -> pd.DataFrame:
    """The worst case per image over some attacks: right only if it is right under each of them.

    ``all`` stands for all attacks, without natural damage. The budget is the largest one; gates and passes are means.
    """
    titles = recipe["worst_of"]
    wanted = [at for at in attacks_of(images) if (at[1] and "all" in titles) or title_of(*at) in titles]
    chosen = images[[at in wanted for at in zip(images["attack"], images["eps"], strict=True)]]
    rules = dict.fromkeys(("label", "clean_prediction", "threat", "scoring"), "first")
    rules |= {"attacked": "any", "correct": "all", "robust": "all"}
    rules |= dict.fromkeys(("gated", "passes", "backward_passes"), "mean")
    # Row order is that of the defences in the run.
    worst = chosen.groupby(["dataset", "defense", "draw", "index"], sort=False, observed=True).agg(rules).reset_index()
    return worst.assign(
        attack=f"worst of {distinct_attacks(recipe, wanted)}", eps=max((eps for _, eps in wanted), default=0.0)
    )


def attack_rows(images: pd.DataFrame) -> Iterator[AttackRow]:
    """Rows about the attacks; those that do not know the defence made the same images for all, so one row is enough."""
    table = images[images["attack"] != CLEAN].astype({"defense": object})
    adaptive = table["threat"] == ADAPTIVE
    wrong = 1.0 - table.groupby([*KEY, "index"], observed=True)["correct"].transform("mean")
    known = table["defense"].where(adaptive, "")
    table = table.assign(defense=known, success=wrong.where(adaptive, table["attack_success"].astype(float)))
    table = table.drop_duplicates([*KEY, "index"])
    for (dataset, attack, eps, defense), group in table.groupby(KEY, sort=False, observed=True):
        tried, success = group["attacked"], group["success"]
        whole = AttackRow(
            *(str(dataset), str(attack), float(eps)),
            attacked=int(tried.sum()),
            success_rate=float(success[tried].mean()),
            lost=int((tried & group["crafted_success"] & (success <= 0.5)).sum()),
            queries=float(group["queries"][tried].mean()),
            defense=str(defense),
        )
        yield whole
        for name in [name for name in group if str(name).startswith(PART) and group[name].notna().any()]:
            broken = group[name].dropna()
            part = dataclasses.replace(whole, part=name.removeprefix(PART), attacked=len(broken), lost=0)
            yield dataclasses.replace(part, success_rate=float(broken.mean()), queries=math.nan)
