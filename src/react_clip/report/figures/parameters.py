"""Accuracy against one number of a defence's configuration, one line a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from react_clip.calibration import best_scale
from react_clip.evaluation.result import Row
from react_clip.report.figures import sweeps
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.labels import End, label_ends
from react_clip.report.figures.parts import budget_name, ceiling_line, interval_line, percent_axis
from react_clip.report.figures.sweeps import Sweep
from react_clip.report.style import INK, SMALL, budget_colour, budget_line, name_axes, new_axes, new_figure, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALE = "mapping.sigma"
NAMES = {
    "tau": "intervention threshold τ",
    "views": "number of anchor views M",
    "alpha": "extrapolation strength α",
    SCALE: "anchor scale σ (pixels in [0, 1])",
    "probe_samples": "noise draws per probe",
    "sigma_low": "weak probe noise (pixels in [0, 1])",
    "sigma_high": "strong probe noise (pixels in [0, 1])",
}
_PAPER = {
    "tau": "Appendix, sensitivity to the threshold",
    "views": "Appendix, number of anchor views",
    "alpha": "Appendix, extrapolation strength",
}
_FILES = {"tau": "sweep-tau", "views": "sweep-views", "alpha": "sweep-alpha"}
_RECIPES = {
    "tau": "recipes/table3.yaml",
    "views": "recipes/sweep-views.yaml",
    "alpha": "recipes/sweep-alpha.yaml",
}
_PUBLISHED_ALPHA = 2.0
"""The extrapolation strength at which the paper sweeps the anchor scale."""


def anchor_scale(view: View) -> list[FigureOf]:
    """Accuracy against a fixed anchor scale; each budget has its own best one (Figure 3)."""
    view.require()
    found = [*(sweep for sweep in view.sweeps if sweep.field == SCALE), *_slices(view)]
    if not found:
        raise MissingDataError(
            "no defences differ in a constant anchor scale alone; recipes/anchor-scale.yaml sweeps it"
        )
    return [
        FigureOf(
            _file("anchor-scale", sweep, found),
            "A fixed anchor scale is a compromise",
            view.caption(
                f"accuracy of {_described(sweep)} against its anchor scale, one line a budget, the mean over data "
                "sets; a star marks the best scale of each",
                f"Bands are {INTERVAL}",
            ),
            "Figure 3",
            lambda sweep=sweep: _figure(view, sweep, best=True),  # type: ignore[misc]
        )
        for sweep in found
    ]


def sensitivity(field: str, view: View) -> list[FigureOf]:
    """Accuracy against one field, its default marked (figures of the appendix)."""
    view.require()
    found = [sweep for sweep in view.sweeps if sweep.field == field]
    if not found:
        raise MissingDataError(f"no defences differ in {field} alone; {_RECIPES[field]} sweeps it")
    return [_sensitivity(view, sweep, _file(_FILES[field], sweep, found)) for sweep in found]


def others(view: View) -> list[FigureOf]:
    """Sweeps over anything else, beyond the paper."""
    view.require()
    every = view.sweeps
    found = [sweep for sweep in every if sweep.field not in (*_FILES, SCALE)]
    if not found:
        raise MissingDataError("no defences differ in one other number alone; a recipe's `grid` sweeps any field")
    return [_sensitivity(view, sweep, f"sweep-{slug(sweep.kind)}-{slug(sweep.field)}") for sweep in found]


def _sensitivity(view: View, sweep: Sweep, file: str) -> FigureOf:
    what = f"accuracy of {sweep.kind} against {_named(sweep.field)}, one line a budget, the mean over data sets"
    return FigureOf(
        file,
        f"Sensitivity to {_named(sweep.field).split(' (')[0]}",
        view.caption(what, f"Bands are {INTERVAL}; the vertical line is the default"),
        _PAPER.get(sweep.field, "beyond the paper"),
        lambda: _figure(view, sweep, best=False),
    )


def _slices(view: View) -> list[Sweep]:
    """The line of each grid over scale and alpha at the paper's alpha, else at the largest."""
    found = []
    for grid in view.grids:
        if set(grid.fields) == {SCALE, "alpha"}:
            strengths = grid.values("alpha")
            alpha = next((value for value in strengths if math.isclose(value, _PUBLISHED_ALPHA)), strengths[-1])
            found.append(Sweep(grid.kind, SCALE, grid.along(SCALE, alpha), alpha))
    return found


def _file(name: str, sweep: Sweep, among: Sequence[Sweep]) -> str:
    """Names stay apart: by the method where that is enough, by number where it is not."""
    if len(among) == 1:
        return name
    alike = [other for other in among if other.kind == sweep.kind]
    number = alike.index(sweep)
    return f"{name}-{slug(sweep.kind)}" + (f"-{number + 1}" if number else "")


def _described(sweep: Sweep) -> str:
    return sweep.kind if sweep.alpha is None else f"{sweep.kind} at α = {sweep.alpha:g}"


def _named(field: str) -> str:
    return NAMES.get(field, field)


def _figure(view: View, sweep: Sweep, *, best: bool) -> Figure:
    figure = new_figure(height=3.1)
    axes = new_axes(figure)
    ends, highest = [], []
    for eps in (0.0, *view.budgets):
        points = [(value, row) for value, label in sweep.points if (row := view.at(label, eps)) is not None]
        if not points:
            continue
        _budget_line(axes, eps, points, best=best)
        ends.append(End(budget_name(eps), points[-1][0], 100 * points[-1][1].accuracy, budget_colour(eps)))
        highest += [row.high for _, row in points]
    ceiling = view.ceiling() if any(kind == "undefended" for kind in view.kinds.values()) else math.nan
    percent_axis(axes, [*highest, ceiling])
    ceiling_line(axes, ceiling)
    values = [value for value, _ in sweep.points]
    margin = 0.03 * (values[-1] - values[0])
    axes.set_xlim(values[0] - margin, values[-1] + margin)
    if not best:
        _mark_default(axes, sweeps.default_of(sweep.kind, sweep.field))
    name_axes(axes, _named(sweep.field))
    label_ends(axes, ends)
    return figure


def _budget_line(axes: Axes, eps: float, points: Sequence[tuple[float, Row]], *, best: bool) -> None:
    x = [value for value, _ in points]
    low, middle, high = ([100 * getattr(row, name) for _, row in points] for name in ("low", "accuracy", "high"))
    colour = budget_colour(eps)
    interval_line(axes, x, low, middle, high, budget_line(eps))
    if best and any(math.isfinite(value) for value in middle):
        at = best_scale(x, [value if math.isfinite(value) else -1.0 for value in middle])
        axes.plot([at], [middle[x.index(at)]], marker="*", markersize=11, color=colour, markeredgecolor=INK, zorder=5)


def _mark_default(axes: Axes, default: float | None) -> None:
    low, high = axes.get_xlim()
    if default is None or not low <= default <= high:
        return
    axes.axvline(default, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
    left = default < (low + high) / 2
    axes.annotate(
        f"default {default:g}",
        xy=(default, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(3 if left else -3, 4),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=SMALL,
        color=INK,
    )
