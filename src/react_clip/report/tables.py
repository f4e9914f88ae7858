"""Tables of a result in Markdown, CSV and LaTeX. No number is printed without its threat model and its scoring."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from react_clip import storage
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.evaluation.result import EvaluationResult, Row


@dataclass(frozen=True)
class Cell:
    """A number with what belongs beside it: a half-width for people, the interval for machines, the leakage count."""

    value: float
    low: float = math.nan
    high: float = math.nan
    leaked: float | None = None
    digits: int = 1

    def text(self) -> str:
        """``61.0 ± 1.2``; a dash where nothing was measured."""
        if math.isnan(self.value):
            return "–"
        text = f"{self.value:.{self.digits}f}"
        if not math.isnan(self.low):
            text += f" ± {(self.high - self.low) / 2:.{self.digits}f}"
        return text if self.leaked is None else f"{text} ({self.leaked:g} leaked)"


@dataclass(frozen=True)
class Table:
    """A caption, a header, and rows of a few names followed by numbers."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
    threat: str
    scoring: str

    def markdown(self) -> str:
        """A GitHub table under its caption."""
        names = len(self.header) - len(self.rows[0][1])
        lines = [_md_line(self.header), _md_line(["---"] * names + ["---:"] * (len(self.header) - names))]
        lines += [_md_line([*labels, *(cell.text() for cell in cells)]) for labels, cells in self.rows]
        return f"{self.caption}\n\n" + "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Numbers as numbers: an interval has columns of its own, threat model and scoring stand in every row."""
        first = self.rows[0][1]
        names = len(self.header) - len(first)
        header = list(self.header[:names])
        for title, cell in zip(self.header[names:], first, strict=True):
            header += [
                title,
                *([f"{title} low", f"{title} high"] if _has_interval(self.rows, title, self.header) else []),
            ]
            header += [f"{title} leaked"] if cell.leaked is not None else []
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*header, "threat", "scoring"])
        for labels, cells in self.rows:
            line: list[str] = list(labels)
            for title, cell in zip(self.header[names:], cells, strict=True):
                numbers = [cell.value]
                if _has_interval(self.rows, title, self.header):
                    numbers += [cell.low, cell.high]
                if cell.leaked is not None:
                    numbers.append(cell.leaked)
                line += ["" if math.isnan(number) else f"{number:.6g}" for number in numbers]
            writer.writerow([*line, self.threat, self.scoring])
        return stream.getvalue()

    def latex(self) -> str:
        """A booktabs table."""
        names = len(self.header) - len(self.rows[0][1])
        body = [_tex_line([*labels, *(cell.text() for cell in cells)]) for labels, cells in self.rows]
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_tex(self.caption)}}}",
                rf"\begin{{tabular}}{{{'l' * names}{'r' * (len(self.header) - names)}}}",
                r"\toprule",
                _tex_line(self.header),
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def all_tables(result: EvaluationResult) -> list[Table]:
    """Every table that the result has numbers for."""
    tables = [accuracy_table(result), per_dataset_table(result), detection_table(result), cost_table(result)]
    if result.draws > 1:
        tables.append(draws_table(result))
    if result.attacks:
        tables.append(attack_table(result))
    return tables


def write_tables(result: EvaluationResult, folder: Path) -> list[Path]:
    """Write every table as ``<name>.md``, ``.csv`` and ``.tex``; returns the files."""
    written = []
    for table in all_tables(result):
        for suffix, text in ((".md", table.markdown()), (".csv", table.csv()), (".tex", table.latex())):
            storage.write_text(folder / f"{table.name}{suffix}", text)
            written.append(folder / f"{table.name}{suffix}")
    return written


def accuracy_table(result: EvaluationResult) -> Table:
    """Defences by attacks, the mean over sets."""
    return _by_attack(result, "accuracy", f"accuracy in %, {_over(result)}", _accuracy)


def draws_table(result: EvaluationResult) -> Table:
    """What fresh draws of the noise change: the mean, images right in every draw, images right in most."""
    kinds: list[tuple[str, Callable[[Row], Cell]]] = [
        ("mean", _accuracy),
        (f"worst of {result.draws}", lambda row: Cell(100 * row.worst)),
        ("majority", lambda row: Cell(100 * row.majority)),
    ]
    rows = tuple(
        ((defense, title), tuple(make(row) for row in _mean_rows(result, defense)))
        for defense in _defenses(result)
        for title, make in kinds
    )
    header = ("defence", "draws", *_attacks(result))
    return _table(
        result, "draws", f"accuracy in % over {result.draws} draws of the noise, {_over(result)}", header, rows
    )


