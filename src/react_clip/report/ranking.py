"""The ranking: all defences over clean, damaged and attacked photos, from finished runs, as a page and a table.

The columns stand in groups by what happened to the photos:

- clean photos, and photos that nobody attacked but that were taken or stored badly (mean over the kinds of damage);
- attackers who do not know the defence: the worst case per image over all attacks of one budget, and over all of them;
- attackers who know it, and images crafted on another model, each from runs of their own on their own photos;
- the cost in encoder passes, and in milliseconds from files of ``react-clip bench``.

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
from react_clip.errors import ReactClipError, first_line
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import CLEAN, format_eps
from react_clip.evaluation.result import EvaluationResult
from react_clip.report.page import render
from react_clip.report.run import Run, check_is_run, conditions, join_runs, read_run
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
_COST, _TIME = "encoder passes", "milliseconds per image"
_SHORT = {_GROUPS[ADAPTIVE]: "knows it, ", _GROUPS[TRANSFER]: "other model, ", _COST: "passes, ", _TIME: "ms, "}


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

    groups: tuple[str, ...]
    """Title of each column's group."""
    columns: tuple[str, ...]
    """Title of each column in its group."""
    entries: tuple[Entry, ...]
    scoring: str
    caption: str
    conditions: tuple[str, ...]
    """Photos, model, threat model and scoring of the runs, one line for each threat model."""

    @property
    def table(self) -> Table:
        """The ranking as a table, for Markdown and CSV."""
        titles = (_SHORT.get(group, "") + title for group, title in zip(self.groups, self.columns, strict=True))
        rows = tuple(((entry.label,), entry.cells) for entry in self.entries)
        return Table("ranking", self.caption, ("defence", *titles), rows, OBLIVIOUS, self.scoring)

    def write_page(self, path: Path) -> None:
        """Write the ranking as one self-contained page; sorted and filtered in the browser, readable without."""
        write_text(path, render("ranking.html", ranking=self))


def rank(folders: Sequence[str | Path], timings: Sequence[Path] = ()) -> Ranking:
    """The ranking of the defences of several runs.

    Args:
        folders: folders of finished runs. At least one has attackers who do not know the defence; it says which
            defences are ranked. Others add the columns of informed attackers and of images from another model.
        timings: files of ``react-clip bench``, one per kind of traffic.
    """
    read = [_finished_run(folder) for folder in folders]
    model = _defended_model(read)
    runs = _by_threat(read)
    base = runs[OBLIVIOUS]
    commands = {
        label: _result(run).command for run in read if _result(run).threat == OBLIVIOUS for label in run.defenses
    }
    blocks = {
        "clean photos": _clean(base),
        **{_GROUPS[threat]: _attacked(run, threat) for threat, run in runs.items()},
        _COST: _passes(base),
    }
    if timings:
        blocks[_TIME] = pd.DataFrame(dict(_milliseconds(base, model, path) for path in timings))
    numbers = pd.concat(blocks, axis=1).reindex(list(base.defenses))
    order = numbers[_GROUPS[OBLIVIOUS], ALL].map(lambda cell: cell.value).sort_values(ascending=False, kind="stable")
    entries = []
    for label in map(str, order.index):
        cells = tuple(cell if isinstance(cell, Cell) else Cell(float("nan")) for cell in numbers.loc[label])
        constants = json.dumps(base.defenses[label], indent=2, default=str)
        entries.append(Entry(label, cells, _per_set(base, label), constants, commands[label]))
    return Ranking(
        groups=tuple(str(group) for group, _ in numbers.columns),
        columns=tuple(str(title) for _, title in numbers.columns),
        entries=tuple(entries),
        scoring=_result(base).scoring,
        caption=(
            f"Accuracy in %, mean over data sets; ± is half of a 95 % interval. Sorted by {ALL!r}: the share of "
            "photos that are answered correctly under every attack that does not know the defence."
        ),
        conditions=(*(_conditions(run) for run in runs.values()), *map(_timing_conditions, timings)),
    )


# ---------------------------------------------------------------------- reading runs


def _finished_run(folder: str | Path) -> Run:
    """A run with its result and its rows per image; raises if one is missing."""
    run = read_run(folder)
    check_is_run(Path(folder))
    if run.result is None or run.images is None:
        raise ReactClipError(f"{folder} cannot be ranked: {run.missing[0]}")
    if run.result.threat not in _GROUPS:
        raise ReactClipError(f"threat model {run.result.threat!r} of {folder} has no place in a ranking")
    return run


def _result(run: Run) -> EvaluationResult:
    assert run.result is not None
    return run.result


def _images(run: Run) -> pd.DataFrame:
    assert run.images is not None
    return run.images


