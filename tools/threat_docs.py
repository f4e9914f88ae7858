"""Sections of docs/threat-model.md: what is left of each defence, by what the attacker knows.

Runs are ``benchmarks/results/adaptive-*`` and ``transfer``, over the same photos. The first member of a suite is PGD on
undefended CLIP, an attacker who does not know the defence, so all three kinds of attacker met the same photos.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from doc_tables import table

from react_clip.evaluation import EvaluationResult, metrics
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
        sizes = [info.images for info in result.sets]
        for attacker, accuracies in _left(folder, run, result, budgets).items():
            rows.append([f"{label}{note}", attacker, *(_with_interval(by_set, sizes) for by_set in accuracies)])
    first = suites[0]
    photos = sum(info.images for info in first.sets)
    sets_text = ", ".join(info.name for info in first.sets)
    runs = ", ".join(f"`benchmarks/results/{run}`" for run in (*SUITES, TRANSFER))
    made = "; ".join(f"`{result.command}`" for result in (*suites, _load(folder, TRANSFER)))
    lines = [
        *table(head, rows, words=2),
        "",
        f"*Accuracy in %, mean over {len(first.sets)} data sets ({sets_text}; {photos} images); {first.model}, "
        f"{first.dtype}, {first.device}; leakage-free scoring; ± is half of a 95 % interval. {runs}, made by {made}.*",
    ]
    return "\n".join(lines) + "\n"


def _left(folder: Path, run: str, result: EvaluationResult, budgets: list[float]) -> dict[str, list[list[float]]]:
    """Accuracy of one defence on each set, on clean photos and at each budget, by attacker."""
    label = result.rows[0].defense
    informed, transferred = _shares(folder / run, label), _shares(folder / TRANSFER, label)
    transferred = transferred[transferred.index.isin(informed.index)]
    worst = pd.concat([informed, transferred], axis=1).min(axis=1)
    clean = _by_set(informed[0.0])
    left = {
        "does not know the defence": [_oblivious(folder / run, result, informed[0.0], eps) for eps in budgets],
        "crafts on another tower": [_by_set(transferred[eps]) for eps in budgets],
        "knows it: mean of ten draws": [_by_set(informed[eps]) for eps in budgets],
        "knows it: majority of the draws": [[row.majority for row in _rows(result, eps)] for eps in budgets],
        "knows it: all of the draws right": [[row.worst for row in _rows(result, eps)] for eps in budgets],
        "worst of these, image by image": [_by_set(worst[eps]) for eps in budgets],
    }
    return {attacker: [clean, *accuracies] for attacker, accuracies in left.items()}


def _with_interval(accuracies: list[float], sizes: list[int]) -> str:
    estimate = metrics.mean_over_sets(accuracies, sizes)
    return f"{100 * estimate.value:.1f} ± {50 * (estimate.high - estimate.low):.1f}"


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
    """The member's name in a result."""
    options = [member.get("loss", "ce"), member.get("sigma", ""), "targeted" if member.get("targets") else ""]
    length = str(member.get("steps", member.get("queries")))
    return "-".join([member["kind"], length, *(o for o in options if o not in ("", "ce", "differentiated"))])


def _name(member: dict[str, Any]) -> str:
    options = {"sigma detached": member.get("sigma") == "detached", "targeted": member.get("targets")}
    return ", ".join([str(member["kind"]).removeprefix("adaptive-"), *(text for text, true in options.items() if true)])


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


def _by_set(shares: pd.Series) -> list[float]:
    """The mean over the images of each set."""
    return [float(share) for share in shares.groupby("dataset", sort=False).mean()]


def _oblivious(run: Path, result: EvaluationResult, clean: pd.Series, eps: float) -> list[float]:
    """Accuracy on each set under the suite's first member, which met every image that is attacked."""
    images = _images(run).drop_duplicates(["dataset", "index"]).set_index(["dataset", "index"])
    spared = images.index[images["label"] != images["clean_prediction"]]
    accuracies = []
    for part in result.attacks:
        if part.eps == eps and part.part.startswith(OBLIVIOUS):
            mine = clean[clean.index.get_level_values("dataset") == part.dataset]
            right = mine[mine.index.isin(spared)].sum() + part.attacked * (1.0 - part.success_rate)
            accuracies.append(right / len(mine))
    return accuracies


def _rows(result: EvaluationResult, eps: float) -> list[Row]:
    """The rows of the sets, in their order."""
    return [row for row in result.rows if row.dataset != MEAN and row.eps == eps]