def detection_table(result: EvaluationResult) -> Table:
    """How often the gate does the right thing: closed on clean images, open on attacked ones."""

    def rate(row: Row) -> Cell:
        return Cell(100 * (row.gate_rate if row.eps else 1.0 - row.gate_rate))

    what = "clean images passed through and attacked images corrected, in % of what undefended CLIP gets right"
    return _by_attack(result, "detection", f"{what}, {_over(result)}", rate)


def cost_table(result: EvaluationResult) -> Table:
    """Encoder passes per image."""
    what = f"encoder forward passes per image, {_over(result)}"
    return _by_attack(result, "passes", what, lambda row: Cell(row.passes))


def per_dataset_table(result: EvaluationResult) -> Table:
    """Defences by attacks, set by set."""
    rows = tuple(
        ((info.name, defense), tuple(_accuracy(row) for row in result.select(dataset=info.name, defense=defense)))
        for info in result.sets
        for defense in _defenses(result)
    )
    return _table(result, "per_dataset", "accuracy in % per data set", ("data set", "defence", *_attacks(result)), rows)


def attack_table(result: EvaluationResult) -> Table:
    """How well the attacks work: on undefended CLIP, or on the defence that they know."""
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
    return _table(result, "attacks", what, header, rows)


def caption(result: EvaluationResult, what: str) -> str:
    """What the numbers are, and under which conditions; the same words in every format."""
    scoring = {
        "leakage_free": "leakage-free (only what undefended CLIP gets right is attacked; accuracy over all images)",
        "attack_all": "attack_all (every image is attacked; answers that the attack leaked are counted beside)",
    }[result.scoring]
    parts = [f"{result.title}: {what}; {result.model}, {result.dtype}"]
    parts.append(f"threat model: {result.threat} ({result.threat_meaning})")
    parts.append(f"scoring: {scoring}")
    if not result.self_check.enabled:
        parts.append("the self-check was switched off")
    return ". ".join(part[0].upper() + part[1:] for part in parts) + ". ± is half of a 95 % interval."


def _table(
    result: EvaluationResult,
    name: str,
    what: str,
    header: tuple[str, ...],
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...],
) -> Table:
    return Table(name, caption(result, what), header, rows, result.threat, result.scoring)


def _by_attack(result: EvaluationResult, name: str, what: str, make: Callable[[Row], Cell]) -> Table:
    rows = tuple(((defense,), tuple(make(row) for row in _mean_rows(result, defense))) for defense in _defenses(result))
    return _table(result, name, what, ("defence", *_attacks(result)), rows)


def _accuracy(row: Row) -> Cell:
    leaked = row.leakage if row.scoring == "attack_all" else None
    return Cell(100 * row.accuracy, 100 * row.low, 100 * row.high, leaked)


def _mean_rows(result: EvaluationResult, defense: str) -> list[Row]:
    return result.select(dataset=MEAN, defense=defense)


def _defenses(result: EvaluationResult) -> list[str]:
    return list(dict.fromkeys(row.defense for row in result.rows))


def _attacks(result: EvaluationResult) -> list[str]:
    pairs = dict.fromkeys((row.attack, row.eps) for row in result.rows)
    return [f"{attack} {format_eps(eps)}" if eps else attack for attack, eps in pairs]


def _over(result: EvaluationResult) -> str:
    images = sum(info.images for info in result.sets)
    if len(result.sets) == 1:
        return f"{result.sets[0].name} ({images:,} images)"
    return f"mean over {len(result.sets)} data sets ({images:,} images)"


def _has_interval(
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...], title: str, header: tuple[str, ...]
) -> bool:
    column = header.index(title) - (len(header) - len(rows[0][1]))
    return any(not math.isnan(cells[column].low) for _, cells in rows)


def _md_line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(part.replace("\\", "\\\\").replace("|", "\\|") for part in parts) + " |"


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
    """Text that LaTeX prints as it is.

    >>> print(_tex("oxford_pets 5 % ± 1"))
    oxford\\_pets 5 \\% $\\pm$ 1
    """
    return text.translate(_TEX)
