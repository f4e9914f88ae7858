"""Tables about SecondLook in README.md and docs/: accuracies, data sets, rules tried, branches."""

from __future__ import annotations

import json
from pathlib import Path

from doc_tables import table

from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.evaluation.result import Row
from react_clip.report.ranking import ALL, rank
from react_clip.report.run import read_run

RUN = "second-look"
PLAIN, OURS = "CLIP", "SecondLook"


def look(section: str, results: Path) -> str:
    """One section: holes, attacks, sets, rules or branches."""
    sections = {"holes": holes, "attacks": attacks, "sets": sets, "rules": rules, "branches": branches}
    return sections[section](results)


def holes(results: Path) -> str:
    """Clean and noisy photos and three attacks, for CLIP, the paper's defence and ours."""
    result, cells = _cells(results)
    defenses = (PLAIN, "ReACT (paper)", OURS)
    columns = {
        "clean photos": ("clean", 0.0),
        "clean photos with camera noise of 0.02, which opens ReACT's gate": ("noise-0.02", 0.0),
        "FAB at 4/255, which stops at the decision boundary": ("fab-t-100", 4 / 255),
        "Square at 8/255, a black-box attack with 300 queries": ("square-300", 8 / 255),
        "PGD-10 at 4/255": ("pgd-10", 4 / 255),
    }
    rows = [
        [title, *(f"{100 * cells[*column, defense, MEAN].accuracy:.1f}" for defense in defenses)]
        for title, column in columns.items()
    ]
    ranking = rank([results / RUN])
    worst = {entry.label: entry.cells[ranking.columns.index(ALL)].value for entry in ranking.entries}
    budgets = {(row.attack, row.eps) for row in result.rows if row.eps}
    rows.append([f"worst case per photo over all {len(budgets)} attacks", *(f"{worst[name]:.1f}" for name in defenses)])
    passes = [
        [cells[*columns[title], d, MEAN].passes for title in ("clean photos", "PGD-10 at 4/255")] for d in defenses
    ]
    title = "encoder passes, clean / attacked with PGD-10 at 4/255"
    rows.append([title, *(f"{clean:.1f} / {attacked:.1f}" for clean, attacked in passes)])
    return "\n".join([*table(["", *defenses], rows), "", _note(result)]) + "\n"


def sets(results: Path) -> str:
    """Plain CLIP and SecondLook on each data set."""
    result, cells = _cells(results)
    columns = {
        "clean": ("clean", 0.0),
        "brightness-0.4": ("brightness-0.4", 0.0),
        "contrast-0.4": ("contrast-0.4", 0.0),
        "PGD-10 4/255": ("pgd-10", 4 / 255),
        "FAB 4/255": ("fab-t-100", 4 / 255),
        "Square-300 8/255": ("square-300", 8 / 255),
    }
    rows = []
    for name in (*sorted(info.name for info in result.sets), MEAN):
        pairs = [[cells[*column, d, name].accuracy for d in (PLAIN, OURS)] for column in columns.values()]
        rows.append([name, *(f"{100 * plain:.0f} → {100 * ours:.0f}" for plain, ours in pairs)])
    return "\n".join([*table(["CLIP → SecondLook", *columns], rows), "", _note(result)]) + "\n"


def rules(results: Path) -> str:
    """The rules and constants that were compared on train photos."""
    search = json.loads((results / "second-look-search.json").read_text(encoding="utf-8"))
    shown = [row for row in search["rows"] if row["group"] not in ("together", "size of both looks")]
    # A look before the one that we ship was tried with three thresholds; 0.9 gave the best answers under attack.
    shown = [row for row in shown if not row["group"].startswith("look before") or ", 0.9 of" in row["value"]]
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


def attacks(results: Path) -> str:
    """Accuracy and passes of every defence, one row per attack or kind of damage."""
    result, cells = _cells(results)
    defenses = list(dict.fromkeys(row.defense for row in result.rows))
    rows = [
        [
            f"{attack} {format_eps(eps)}" if eps else attack,
            *(f"{100 * cells[attack, eps, defense, MEAN].accuracy:.1f}" for defense in defenses),
            " / ".join(f"{cells[attack, eps, defense, MEAN].passes:.1f}" for defense in defenses),
        ]
        for attack, eps in dict.fromkeys((row.attack, row.eps) for row in result.rows)
    ]
    return "\n".join([*table(["", *defenses, "passes"], rows), "", _note(result)]) + "\n"


def branches(results: Path) -> str:
    """Shares of photos that SecondLook corrects and blends and that ReACT corrects, per attack or kind of damage."""
    run = read_run(results / RUN)
    assert run.images is not None
    assert run.result is not None
    [ours] = [item for item in run.result.recipe["defenses"] if item["label"] == OURS]
    images = run.images[(run.images["eps"] == 0) | run.images["attacked"]]
    images = images.assign(corrected=images["score"] >= ours["threshold"])
    rows = []
    for (attack, eps), group in images.groupby(["attack", "eps"], observed=True, sort=False):
        mine, react = (group[group["defense"] == name] for name in (OURS, "ReACT (calibrated)"))
        shares = [mine["corrected"], mine["gated"] & ~mine["corrected"], react["gated"]]
        name = f"{attack} {format_eps(eps)}" if eps else str(attack)
        rows.append([name, *(f"{100 * share.mean():.1f}" for share in shares)])
    head = ["photos", "SecondLook: correct", "SecondLook: blend", "ReACT: correct"]
    note = (
        f"*In % of the photos, attacked ones only where there is an attack (those that plain CLIP gets right), "
        f"{len(run.result.sets)} sets; `benchmarks/results/{RUN}/per_image.parquet`.*"
    )
    return "\n".join([*table(head, rows), "", note]) + "\n"


def _cells(results: Path) -> tuple[EvaluationResult, dict[tuple[str, float, str, str], Row]]:
    """The run, and its rows by attack, budget, defence and data set."""
    result = EvaluationResult.load(results / RUN / "result.json")
    return result, {(row.attack, row.eps, row.defense, row.dataset): row for row in result.rows}


def _note(result: EvaluationResult) -> str:
    """Caption of a table of the run: sets, photos, interval, device, file and command."""
    means = result.select(dataset=MEAN)
    widest = max(50 * (row.high - row.low) for row in means)
    images = sum(info.images for info in result.sets)
    return (
        f"*Accuracy in %, {len(result.sets)} sets ({images} test photos), means ± {widest:.1f} or less; "
        f"{result.device}, towers in {result.dtype}; `benchmarks/results/{RUN}/result.json`, made by "
        f"`{result.command}`.*"
    )
