"""Tables of a result in Markdown and LaTeX, and its numbers as CSV; each table states threat model and scoring."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from react_clip import intervals
from react_clip.evaluation.numbers import Row
from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.results import EvaluationResult

SCORINGS = {
    "leakage_free": "only images that undefended CLIP classifies correctly are attacked; accuracy counts all images",
    "attack_all": "every image is attacked; right answers on images that undefended CLIP gets wrong when clean are "
    "counted as leaked",
}
STRICT = "An attacked image counts as right only if the defence is right about it clean as well as attacked."


@dataclass(frozen=True)
class Cell:
    """A number and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    digits: int = 1

    def text(self) -> str:
        """The number with its interval, such as ``61.0 ± 1.2``; a dash where nothing was measured."""
        if math.isnan(self.value):
            return "–"
        if math.isnan(self.low):
            return f"{self.value:.{self.digits}f}"
        return intervals.interval(self.value, self.low, self.high, self.digits)

    def to_dict(self) -> dict[str, float | None]:
        """The number and its interval for JSON; None where there is none."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: None if math.isnan(number) else number for name, number in numbers.items()}


@dataclass(frozen=True)
class Table:
    """A caption, a header, and rows of texts followed by numbers."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]

    @property
    def texts(self) -> list[list[str]]:
        """Every row as texts."""
        return [[*labels, *(cell.text() for cell in cells)] for labels, cells in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; every number with its interval."""
        rows = [[*labels, *(cell.to_dict() for cell in cells)] for labels, cells in self.rows]
        return {"name": self.name, "caption": self.caption, "header": list(self.header), "rows": rows}

    def markdown(self) -> str:
        """A GitHub table under its caption."""
        words = len(self.rows[0][0]) if self.rows else len(self.header)
        rule = ["---"] * words + ["---:"] * (len(self.header) - words)
        return f"{self.caption}\n\n" + "".join(map(markdown_line, [self.header, rule, *self.texts]))

    def csv(self) -> str:
        """Numbers with their intervals in columns of their own; what was not measured is empty."""
        import pandas as pd

        records = []
        for labels, cells in self.rows:
            record: dict[str, Any] = dict(zip(self.header, labels, strict=False))
            for title, cell in zip(self.header[len(labels) :], cells, strict=True):
                record |= {title: cell.value, f"{title} low": cell.low, f"{title} high": cell.high}
            records.append(record)
        frame = pd.DataFrame(records).dropna(axis="columns", how="all")
        return str(frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))

    def latex(self) -> str:
        """A booktabs table."""
        import pandas as pd

        escaped = str.maketrans({letter: rf"\{letter}" for letter in "&%$#_"} | {"±": r"$\pm$"})
        caption = self.caption.translate(escaped)
        frame = pd.DataFrame(self.texts, columns=list(self.header))
        return str(frame.to_latex(index=False, escape=True, caption=caption)).replace("±", r"$\pm$")


def markdown_line(parts: Sequence[str]) -> str:
    """One line of a GitHub table."""
    return "| " + " | ".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts) + " |\n"


def all_tables(result: EvaluationResult) -> list[Table]:
    """Every table that the result has numbers for; the first is that of accuracies."""
    accuracy = f"accuracy in %, {over(result)}. {STRICT}"
    detection = "clean images passed through and attacked images changed, in % of what undefended CLIP gets right"
    tables = [
        _by_attack(result, "accuracy", accuracy, _accuracy),
        _by_attack(result, "per_dataset", f"accuracy in %, per data set. {STRICT}", _accuracy, per_set=True),
        _by_attack(result, "detection", f"{detection}, {over(result)}", _detection),
        _by_attack(result, "passes", f"encoder forward passes per image, {over(result)}", lambda row: Cell(row.passes)),
    ]
    if any(row.paper_accuracy != row.accuracy for row in result.means):
        words = f"accuracy in %, {over(result)}, scored as in the paper: an attacked image counts as right if the "
        words += "defence is right about it attacked"
        tables.insert(1, _by_attack(result, "accuracy_as_in_the_paper", words, _paper_accuracy))
    if result.draws > 1:
        tables.append(_seeds(result))
    return [*tables, _attack_table(result)] if result.attacks else tables


def _by_attack(
    result: EvaluationResult, name: str, what: str, cell: Callable[[Row], Cell], *, per_set: bool = False
) -> Table:
    """One row per defence (and data set), one column per attack."""
    attacks = list(dict.fromkeys((row.attack, row.eps) for row in result.means))
    rows = result.rows if per_set else result.means
    found = {(row.dataset, row.defense, row.attack, row.eps): cell(row) for row in rows}
    none = Cell(math.nan)
    lines = tuple(
        (of if per_set else of[1:], tuple(found.get((*of, *at), none) for at in attacks))
        for of in dict.fromkeys(key[:2] for key in found)
    )
    header = ("data set", "defence") if per_set else ("defence",)
    return Table(name, caption(result, what), (*header, *(title_of(*attack) for attack in attacks)), lines)


def _seeds(result: EvaluationResult) -> Table:
    """Mean and spread over the seeds of the defences' random draws."""
    parts: dict[str, Callable[[Row], Cell]] = {
        "mean": lambda row: Cell(100 * row.accuracy),
        "standard deviation": lambda row: Cell(100 * statistics.stdev(row.by_seed)),
        "worst seed": lambda row: Cell(100 * min(row.by_seed)),
        "right with every seed": lambda row: Cell(100 * row.worst),
    }
    words = f"accuracy in %, {over(result)}, over the seeds {', '.join(map(str, result.seeds))} of the defences"
    tables = [_by_attack(result, "seeds", words, cell) for cell in parts.values()]
    rows = tuple(
        ((*labels, part), cells)
        for defense in zip(*(table.rows for table in tables), strict=True)
        for part, (labels, cells) in zip(parts, defense, strict=True)
    )
    header = ("defence", "over the seeds", *tables[0].header[1:])
    return dataclasses.replace(tables[0], header=header, rows=rows)


def _accuracy(row: Row) -> Cell:
    return Cell(100 * row.accuracy, 100 * row.low, 100 * row.high)


def _paper_accuracy(row: Row) -> Cell:
    return Cell(100 * row.paper_accuracy, 100 * row.paper_low, 100 * row.paper_high)


def _detection(row: Row) -> Cell:
    return Cell(100 * (row.gate_rate if row.eps else 1.0 - row.gate_rate))


def _attack_table(result: EvaluationResult) -> Table:
    """Success of the attacks and of the members of suites, on undefended CLIP or on the defence that they know."""
    last = {(row.dataset, row.attack, row.eps, row.defense): row.part for row in result.attacks}
    lines = []
    for row in result.attacks:
        number, count = re.findall(r"^(\d+) of (\d+):|$", last[row.dataset, row.attack, row.eps, row.defense])[0]
        part = row.part or (f"ended after {number} of {count}" if number != count else "")
        numbers = (row.attacked, row.attacked * row.success_rate, 100 * row.success_rate, row.lost, row.queries)
        texts = (row.dataset, title_of(row.attack, row.eps), row.defense, part)
        lines.append((texts, tuple(Cell(value, digits=0) for value in numbers)))
    header = ("data set", "attack", "defence that it knows", "part of the suite", "attacked", "broken", "success in %")
    what = "what the attacks do to undefended CLIP, or to the defence that they know"
    return Table("attacks", caption(result, what), (*header, "lost to rounding", "forward passes"), tuple(lines))


def caption(result: EvaluationResult, what: str) -> str:
    """A caption: the quantity in the table (``what``), the model, threat model and scoring."""
    switched_off = "" if result.self_check.enabled else " The self-check was switched off."
    about = f"{result.title}: {what.removesuffix('.')}; {result.model}, {result.dtype}. {conditions(result)}"
    return f"{about}{switched_off} Intervals are 95 % intervals; ± is half of one."


def conditions(result: EvaluationResult) -> str:
    """Threat model and scoring in words; every number is shown with them."""
    scoring = SCORINGS.get(result.scoring, "not known to this version")
    return f"Threat model: {result.threat} ({result.threat_meaning}). Scoring: {result.scoring} ({scoring})."


def over(result: EvaluationResult) -> str:
    """The data sets and the number of images that a mean is over."""
    names, images = ", ".join(info.name for info in result.sets), sum(info.images for info in result.sets)
    many = f"mean over {len(result.sets)} data sets ({names}; {images:,} images)"
    return many if len(result.sets) > 1 else f"{names} ({images:,} images)"
