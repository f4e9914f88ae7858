"""The ranking: all defences over clean, damaged and attacked photos, from finished runs, as a page and a table.

The columns stand in groups by what happened to the photos:

- clean photos, and photos that nobody attacked but that were taken or stored badly (mean over the kinds of damage);
- attackers who do not know the defence: the worst case per image over all attacks of one budget, and over all of them;
- attackers who know it, and images crafted on another model, each from runs of their own on their own photos;
- the cost in encoder passes.

Runs of one threat model must have the same photos, attacks, scoring and model; others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from react_clip.attacks.base import ADAPTIVE, OBLIVIOUS, TRANSFER
from react_clip.errors import ReactClipError
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import CLEAN, format_eps
from react_clip.report.page import render
from react_clip.report.run import Run, conditions, read_run, read_runs
from react_clip.report.tables import Cell, Table, over
from react_clip.storage import write_text

ALL = "all attacks"
"""Title of the column by which defences are ranked: the worst case per image over every attack that does not know the
defence."""

_GROUPS = {
    OBLIVIOUS: "the attacker does not know the defence: worst case per image",
    ADAPTIVE: "the attacker knows the defence",
    TRANSFER: "crafted on another model",
}
_COST = "encoder passes"
_SHORT = {_GROUPS[ADAPTIVE]: "knows it, ", _GROUPS[TRANSFER]: "other model, ", _COST: "passes, "}


@dataclass(frozen=True)
class Entry:
    """One defence of the ranking."""

    label: str
    cells: tuple[Cell, ...]
    sets: Table
    """Its numbers and gate rates on each data set."""
    constants: str
    """Its configuration as JSON."""
    command: str
    """The command that measured it."""


@dataclass(frozen=True)
class Ranking:
    """Defences from the best to the worst, by the worst case over all attacks that do not know the defence."""

    groups: tuple[tuple[str, int], ...]
    """Title of each group of columns, and its number of columns."""
    columns: tuple[str, ...]
    entries: tuple[Entry, ...]
    caption: str
    conditions: tuple[str, ...]
    """Photos, model, threat model and scoring of the runs, one line for each threat model."""

    @property
    def table(self) -> Table:
        """The ranking as a table, for Markdown and CSV."""
        header = ("defence", *(self._title(column) for column in range(len(self.columns))))
        rows = tuple(((entry.label,), entry.cells) for entry in self.entries)
        return Table("ranking", self.caption, header, rows, OBLIVIOUS, "leakage_free")

    def _title(self, column: int) -> str:
        """A column's title with its group's where that is needed to understand it."""
        start = 0
        for title, width in self.groups:
            if column < start + width:
                return _SHORT.get(title, "") + self.columns[column]
            start += width
        raise IndexError(column)

    def write_page(self, path: Path) -> None:
        """Write the ranking as one self-contained page; sorted and filtered in the browser, readable without."""
        write_text(path, render("ranking.html", ranking=self))


def rank(folders: Sequence[str | Path]) -> Ranking:
    """The ranking of the defences of several runs.

    Args:
        folders: folders of finished runs. At least one has attackers who do not know the defence; it says which
            defences are ranked. Others add the columns of informed attackers and of images from another model.
    """
    runs = _by_threat(folders)
    base = runs[OBLIVIOUS]
    labels = list(dict.fromkeys(base.images["defense"])) if base.images is not None else []
    blocks = {
        "clean photos": _clean(base),
        **{_GROUPS[threat]: _attacked(run, threat) for threat, run in runs.items()},
        _COST: _passes(base),
    }
    numbers = pd.concat(blocks, axis=1).reindex(labels)
    order = numbers[_GROUPS[OBLIVIOUS], ALL].map(lambda cell: cell.value).sort_values(ascending=False, kind="stable")
    columns = [str(title) for _, title in numbers.columns]
    entries = []
    for label in order.index:
        cells = tuple(cell if isinstance(cell, Cell) else Cell(float("nan")) for cell in numbers.loc[label])
        constants = json.dumps(base.defenses.get(str(label), {}), indent=2, default=str)
        entries.append(Entry(str(label), cells, _per_set(base, str(label)), constants, _command(base, str(label))))
    return Ranking(
        groups=tuple((title, len(block.columns)) for title, block in blocks.items()),
        columns=tuple(columns),
        entries=tuple(entries),
        caption=(
            f"Accuracy in %, mean over data sets; ± is half of a 95 % interval. Defences stand in the order of "
            f"{ALL!r}: the share of photos that no attack which does not know the defence turns into a wrong answer."
        ),
        conditions=tuple(_conditions(run) for run in runs.values()),
    )


# ---------------------------------------------------------------------- reading runs


def _by_threat(folders: Sequence[str | Path]) -> dict[str, Run]:
    """The runs, those of one threat model merged; raises for runs that do not fit together."""
    found: dict[str, list[Run]] = {}
    for folder in folders:
        run = read_run(folder)
        if run.result is None or run.images is None:
            raise ReactClipError(f"{folder} cannot be ranked: {run.missing[0]}")
        found.setdefault(run.result.threat, []).append(run)
    if OBLIVIOUS not in found:
        raise ReactClipError(
            "no run has attackers who do not know the defence (threat: oblivious), whose photos and defences the "
            "ranking starts from; add one, such as a run of recipes/standard.yaml"
        )
    for runs in found.values():
        _check_models(runs)
    for threat in found:
        if threat not in _GROUPS:
            raise ReactClipError(f"threat model {threat!r} of {found[threat][0].folders[0]} has no place in a ranking")
    merged = {threat: read_runs([run.folders[0] for run in found[threat]]) for threat in _GROUPS if threat in found}
    return {threat: _with_labels_of(merged[OBLIVIOUS], run) for threat, run in merged.items()}


def _with_labels_of(base: Run, run: Run) -> Run:
    """The run, its defences under the labels that the same configurations have in ``base``."""
    assert run.images is not None
    known = {_configuration(entry): label for label, entry in base.defenses.items()}
    labels = {label: known.get(_configuration(entry), label) for label, entry in run.defenses.items()}
    return replace(run, images=run.images.replace({"defense": labels}))


def _configuration(entry: dict[str, Any]) -> str:
    values = {key: value for key, value in entry.items() if key not in ("label", "family", "params")}
    return json.dumps(values, sort_keys=True, default=str)


def _check_models(runs: Sequence[Run]) -> None:
    """Raise unless all runs defend the same model; a finetuned tower may stand beside it as a defence of its own."""
    models: dict[str, Path] = {}
    for run in runs:
        if any(entry["kind"] != "undefended" for entry in run.defenses.values()):
            assert run.result is not None
            models.setdefault(run.result.model, run.folders[0])
    if len(models) > 1:
        (one, first), (two, second), *_ = models.items()
        raise ReactClipError(
            f"{first} defends {one} and {second} defends {two}; rank runs of one model together, the others apart"
        )


def _conditions(run: Run) -> str:
    assert run.result is not None
    return f"{run.result.model}, {over(run.result)}; {run.result.device}, {run.result.dtype}. {conditions(run.result)}"


def _command(run: Run, label: str) -> str:
    """The command of the run that has the defence."""
    for folder in run.folders:
        result = read_run(folder).result
        if result is not None and any(row.defense == label for row in result.rows):
            return result.command
    return ""


# ---------------------------------------------------------------------- numbers


def _clean(run: Run) -> pd.DataFrame:
    """Accuracy on clean photos, and the mean over kinds of natural damage where there are any."""
    columns = {CLEAN: _accuracy(_shares(run, run.images["attack"] == CLEAN))}  # type: ignore[index]
    natural = _is_natural(run)
    if natural.any():
        columns["damaged"] = _accuracy(_shares(run, natural).groupby(_IMAGE).mean())
    return pd.DataFrame(columns)


def _attacked(run: Run, threat: str) -> pd.DataFrame:
    """Worst case per image over the attacks of each budget; of attackers without knowledge also over all of them."""
    assert run.images is not None
    attacked = run.images["eps"] > 0
    columns = {}
    for eps in sorted(run.images.loc[attacked, "eps"].unique()):
        columns[format_eps(eps)] = _accuracy(_shares(run, run.images["eps"] == eps).groupby(_IMAGE).min())
    if threat == OBLIVIOUS:
        columns[ALL] = _accuracy(_shares(run, attacked).groupby(_IMAGE).min())
    return pd.DataFrame(columns)


def _passes(run: Run) -> pd.DataFrame:
    """Mean encoder passes per image, forward on clean and on attacked photos, and backward on attacked ones."""
    images = run.images
    assert images is not None
    clean, attacked = images[images["attack"] == CLEAN], images[images["eps"] > 0]
    means = {
        CLEAN: clean.groupby("defense")["passes"].mean(),
        "attacked": attacked.groupby("defense")["passes"].mean(),
        "backward": attacked.groupby("defense")["backward_passes"].mean(),
    }
    return pd.DataFrame(means).map(Cell)


_IMAGE = ["defense", "dataset", "index"]


def _is_natural(run: Run) -> pd.Series[bool]:
    assert run.images is not None
    return (run.images["eps"] == 0) & (run.images["attack"] != CLEAN)


def _shares(run: Run, chosen: pd.Series[bool]) -> pd.Series[float]:
    """Share of draws in which each defence is right about each image under each of the chosen attacks."""
    assert run.images is not None
    return run.images[chosen].groupby([*_IMAGE, "attack", "eps"], sort=False)["correct"].mean()


def _accuracy(shares: pd.Series[float]) -> pd.Series[Any]:
    """Accuracy of each defence with its interval, from the share of right draws of each image."""
    sets = shares.groupby(["defense", "dataset"], sort=False).agg(["mean", "size"])
    estimates = {
        defense: metrics.mean_over_sets(group["mean"].tolist(), group["size"].tolist())
        for defense, group in sets.groupby("defense", sort=False)
    }
    return pd.Series({defense: Cell(100 * e.value, 100 * e.low, 100 * e.high) for defense, e in estimates.items()})


def _per_set(run: Run, label: str) -> Table:
    """One defence on each data set: accuracy, gate rate and passes by kind of photo."""
    assert run.images is not None
    own = run.images[run.images["defense"] == label]
    kinds = {
        "clean": own[own["attack"] == CLEAN],
        "damaged": own[(own["eps"] == 0) & (own["attack"] != CLEAN)],
        "attacked": own[(own["eps"] > 0) & own["attacked"]],
    }
    worst = own[own["eps"] > 0].groupby(["dataset", "index", "attack", "eps"])["correct"].mean()
    columns = {f"{ALL}, worst case": worst.groupby(["dataset", "index"]).min().groupby("dataset").mean() * 100}
    for kind, rows in kinds.items():
        if len(rows):
            by_set = rows.groupby("dataset")
            if kind != "attacked":
                columns[f"{kind}, accuracy"] = by_set["correct"].mean() * 100
            columns[f"{kind}, gate open"] = by_set["gated"].mean() * 100
            columns[f"{kind}, passes"] = by_set["passes"].mean()
    numbers = pd.DataFrame(columns)
    rows = tuple(
        ((str(name),), tuple(map(Cell, values))) for name, values in zip(numbers.index, numbers.values, strict=True)
    )
    return Table(f"sets-{label}", f"{label} on each data set, in %.", ("data set", *numbers), rows, OBLIVIOUS, "")