def _by_threat(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs, those of one threat model joined; raises for runs that do not fit together."""
    by_threat = {threat: [run for run in runs if _result(run).threat == threat] for threat in _GROUPS}
    if not by_threat[OBLIVIOUS]:
        raise ReactClipError(
            "no run has attackers who do not know the defence (threat: oblivious), whose photos and defences the "
            "ranking starts from; add one, such as a run of recipes/standard.yaml"
        )
    joined = {threat: join_runs(group) for threat, group in by_threat.items() if group}
    return {threat: _with_labels_of(joined[OBLIVIOUS], run) for threat, run in joined.items()}


def _with_labels_of(base: Run, run: Run) -> Run:
    """The run, its defences under the labels that the same configurations have in ``base``.

    Labels of ``base`` stay: undefended towers are several defences of one configuration.
    """
    known = {_configuration(entry): label for label, entry in base.defenses.items()}
    others = {label: entry for label, entry in run.defenses.items() if label not in base.defenses}
    labels = {label: known.get(_configuration(entry), label) for label, entry in others.items()}
    return replace(run, images=_images(run).replace({"defense": labels}))


def _configuration(entry: dict[str, Any]) -> str:
    values = {key: value for key, value in entry.items() if key not in ("label", "family", "params", "max_batch")}
    return json.dumps(values, sort_keys=True, default=str)


def _defended_model(runs: Sequence[Run]) -> str:
    """The model that the runs defend; a finetuned tower may stand beside it as a defence of its own."""
    models: dict[str, Path] = {}
    for run in runs:
        if any(entry["kind"] != "undefended" for entry in run.defenses.values()):
            models.setdefault(_result(run).model, run.folders[0])
    if len(models) > 1:
        (one, first), (two, second), *_ = models.items()
        raise ReactClipError(
            f"{first} defends {one} and {second} defends {two}; rank runs of one model together, the others apart"
        )
    return next(iter(models), _result(runs[0]).model)


def _conditions(run: Run) -> str:
    result = _result(run)
    return f"{result.model}, {over(result)}; {result.device}, {result.dtype}. {conditions(result)}"


# ---------------------------------------------------------------------- numbers


_IMAGE = ["defense", "dataset", "index"]


def _kinds(images: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Rows about clean, about naturally damaged and about attacked photos."""
    clean, attacked = images["attack"] == CLEAN, images["eps"] > 0
    return {CLEAN: images[clean], "damaged": images[~clean & ~attacked], "attacked": images[attacked]}


def _clean(run: Run) -> pd.DataFrame:
    """Accuracy on clean photos, and the mean over kinds of natural damage where there are any."""
    kinds = _kinds(_images(run))
    columns = {CLEAN: _accuracy(_shares(kinds[CLEAN]))}
    if len(kinds["damaged"]):
        columns["damaged"] = _accuracy(_shares(kinds["damaged"]).groupby(_IMAGE).mean())
    return pd.DataFrame(columns)


def _attacked(run: Run, threat: str) -> pd.DataFrame:
    """Worst case per image over the attacks of each budget; of attackers without knowledge also over all of them."""
    attacked = _kinds(_images(run))["attacked"]
    columns = {format_eps(eps): _accuracy(_worst(rows)) for eps, rows in attacked.groupby("eps")}
    if threat == OBLIVIOUS:
        columns[ALL] = _accuracy(_worst(attacked))
    return pd.DataFrame(columns)


def _passes(run: Run) -> pd.DataFrame:
    """Mean encoder passes per image, forward on clean and on attacked photos, and backward on attacked ones."""
    kinds = {kind: rows.groupby("defense") for kind, rows in _kinds(_images(run)).items()}
    means = {kind: kinds[kind]["passes"].mean() for kind in (CLEAN, "attacked")}
    return pd.DataFrame({**means, "backward": kinds["attacked"]["backward_passes"].mean()}).map(Cell)


def _milliseconds(run: Run, model: str, path: Path) -> tuple[str, dict[str, Cell]]:
    """Title of the column, and milliseconds per image of the defences that a file of ``react-clip bench`` measured."""
    report = _timing_report(path)
    times = {row["label"]: row["milliseconds"] for row in report["contenders"]}
    measured = {_configuration(values): times[label] for label, values in report["defenses"].items()}
    if report["model"] != model:
        raise ReactClipError(f"{path} timed {report['model']}, but the runs defend {model}; time that one")
    known = {label: measured.get(_configuration(entry)) for label, entry in run.defenses.items()}
    title = f"{100 * report['attacked']:g} % attacked"
    return title, {label: Cell(float(value), digits=2) for label, value in known.items() if value is not None}


def _timing_report(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        complete = bool(report["contenders"]) and {"model", "attacked", "defenses"} <= report.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReactClipError(f"{path} is no file of `react-clip bench`: {first_line(error)}") from error
    if not complete:
        raise ReactClipError(f"{path} has no table of defences; measure it with `react-clip bench --defenses ...`")
    return report


def _timing_conditions(path: Path) -> str:
    report = _timing_report(path)
    shown = (f"{report['device']}, {report['dtype']}", f"batches of {report['batch']}", f"`{report['command']}`")
    return f"Milliseconds: {', '.join(shown)}"


def _shares(images: pd.DataFrame) -> pd.Series[float]:
    """Share of draws in which each defence is right about each image under each attack."""
    return images.groupby([*_IMAGE, "attack", "eps"], sort=False)["correct"].mean()


def _worst(images: pd.DataFrame) -> pd.Series[float]:
    """The smallest of these shares over the attacks."""
    return _shares(images).groupby(_IMAGE).min()


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
    images = _images(run)
    kinds = _kinds(images[images["defense"] == label])
    columns = {f"{ALL}, worst case": 100 * _worst(kinds["attacked"]).groupby("dataset").mean()}
    for kind, rows in kinds.items():
        if len(rows):
            # Without leakage only images that CLIP gets right are attacked.
            by_set = (rows[rows["attacked"]] if kind == "attacked" else rows).groupby("dataset")
            if kind != "attacked":
                columns[f"{kind}, accuracy"] = by_set["correct"].mean() * 100
            columns[f"{kind}, gate open"] = by_set["gated"].mean() * 100
            columns[f"{kind}, passes"] = by_set["passes"].mean()
    numbers = pd.DataFrame(columns)
    by_name = tuple(((str(name),), tuple(map(Cell, values))) for name, *values in numbers.itertuples())
    return Table(f"sets-{label}", f"{label} on each data set, in %.", ("data set", *numbers), by_name, OBLIVIOUS, "")
