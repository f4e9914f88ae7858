"""Tables of docs/results.md: the standard evaluation attack by attack, and the ranking's most important columns."""

from __future__ import annotations

from pathlib import Path

from doc_tables import table

from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.report.ranking import ALL, rank

RUN = "standard"
DEFENSES = ("CLIP", "ReACT (paper)", "ReACT (calibrated)", "AOM", "CSR", "AGC", "DBD", "SecondLook")
SHORT = ("clean", "damaged", ALL, "knows it, 4/255", "passes, clean", "passes, attacked", "passes, backward")


def standard(results: Path, section: str, *runs: str) -> str:
    """One section: attacks, or the short ranking of several runs."""
    return attacks(results) if section == "attacks" else short([results / run for run in runs])


def attacks(results: Path) -> str:
    """Accuracy of some defences on each kind of photo and under each attack."""
    result = EvaluationResult.load(results / RUN / "result.json")
    cells = {(row.attack, row.eps, row.defense): row for row in result.select(dataset=MEAN)}
    rows = []
    for attack, eps in dict.fromkeys(key[:2] for key in cells):
        title = attack if eps == 0 or attack.startswith("worst of") else f"{attack} {format_eps(eps)}"
        rows.append([title, *(f"{100 * cells[attack, eps, defense].accuracy:.1f}" for defense in DEFENSES)])
    widest = max(cells.values(), key=lambda row: row.high - row.low)
    photos = sum(info.images for info in result.sets)
    note = (
        f"*Accuracy in %, mean over {len(result.sets)} data sets ({photos:,} photos); "
        f"{result.model}, {result.dtype}, {result.device}; leakage-free scoring; 95 % intervals of at most "
        f"± {50 * (widest.high - widest.low):.1f}. `benchmarks/results/{RUN}`, made by `{result.command}`.*"
    )
    return "\n".join([*table(["photos", *DEFENSES], rows), "", note]) + "\n"


def short(runs: list[Path]) -> str:
    """The ranking's most important columns."""
    ranking = rank(runs)
    chosen = [ranking.table.header[1:].index(title) for title in SHORT]
    rows = [[entry.label, *(entry.cells[column].text() for column in chosen)] for entry in ranking.entries]
    note = "*Accuracy in % and encoder passes per image; ± is half of a 95 % interval; [all columns](ranking.md).*"
    return "\n".join([*table(["defence", *SHORT], rows), "", note]) + "\n"
