"""Label leakage (appendix of the paper): right answers on images that undefended CLIP gets wrong when clean.

Tables here have the index ``(eps, defense)`` and the columns ``low``, ``value`` and ``high``, over all data sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import MEAN, value_at
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import Draft, MissingDataError, View
from react_clip.report.figures.sweeps import NAMES, SCALE, Sweep, along, sweeps_of

PUBLISHED = {SCALE: 0.1, "alpha": 1.2}
_NEEDS = "recipes/leakage.yaml attacks all (`scoring: attack_all`), over a grid of scale and alpha"
_NO_ATTACK: style.Line = {"color": style.COLOURS["mac"], "linewidth": 1.8, "marker": "D", "markersize": 3.4}
_BARS: dict[str, dict[str, Any]] = {
    "as reported": {"alpha": 0.45, "hatch": "////", "edgecolor": style.PAPER},
    "leaked answers not counted": {},
}


def reported(view: View) -> pd.DataFrame:
    """Accuracy in % as it is reported where every image is attacked."""
    return view.means[["low", "accuracy", "high"]].set_axis(["low", "value", "high"], axis="columns")


def leaked(view: View) -> pd.DataFrame:
    """Number of images that were wrong clean and are right after attack and defence; it has no interval."""
    return pd.DataFrame({"low": np.nan, "value": view.means["leakage"], "high": np.nan})


def corrected(view: View) -> pd.DataFrame:
    """Accuracy in % without the leaked answers, the mean over sets."""
    rows = view.numbers[view.numbers["dataset"] != MEAN]
    shares = (rows["accuracy"] / 100 - rows["leakage_share"]).clip(0.0, 1.0)
    table = {}
    for key, group in rows.assign(share=shares).groupby(["eps", "defense"]):
        mean = metrics.mean_over_sets(group["share"].tolist(), group["n"].tolist())
        table[key] = {"low": 100 * mean.low, "value": 100 * mean.value, "high": 100 * mean.high}
    return pd.DataFrame.from_dict(table, orient="index")


def flipped(view: View, label: str) -> float:
    """Images that are wrong clean and that the defence gets right without an attack, the mean over draws."""
    rows = view.of(label).query("eps == 0")
    wrong = rows["clean_prediction"] != rows["label"]
    return float((wrong & rows["correct"]).sum()) / rows["draw"].nunique() if len(rows) else math.nan


Measure = Callable[[View], pd.DataFrame]
_AXES: dict[Measure, str] = {
    leaked: "leaked images",
    reported: "accuracy in %, leaked answers counted",
    corrected: "accuracy in %, leaked answers not counted",
}


def leakage_grids(view: View) -> list[Sweep]:
    """The grids over anchor scale and extrapolation strength, where every image was attacked.

    At alpha = 0 the answer is f, that of undefended CLIP, whose rows serve for every scale.
    """
    _require_attack_all(view)
    grids = [sweep for sweep in sweeps_of(view.settings) if set(sweep.fields) == {SCALE, "alpha"}]
    if not grids:
        raise MissingDataError(f"no defences differ in anchor scale and alpha; {_NEEDS}")
    plain = [label for label, kind in view.kinds.items() if kind == "undefended"]
    return [replace(grid, cells={**grid.cells, **_at_alpha_zero(grid, label)}) for grid in grids for label in plain[:1]]


def _at_alpha_zero(grid: Sweep, plain: str) -> dict[tuple[Any, ...], str]:
    return {tuple({SCALE: scale, "alpha": 0.0}[field] for field in grid.fields): plain for scale in grid.values(SCALE)}


def _require_attack_all(view: View) -> None:
    if view.result.scoring != "attack_all":
        raise MissingDataError(f"only what undefended CLIP gets right was attacked, so nothing can leak; {_NEEDS}")


def over_grid(measure: Measure, view: View) -> list[Draft]:
    """A measure against alpha at each budget's best scale, and against the scale at the largest alpha."""
    grids = leakage_grids(view)
    largest = max(value for grid in grids for value in grid.values("alpha"))
    best = "at each budget's best anchor scale (highest accuracy without leaked answers, at any α)"
    fields = {"alpha": ("alpha", "α", best), SCALE: ("sigma", "the anchor scale", f"at α = {largest:g}")}
    return [
        Draft(partial(_grid_figure, view, grids, field, measure), {"field": words, "at": at}, suffix)
        for field, (suffix, words, at) in fields.items()
    ]


def published(view: View) -> list[Draft]:
    """AOM and Defend-CLIP with the published constants, with and without leaked answers."""
    _require_attack_all(view)
    labels = [label for label, entry in view.settings.items() if _is_published(entry)]
    if not labels:
        raise MissingDataError(
            "no aom or defend-clip has the published anchor scale 0.1 and alpha 1.2; add one to the recipe"
        )
    return [Draft(partial(_published_figure, view, labels))]


