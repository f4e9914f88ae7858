"""The ranking: all defences over clean, damaged and attacked photos, from finished runs, as a page and a table.

Accuracies are strict: an attacked photo counts only if the defence is right about it clean as well as attacked. Under
attackers who do not know the defence it is the worst case per image over all attacks of a budget, and over all of them;
attackers who know it, and images crafted on another model, come from runs of their own on their own photos. Runs of one
threat model must have the same photos, attacks, scoring and model; others are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from react_clip import intervals, storage
from react_clip.attacks.base import ADAPTIVE, OBLIVIOUS, TRANSFER
from react_clip.errors import ReactClipError
from react_clip.evaluation.flags import flags
from react_clip.evaluation.numbers import attack_rows, attacks_of, distinct_attacks
from react_clip.evaluation.recipe import CLEAN, format_eps
from react_clip.evaluation.results import EvaluationResult, join
from react_clip.report.page import Section, write_page
from react_clip.report.tables import Cell, Table, caption, conditions, over

ALL = "all attacks"
"""Title of the column by which defences are ranked: the worst case per image over every attack that does not know the
defence."""
_PREFIX = {OBLIVIOUS: "", ADAPTIVE: "knows it, ", TRANSFER: "other model, "}
_IMAGE = ["defense", "dataset", "index"]


@dataclass(frozen=True)
class Entry:
    """One defence of the ranking."""

    label: str
    cells: tuple[Cell, ...]
    sets: Table
    """Its accuracy, gate rate and passes on each data set."""
    constants: str
    """Its configuration as JSON."""


@dataclass(frozen=True)
class Ranking:
    """Defences from the best to the worst, by the worst case over all attacks that do not know the defence."""

    columns: tuple[str, ...]
    entries: tuple[Entry, ...]
    caption: str
    informed: Table | None
    """What attackers who know the defences found; ``None`` without such a run."""
    conditions: tuple[str, ...]
    """Photos, model, threat model, scoring and command of the runs, one line for each threat model."""

    @property
    def table(self) -> Table:
        """The ranking as a table."""
        rows = tuple(((entry.label,), entry.cells) for entry in self.entries)
        return Table("ranking", self.caption, ("defence", *self.columns), rows)

    def write_page(self, path: Path) -> None:
        """Write the ranking as one self-contained page."""
        each = [
            Section(
                f"{entry.label} by data set, and its constants", (), (), [entry.sets], code=entry.constants, folded=True
            )
            for entry in self.entries
        ]
        first = [Section("All defences", tables=[self.table])]
        if self.informed is not None:
            first.append(Section("What the informed attack found", tables=[self.informed]))
        write_page(path, "Ranking of defences", [], [*first, *each, Section("What was measured", self.conditions)])


def rank(folders: Sequence[str | Path], timings: Sequence[Path] = ()) -> Ranking:
    """The ranking of the defences of several runs.

    Args:
        folders: folders of finished runs. At least one has attackers who do not know the defence; it says which
            defences are ranked. Others add the columns of informed attackers and of images from another model.
        timings: files of ``react-clip bench``, one per kind of traffic.
    """
    runs = _by_threat([EvaluationResult.load(Path(folder)) for folder in folders])
    base = runs[OBLIVIOUS]
    images = {threat: _named_as_in(base, run) for threat, run in runs.items()}
    columns = {**_unattacked(images[OBLIVIOUS])}
    for threat, rows in images.items():
        columns |= {f"{_PREFIX[threat]}{title}": cells for title, cells in _attacked(rows, threat).items()}
    columns |= _passes(images[OBLIVIOUS])
    timed = [_timing(base, path) for path in timings]
    columns |= {title: cells for title, cells, _ in timed}
    entries = []
    for label, entry in base.defenses.items():
        cells = tuple(values.get(label, Cell(math.nan)) for values in columns.values())
        constants = json.dumps(entry, indent=2, default=str)
        entries.append(Entry(label, cells, _per_set(images[OBLIVIOUS], label), constants))
    by = list(columns).index(ALL)
    entries.sort(key=lambda entry: -entry.cells[by].value)
    attacks = distinct_attacks(base.recipe, [at for at in attacks_of(base.images) if at[1]])
    informed = informed_table(runs[ADAPTIVE], images[ADAPTIVE]) if ADAPTIVE in runs else None
    words = (
        f"Accuracy in %, mean over data sets, with 95 % intervals. Sorted by {ALL!r}: the part of the photos that are "
        f"answered correctly clean and under every attack that does not know the defence ({attacks} different attacks)."
    )
    about = [
        f"{run.model}, {over(run)}; {run.device}, {run.dtype}. {conditions(run)} Command: {run.command or 'none'}."
        for run in runs.values()
    ]
    return Ranking(tuple(columns), tuple(entries), words, informed, (*about, *(words for *_, words in timed)))


# ---------------------------------------------------------------------- runs that fit together


def _by_threat(runs: Sequence[EvaluationResult]) -> dict[str, EvaluationResult]:
    """The runs, those of one threat model joined; raises for runs that do not fit together."""
    if unknown := [run.threat for run in runs if run.threat not in _PREFIX]:
        raise ReactClipError(f"threat model {unknown[0]!r} has no place in a ranking; it knows {', '.join(_PREFIX)}")
    if not any(run.threat == OBLIVIOUS for run in runs):
        raise ReactClipError(
            "no run has attackers who do not know the defence (threat: oblivious), whose photos and defences the "
            "ranking starts from; add one, such as a run of recipes/standard.yaml"
        )
    models = {run.model for run in runs if any(entry["kind"] != "undefended" for entry in run.defenses.values())}
    if len(models) > 1:
        raise ReactClipError(f"the runs defend {' and '.join(sorted(models))}; rank runs of one model together")
    groups = {threat: [run for run in runs if run.threat == threat] for threat in _PREFIX}
    return {threat: join(group) for threat, group in groups.items() if group}


def _named_as_in(base: EvaluationResult, run: EvaluationResult) -> pd.DataFrame:
    """Rows of a run, its defences under the labels that the same configurations have in ``base``."""
    names = {_configuration(entry): label for label, entry in base.defenses.items()}
    own = {label: entry for label, entry in run.defenses.items() if label not in base.defenses}
    labels = {label: names.get(_configuration(entry), label) for label, entry in own.items()}
    return run.images.assign(defense=run.images["defense"].astype(str).replace(labels))


def _configuration(entry: dict[str, Any]) -> str:
    values = {key: value for key, value in entry.items() if key not in ("label", "family", "params")}
    return json.dumps(values, sort_keys=True, default=str)


# ---------------------------------------------------------------------- numbers


Cells = dict[str, Cell]
"""A number for each defence."""


def _unattacked(rows: pd.DataFrame) -> dict[str, Cells]:
    """Accuracy on clean photos, and the mean over kinds of natural damage where there are any."""
    damaged = rows[(rows["attack"] != CLEAN) & (rows["eps"] == 0)]
    columns = {CLEAN: _accuracy(_right(rows[rows["attack"] == CLEAN]))}
    if len(damaged):
        columns["damaged"] = _accuracy(_right(damaged).groupby(_IMAGE).mean())
    return columns


def _attacked(rows: pd.DataFrame, threat: str) -> dict[str, Cells]:
    """Worst case per image over the attacks of each budget; of attackers without knowledge also over all of them."""
    attacked = rows[rows["eps"] > 0]
    columns = {format_eps(eps): _accuracy(_worst(group)) for eps, group in attacked.groupby("eps")}
    if threat == OBLIVIOUS:
        columns[ALL] = _accuracy(_worst(attacked))
    return columns


def _passes(rows: pd.DataFrame) -> dict[str, Cells]:
    """Mean encoder passes per image, forward on clean and on attacked photos, and backward on attacked ones."""
    clean, attacked = rows[rows["attack"] == CLEAN], rows[rows["eps"] > 0]
    columns = {"clean": (clean, "passes"), "attacked": (attacked, "passes"), "backward": (attacked, "backward_passes")}
    return {
        f"passes, {title}": {str(label): Cell(value) for label, value in part.groupby("defense")[name].mean().items()}
        for title, (part, name) in columns.items()
    }


def _right(rows: pd.DataFrame) -> pd.Series[float]:
    """Fraction of draws in which each defence is right about each image under each attack."""
    return rows.groupby([*_IMAGE, "attack", "eps"], sort=False, observed=True)["robust"].mean()


def _worst(rows: pd.DataFrame) -> pd.Series[float]:
    """The smallest of these fractions over the attacks."""
    return _right(rows).groupby(_IMAGE, observed=True).min()


def _accuracy(right: pd.Series[float]) -> Cells:
    """Accuracy of each defence with its interval, from the fraction of right draws of each image."""
    sets = right.groupby(["defense", "dataset"], sort=False, observed=True).agg(["mean", "size"])
    cells = {}
    for label, group in sets.groupby("defense", sort=False, observed=True):
        value, low, high = intervals.mean_over_sets(group["mean"].tolist(), group["size"].tolist())
        cells[str(label)] = Cell(100 * value, 100 * low, 100 * high)
    return cells


def informed_table(run: EvaluationResult, rows: pd.DataFrame) -> Table:
    """What attackers who know each defence left of it, the attack that broke most, and reasons to doubt the number."""
    left, raised = _attacked(rows, ADAPTIVE), flags(rows)
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    for row in attack_rows(rows):
        counts = found.setdefault((row.defense, row.eps), {}).setdefault(row.part or row.attack, [0, 0])
        counts[:] = counts[0] + row.attacked, counts[1] + row.attacked * row.success_rate
    lines = []
    for (label, eps), broken in found.items():
        shares = {name: hits / met for name, (met, hits) in broken.items() if met}
        # Members stand before the whole suite, of which they are a part.
        best = max(sorted(shares, key=lambda name: name.startswith("adaptive-suite")), key=lambda name: shares[name])
        doubts = [flag for (_, budget, one), names in raised.items() if (one, budget) == (label, eps) for flag in names]
        met = max(met for met, _ in broken.values())
        numbers = (Cell(met, digits=0), left[format_eps(eps)][label], Cell(100 * shares[best]))
        lines.append(((label, format_eps(eps), best, ", ".join(dict.fromkeys(doubts)) or "none"), numbers))
    words = (
        "accuracy in % that attackers who know the defence leave; the strongest broke most of the photos that it met; "
    )
    words += "flags are computed reasons to doubt the number"
    header = ("defence", "budget", "strongest attack", "flags", "photos attacked", "accuracy", "broken by it in %")
    return Table("informed", caption(run, f"{words}, {over(run)}"), header, tuple(lines))


def _per_set(rows: pd.DataFrame, label: str) -> Table:
    """One defence on each data set: accuracy, gate rate and passes, clean and attacked."""
    own = rows[rows["defense"] == label]
    parts = {"clean": own[own["attack"] == CLEAN], "attacked": own[own["attacked"] & (own["eps"] > 0)]}
    numbers = pd.DataFrame({f"{ALL}, worst case": 100 * _worst(own[own["eps"] > 0]).groupby("dataset").mean()})
    for title, part in parts.items():
        sets = part.groupby("dataset", observed=True)
        numbers[f"{title}, accuracy"] = 100 * sets["robust"].mean()
        numbers[f"{title}, gate open"] = 100 * sets["gated"].mean()
        numbers[f"{title}, passes"] = sets["passes"].mean()
    lines = tuple(((str(name),), tuple(map(Cell, values))) for name, *values in numbers.itertuples())
    return Table(f"sets of {label}", f"{label} on each data set, in %.", ("data set", *numbers), lines)


# ---------------------------------------------------------------------- timings


def _timing(base: EvaluationResult, path: Path) -> tuple[str, Cells, str]:
    """Title of a column, milliseconds per image by defence, and how they were measured, from ``react-clip bench``."""
    report = storage.read_json(path, "give a file of `react-clip bench --defenses ...`")
    try:
        times = {row["label"]: row["milliseconds"] for row in report["contenders"]}
        measured = {_configuration(values): times[label] for label, values in report["defenses"].items()}
        title = f"ms, {100 * report['attacked']:g} % attacked"
        words = "Milliseconds: {device}, {dtype}, batches of {batch}, {command}.".format(**report)
        model = report["model"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReactClipError(f"{path} is no file of `react-clip bench --defenses ...` ({error!r})") from None
    if model != base.model:
        raise ReactClipError(f"{path} timed {model}, but the runs defend {base.model}; time that one")
    known = {label: measured.get(_configuration(entry)) for label, entry in base.defenses.items()}
    return title, {label: Cell(float(value), digits=2) for label, value in known.items() if value is not None}, words
