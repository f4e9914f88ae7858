"""Tables of a result in Markdown, CSV and LaTeX; each states its threat model and scoring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from react_clip import storage
from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report.run import conditions


@dataclass(frozen=True)
class Cell:
    """A number, its 95 % interval and its count of leaked answers; NaN or ``None`` where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    leaked: float | None = None
    digits: int = 1

    def text(self) -> str:
        """The number as ``61.0 ± 1.2``; a dash where nothing was measured."""
        if math.isnan(self.value):
            return "–"
        text = f"{self.value:.{self.digits}f}"
        if not math.isnan(self.low):
            text += f" ± {(self.high - self.low) / 2:.{self.digits}f}"
        return text if self.leaked is None else f"{text} ({self.leaked:g} leaked)"


Rows = tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
"""Labels and numbers of each row."""
CellOf = Callable[[Row], Cell]
Lines = Sequence[tuple[dict[str, str], str, CellOf]]
"""For each row of a table: its labels by column, the data set, and the number to show of each result."""
_DETECTION = "clean images passed through and attacked images corrected, in % of what undefended CLIP gets right"


@dataclass(frozen=True)
class Table:
    """A caption, a header, and rows of one or more labels followed by numbers."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: Rows
    threat: str
    scoring: str

    def highest(self, column: int) -> float:
        """The highest number of a column; NaN if there is none."""
        values = (cells[column].value for _, cells in self.rows)
        return max((value for value in values if not math.isnan(value)), default=math.nan)

    @property
    def texts(self) -> list[list[str]]:
        """Every row as texts."""
        return [[*labels, *(cell.text() for cell in cells)] for labels, cells in self.rows]

    @property
    def align(self) -> str:
        """One letter per column: ``l`` for labels, ``r`` for numbers."""
        labels, cells = self.rows[0]
        return "l" * len(labels) + "r" * len(cells)

    def markdown(self) -> str:
        """A GitHub table under its caption."""
        rule = ["---" if side == "l" else "---:" for side in self.align]
        return f"{self.caption}\n\n" + "".join(map(_md_line, [self.header, rule, *self.texts]))

    def csv(self) -> str:
        """Numbers in full; intervals and leaked counts have columns, threat model and scoring stand in each row."""
        records = []
        for labels, cells in self.rows:
            record: dict[str, Any] = dict(zip(self.header, labels, strict=False))
            for title, cell in zip(self.header[len(labels) :], cells, strict=True):
                record |= {title: cell.value, f"{title} low": cell.low, f"{title} high": cell.high}
                record[f"{title} leaked"] = cell.leaked
            records.append({**record, "threat": self.threat, "scoring": self.scoring})
        frame = pd.DataFrame(records)
        unused = [name for name in frame if name not in self.header and frame[name].isna().all()]
        return str(frame.drop(columns=unused).to_csv(index=False, float_format="%.6g", lineterminator="\n"))

    def latex(self) -> str:
        """A booktabs table."""
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_tex(self.caption)}}}"]
        lines += [rf"\begin{{tabular}}{{{self.align}}}", r"\toprule", _tex_line(self.header), r"\midrule"]
        lines += [*map(_tex_line, self.texts), r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
        return "\n".join(lines)


def all_tables(result: EvaluationResult) -> list[Table]:
    """Every table that the result has numbers for; the first is that of accuracies."""
    defenses = list(dict.fromkeys(row.defense for row in result.rows))

    def means(name: str, what: str, cell: CellOf) -> Table:
        return _by_attack(result, name, f"{what}, {over(result)}", [({"defence": d}, MEAN, cell) for d in defenses])

    sets = [info.name for info in result.sets]

    def per_set(name: str, what: str, cell: CellOf) -> Table:
        lines = [({"data set": one, "defence": d}, one, cell) for one in sets for d in defenses]
        return _by_attack(result, name, f"{what}, per data set", lines)

    tables = [
        means("accuracy", "accuracy in %", _accuracy),
        per_set("per_dataset", "accuracy in %", _accuracy),
        means("detection", _DETECTION, _detection),
        per_set("detection_per_dataset", _DETECTION, _detection),
        means("passes", "encoder forward passes per image", lambda row: Cell(row.passes)),
    ]
    if result.draws > 1:
        kinds: dict[str, CellOf] = {
            "mean": _accuracy,
            f"worst of {result.draws}": lambda row: Cell(100 * row.worst),
            "majority": lambda row: Cell(100 * row.majority),
        }
        what = f"accuracy in % over {result.draws} draws of the noise, {over(result)}"
        lines: Lines = [({"defence": d, "draws": kind}, MEAN, cell) for d in defenses for kind, cell in kinds.items()]
        tables.append(_by_attack(result, "draws", what, lines))
    return [*tables, _attack_table(result)] if result.attacks else tables


def accuracy_table(result: EvaluationResult) -> Table:
    """Accuracy of defences by attacks, the mean over sets."""
    return all_tables(result)[0]


def write_tables(result: EvaluationResult, folder: Path) -> list[Path]:
    """Write every table as ``<name>.md``, ``.csv`` and ``.tex``; returns the files."""
    written = []
    for table in all_tables(result):
        for suffix, text in ((".md", table.markdown()), (".csv", table.csv()), (".tex", table.latex())):
            storage.write_text(folder / f"{table.name}{suffix}", text)
            written.append(folder / f"{table.name}{suffix}")
    return written


def _attack_table(result: EvaluationResult) -> Table:
    """Success of the attacks, on undefended CLIP or on the defence that they know."""
    informed = any(row.defense for row in result.attacks)
    rows = tuple(
        (
            (row.dataset, f"{row.attack} {format_eps(row.eps)}", *([row.defense, row.part] if informed else [])),
            (
                Cell(row.attacked, digits=0),
                Cell(100 * row.success_rate),
                Cell(row.lost_to_rounding, digits=0),
                Cell(row.queries),
            ),
        )
        for row in result.attacks
    )
    names = ("data set", "attack", *(("defence", "part of the suite") if informed else ()))
    what = "what the attacks do to the defences they know" if informed else "what the attacks do to undefended CLIP"
    header = (*names, "attacked", "success in %", "lost to rounding", "forward passes")
    return Table("attacks", caption(result, what), header, rows, result.threat, result.scoring)


def calibration_table(calibration: Calibration) -> Table:
    """The measurements of a calibration at each budget."""
    rows = tuple(
        (
            (format_eps(point.eps),),
            (
                Cell(point.mean_drift, digits=3),
                Cell(point.best_sigma, digits=3),
                Cell(100 * point.accuracy.get(f"{point.best_sigma:g}", math.nan)),
                Cell(point.images, digits=0),
            ),
        )
        for point in calibration.points
    )
    tau = f"tau is {calibration.config.tau:g}"
    if calibration.clean_pass is not None:
        tau += f", which leaves {100 * calibration.clean_pass:g} % of {calibration.clean_images:,} clean photos alone"
    words = (
        f"Calibration of {calibration.provenance.get('model', 'a model')} on "
        f"{calibration.provenance.get('data', {}).get('name', 'photos')}: the drift r, the anchor scale sigma with "
        f"the highest defended accuracy, and that accuracy in % of the attacked photos; {tau}. Threat model: oblivious "
        "(PGD against plain CLIP, which knows no defence). Scoring: only photos that plain CLIP gets right."
    )
    header = ("budget", "mean r", "best sigma", "accuracy there", "photos")
    return Table("calibration", words, header, rows, "oblivious", "leakage_free")


def caption(result: EvaluationResult, what: str) -> str:
    """A caption: the quantity in the table (``what``), the model, threat model and scoring."""
    switched_off = "" if result.self_check.enabled else " The self-check was switched off."
    about = f"{result.title}: {what}; {result.model}, {result.dtype}. {conditions(result)}{switched_off}"
    return about + " ± is half of a 95 % interval."


def _by_attack(result: EvaluationResult, name: str, what: str, lines: Lines) -> Table:
    """One column per attack, one row per line."""
    attacks = dict.fromkeys((row.attack, row.eps) for row in result.rows)
    columns = (f"{attack} {format_eps(eps)}" if eps else attack for attack, eps in attacks)
    rows = tuple(
        (tuple(labels.values()), tuple(map(cell, result.select(dataset=dataset, defense=labels["defence"]))))
        for labels, dataset, cell in lines
    )
    header = (*(lines[0][0] if lines else ("defence",)), *columns)
    return Table(name, caption(result, what), header, rows, result.threat, result.scoring)


def _accuracy(row: Row) -> Cell:
    leaked = row.leakage if row.scoring == "attack_all" else None
    return Cell(100 * row.accuracy, 100 * row.low, 100 * row.high, leaked)


def _detection(row: Row) -> Cell:
    """Share of clean images that pass through, or of attacked images that are corrected."""
    return Cell(100 * (row.gate_rate if row.eps else 1.0 - row.gate_rate))


def over(result: EvaluationResult) -> str:
    """The data sets and the number of images that a mean is over."""
    names, images = ", ".join(info.name for info in result.sets), sum(info.images for info in result.sets)
    if len(result.sets) == 1:
        return f"{names} ({images:,} images)"
    return f"mean over {len(result.sets)} data sets ({names}; {images:,} images)"


def _md_line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts) + " |\n"


def _tex_line(parts: Sequence[str]) -> str:
    return " & ".join(_tex(part) for part in parts) + r" \\"


_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "–": "--",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)


def _tex(text: str) -> str:
    """Text with LaTeX's special characters escaped (pandas escapes cells, but no captions).

    >>> print(_tex("oxford_pets 5 % ± 1"))
    oxford\\_pets 5 \\% $\\pm$ 1
    """
    return text.translate(_TEX)
