"""Sections of docs/threat-model.md: what is left of each defence, by what the attacker knows.

Runs are ``benchmarks/results/adaptive-*`` and ``transfer``, over the same photos. The first member of a suite is PGD on
undefended CLIP, an attacker who does not know the defence, so all three kinds of attacker met the same photos.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from doc_tables import table

from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.evaluation.result import Row
from react_clip.report.run import read_run

SUITES = ("adaptive-ReACT", "adaptive-AOM", "adaptive-Defend-CLIP", "adaptive-TTC", "adaptive-SecondLook")
TRANSFER = "transfer"
OBLIVIOUS = "adaptive-transfer"


def threats(name: str, folder: Path) -> str:
    """One section: who, members."""
    return {"who": who, "members": members}[name](folder)


def who(folder: Path) -> str:
    """Accuracy by defence and attacker; of the informed one also the worst draw and the majority of draws."""
    suites, budgets = _suites(folder)
    head = ["defence", "the attacker", "clean", *map(format_eps, budgets)]
    rows = []
    most = max(len(result.sets) for result in suites)
    for run, result in zip(SUITES, suites, strict=True):
        label, sets = result.rows[0].defense, {info.name for info in result.sets}
        note = "" if len(sets) == most else f", {len(sets)} of the {most} sets"
        clean = f"{100 * _row(result, 0.0).accuracy:.1f}"
        for attacker, values in _left(folder, run, result, budgets).items():
            rows.append([f"{label}{note}", attacker, clean, *(f"{100 * value:.1f}" for value in values)])
    first = suites[0]
    photos = sum(info.images for info in first.sets)
    sets_text = ", ".join(info.name for info in first.sets)
    runs = ", ".join(f"`benchmarks/results/{run}`" for run in (*SUITES, TRANSFER))
    made = "; ".join(f"`{result.command}`" for result in (*suites, _load(folder, TRANSFER)))
    lines = [
        *table(head, rows, words=2),
        "",
        f"*Accuracy in %, mean over {len(first.sets)} data sets ({sets_text}; {photos} images); {first.model}, "
        f"{first.dtype}, {first.device}; leakage-free scoring. {runs}, made by {made}.*",
    ]
    return "\n".join(lines) + "\n"


def _left(folder: Path, run: str, result: EvaluationResult, budgets: list[float]) -> dict[str, list[float]]:
    """Accuracy of one defence at each budget, by attacker."""
    label = result.rows[0].defense
    informed, transferred = _shares(folder / run, label), _shares(folder / TRANSFER, label)
    transferred = transferred[transferred.index.isin(informed.index)]
    worst = pd.concat([informed, transferred], axis=1).min(axis=1)
    return {
        "does not know the defence": [_oblivious(folder / run, result, informed[0.0], eps) for eps in budgets],
        "crafts on another tower": [_mean(transferred[eps]) for eps in budgets],
        "knows it: mean of ten draws": [_mean(informed[eps]) for eps in budgets],
        "knows it: majority of the draws": [_row(result, eps).majority or 0.0 for eps in budgets],
        "knows it: all of the draws right": [_row(result, eps).worst or 0.0 for eps in budgets],
        "worst of these, image by image": [_mean(worst[eps]) for eps in budgets],
    }


def members(folder: Path) -> str:
    """Success of each attack of a suite on the images that the attacks before it did not break, over all sets."""
    suites, budgets = _suites(folder)
    names = [_name(member) for member in _members(suites[0])]
    head = ["defence", "budget", *names]
    rows = []
    for result in suites:
        for eps in budgets:
            cells = []
            for member in _members(result):
                mine = (row for row in result.attacks if row.eps == eps and row.part == _part(member))
                parts = [row for row in mine if row.attacked]  # nothing may have been left to it
                met = sum(row.attacked for row in parts)
                broken = sum(row.attacked * row.success_rate for row in parts)
                cells.append(f"{100 * broken / met:.0f} % of {met}" if met else "")
            rows.append([result.rows[0].defense, format_eps(eps), *cells])
    lines = [
        *table(head, rows, words=2),
        "",
        "*Share of judging draws that are wrong on the images left to each attack; the same files.*",
    ]
    return "\n".join(lines) + "\n"


def _suites(folder: Path) -> tuple[list[EvaluationResult], list[float]]:
    """The runs of attackers who know the defence, and their budgets."""
    suites = [_load(folder, run) for run in SUITES]
    return suites, sorted({row.eps for row in suites[0].rows if row.eps})


def _load(folder: Path, run: str) -> EvaluationResult:
    return EvaluationResult.load(folder / run / "result.json")


def _members(result: EvaluationResult) -> list[dict[str, Any]]:
    suite = next(item for item in result.recipe["attacks"] if isinstance(item, dict) and "members" in item)
    found: list[dict[str, Any]] = suite["members"]
    return found


def _part(member: dict[str, Any]) -> str:
    from react_clip import attacks

    return attacks.from_dict(member).name


def _name(member: dict[str, Any]) -> str:
    detached = ", sigma detached" if member.get("sigma") == "detached" else ""
    return str(member["kind"]).removeprefix("adaptive-") + detached


# ---------------------------------------------------------------------- shares of right answers


@cache
def _images(run: Path) -> pd.DataFrame:
    images = read_run(run).images
    assert images is not None
    return images


def _shares(run: Path, defense: str) -> pd.Series:
    """By budget, set and image: the share of draws in which the answer is right."""
    images = _images(run)
    return images[images["defense"] == defense].groupby(["eps", "dataset", "index"])["correct"].mean()


def _mean(shares: pd.Series) -> float:
    """The mean over sets of the means over their images."""
    return float(shares.groupby("dataset").mean().mean())


def _oblivious(run: Path, result: EvaluationResult, clean: pd.Series, eps: float) -> float:
    """Accuracy under the suite's first member, which met every image that is attacked."""
    images = _images(run).drop_duplicates(["dataset", "index"]).set_index(["dataset", "index"])
    spared = images.index[images["label"] != images["clean_prediction"]]
    accuracies = []
    for part in result.attacks:
        if part.eps == eps and part.part.startswith(OBLIVIOUS):
            mine = clean[clean.index.get_level_values("dataset") == part.dataset]
            right = mine[mine.index.isin(spared)].sum() + part.attacked * (1.0 - part.success_rate)
            accuracies.append(right / len(mine))
    return statistics.fmean(accuracies)


def _row(result: EvaluationResult, eps: float) -> Row:
    return next(row for row in result.select(dataset=MEAN) if row.eps == eps)
