"""Tables of docs/second-look.md: the rules that were tried, and runs with one row per attack or kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

from doc_tables import table

from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import MEAN, format_eps


def rules(results: Path) -> str:
    """The rules and constants that were compared on train photos."""
    search = json.loads((results / "second-look-search.json").read_text(encoding="utf-8"))
    shown = [row for row in search["rows"] if row["group"] not in ("together", "size of both looks")]
    rows = [
        [
            row["group"],
            row["value"].removesuffix(" (SecondLook)"),
            *(f"{number:.1f}" for number in (row["accuracy"]["clean"], row["natural"], row["attacked"])),
            f"{row['passes_clean']:.2f} / {row['passes_attacked']:.2f}",
        ]
        for row in shown
    ]
    head = ["what varies", "value", "clean", "mean of 7 natural", "mean of 13 attacks", "passes clean / attacked"]
    note = (
        f"*Accuracy in %, mean over {len(search['sets'])} sets of train photos ({search['photos']} a set, "
        f"{search['attacked']} under attack); {search['device']}; `benchmarks/results/second-look-search.json`, made "
        f"by `{search['command']}` and `{search['rules']}`.*"
    )
    return "\n".join([*table(head, rows, words=2), "", note]) + "\n"


def run_by_attack(run: str, results: Path) -> str:
    """Accuracy and passes of every defence of a run, one row per attack."""
    result = EvaluationResult.load(results / run / "result.json")
    means = result.select(dataset=MEAN)
    defenses = list(dict.fromkeys(row.defense for row in means))
    columns = list(dict.fromkeys((row.attack, row.eps) for row in means))
    cells = {(row.attack, row.eps, row.defense): row for row in means}
    rows = [
        [
            f"{attack} {format_eps(eps)}" if eps else attack,
            *(f"{100 * cells[attack, eps, defense].accuracy:.1f}" for defense in defenses),
            " / ".join(f"{cells[attack, eps, defense].passes:.1f}" for defense in defenses),
        ]
        for attack, eps in columns
    ]
    widest = max(50 * (row.high - row.low) for row in means)
    images = sum(info.images for info in result.sets)
    note = (
        f"*Accuracy in %, mean over {len(result.sets)} sets ({images} test photos), ± {widest:.1f} or less; "
        f"{result.device}, towers in {result.dtype}; `benchmarks/results/{run}/result.json`, made by "
        f"`{result.command}`.*"
    )
    return "\n".join([*table(["", *defenses, "passes"], rows), "", note]) + "\n"