def control(view: View) -> list[Draft]:
    """Wrong images that the defence gets right, with and without an attack before it."""
    grids = leakage_grids(view)
    values, without = leaked(view), {label: flipped(view, label) for grid in grids for label in grid.cells.values()}

    def draw(axes: Axes, number: int) -> None:
        points = grids[number].along(SCALE, grids[number].values("alpha")[-1])
        for eps in view.budgets:
            line = {**style.budget_line(eps), "linestyle": style.DASHED, "marker": "o", "markersize": 3}
            plot.interval_line(axes, along(values, points, eps), line, label=plot.budget_name(eps), value="value")
        x, counts = zip(*((x, without[label]) for x, label in points), strict=True)
        axes.plot(x, counts, label="no attack", **_NO_ATTACK)
        axes.set_ylim(bottom=0)

    return [Draft(partial(_grid_panels, grids, draw, SCALE, "wrong images that come out right"))]


def best_scale(accuracy: pd.DataFrame, grid: Sweep, eps: float) -> float:
    """The anchor scale of the highest accuracy; of equals, that with the smallest alpha.

    Args:
        accuracy: table of :func:`corrected`.
        grid: defences that differ in scale and alpha.
        eps: budget.
    """
    scale, alpha = (grid.fields.index(field) for field in (SCALE, "alpha"))
    cells = sorted(grid.cells, key=lambda cell: (cell[alpha], cell[scale]))
    values = accuracy.loc[eps, "value"].reindex([grid.cells[cell] for cell in cells]).fillna(-1.0)
    return float(cells[int(values.argmax())][scale])


def _is_published(entry: dict[str, Any]) -> bool:
    known = entry.get("kind") in ("aom", "defend-clip")
    return known and all(value_at(entry, name) == value for name, value in PUBLISHED.items())


def _grid_figure(view: View, grids: Sequence[Sweep], field: str, measure: Measure) -> Figure:
    values, accuracy = measure(view), corrected(view)
    ceiling = view.ceiling()
    lines: list[dict[str, tuple[float, pd.DataFrame]]] = []
    for grid in grids:
        lines.append({})
        for eps in view.budgets:
            scale = best_scale(accuracy, grid, eps)
            points = grid.along("alpha", scale) if field == "alpha" else grid.along(SCALE, grid.values("alpha")[-1])
            label = plot.budget_name(eps) + (f", σ = {scale:g}" if field == "alpha" else "")
            lines[-1][label] = (eps, along(values, points, eps))
    highest = max(float(rows[["value", "high"]].max().max()) for panel in lines for _, rows in panel.values())

    def draw(axes: Axes, number: int) -> None:
        for label, (eps, rows) in lines[number].items():
            plot.interval_line(axes, rows, style.budget_line(eps), label=label, value="value")
        if measure is leaked:
            axes.set_ylim(0, max(1.08 * highest, 1.0))
            return
        plot.percent_axis(axes, [highest, ceiling], name="")
        # Curves fill the panel, so the dotted line is named above it.
        plot.ceiling_line(axes, ceiling, "")
        words = f"dotted: CLIP, clean {ceiling:.1f} %"
        axes.set_title(words, loc="right", fontsize=style.SMALL, color=style.INK)

    return _grid_panels(grids, draw, field, _AXES[measure])


def _grid_panels(grids: Sequence[Sweep], draw: Callable[[Axes, int], None], field: str, ylabel: str) -> Figure:
    titles = [style.label_of(grid.kind) for grid in grids]
    figure = plot.panels(titles, draw, height=2.1, sharey="none")
    for axes in figure.axes:
        axes.margins(x=0.02)
    plot.name_figure(figure, NAMES[field], ylabel)
    plot.label_ends(figure)
    return figure


def _published_figure(view: View, labels: Sequence[str]) -> Figure:
    ceiling, tables = view.ceiling(), (reported(view), corrected(view))

    def draw(axes: Axes, number: int) -> None:
        label, highest = labels[number], [ceiling]
        for at, eps in enumerate(view.budgets):
            if all((eps, label) in table.index for table in tables):
                first, second = (table.loc[(eps, label)] for table in tables)
                _bar_pair(axes, at, first, second, view.lines[label]["color"])
                highest.append(first["high"])
        axes.set_xticks(range(len(view.budgets)), [plot.budget_name(eps) for eps in view.budgets])
        plot.percent_axis(axes, highest, name="")
        axes.set_ylim(top=min(100.0, axes.get_ylim()[1] + 8))
        plot.ceiling_line(axes, ceiling)

    titles = [style.label_of(view.kinds[label]) for label in labels]
    figure = plot.panels(titles, draw, height=1.8, above=0.1, sharey="none")
    plot.name_figure(figure, "attack budget ε", "accuracy in %")
    keys = [Patch(facecolor=style.COLOURS["undefended"], linewidth=0, **bar) for bar in _BARS.values()]
    style.legend(figure, keys, list(_BARS), columns=2)
    return figure


def _bar_pair(axes: Axes, at: int, first: pd.Series, second: pd.Series, colour: str) -> None:
    """Two bars side by side, as reported and without leaked answers, and their difference in points."""
    for step, (item, bar) in enumerate(zip((first, second), _BARS.values(), strict=True)):
        x = at + (step - 0.5) * 0.36
        axes.bar([x], [item["value"]], width=0.34, linewidth=0, facecolor=colour, **bar)
        axes.vlines(x, item["low"], item["high"], color=style.INK, linewidth=0.9)
    gap = f"−{first['value'] - second['value']:.1f}"
    plot.note(axes, gap, (at + 0.18, second["high"]), "data", (0, 2), ha="center")
