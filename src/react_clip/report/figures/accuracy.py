"""Accuracy against the budget (all methods, per data set, per mapping) and against cost."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from react_clip.calibration import BUDGETS
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import MEAN
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.sweeps import MAPPING_NAMES, by_mapping, methods_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CALIBRATED = max(BUDGETS)
"""The largest budget that mappings are fitted to."""
BACKWARD = 2.0
"""Forward passes that a backward pass counts as."""


def across_budgets(view: View) -> list[FigureOf]:
    """All methods against the budget (the paper's Figure 1)."""
    if view.budgets[0] > CALIBRATED * 1.001:
        raise MissingDataError(
            "every budget is beyond the calibrated range, see Figure 9; recipes/table1.yaml has the others"
        )
    methods = methods_of(view)
    what = "accuracy of each defence from clean images to the largest budget, the mean over data sets"
    make = partial(_methods_figure, view, methods)
    return [view.figure("accuracy", "Accuracy across attack strengths", what, "Figure 1", make, band=_band(methods))]


def beyond_range(view: View) -> list[FigureOf]:
    """The same with budgets beyond those that the mapping was fitted to (Figure 9)."""
    if view.budgets[-1] <= CALIBRATED * 1.001:
        raise MissingDataError(
            "no budget exceeds the calibrated 16/255; recipes/table1-extended.yaml has 24/255 and 32/255"
        )
    methods = methods_of(view)
    what = "accuracy of each defence; budgets beyond the 16/255 that the mapping was calibrated on are shaded"
    make = partial(_methods_figure, view, methods, shaded=True)
    title = "Robustness beyond the calibrated range"
    return [view.figure("beyond", title, what, "Figure 9", make, band=_band(methods))]


def per_set(view: View) -> list[FigureOf]:
    """Figure 1 for every data set (tables in the paper's appendix)."""
    view.require(sets=2)
    methods = methods_of(view)
    what = "accuracy of each defence on each data set; the dotted line is CLIP on clean images"
    title, paper = "Accuracy across attack strengths, set by set", "Appendix, per-dataset breakdown of Table 1"
    make = partial(_sets_figure, view, methods)
    return [view.figure("accuracy-per-set", title, what, paper, make, band=INTERVAL)]


def per_mapping(view: View) -> list[FigureOf]:
    """One line per mapping, everything else the same (Figure 8)."""
    view.require()
    groups = by_mapping(view.settings)
    if not groups:
        raise MissingDataError(
            "no defences differ in the kind of their mapping alone; recipes/mappings.yaml compares three kinds"
        )
    what = "accuracy with each correction-strength mapping, all else equal, the mean over data sets"
    title = "Behaviour across correction-strength mappings"
    return [
        view.figure(
            "mappings" if number == 0 else f"mappings-{number + 1}",
            title,
            what,
            "Figure 8",
            partial(_mapping_figure, view, group),
            band=f"Bands are {INTERVAL}",
        )
        for number, group in enumerate(groups)
    ]


def _band(methods: list[str]) -> str:
    shape = "Bands" if len(methods) <= plot.BANDS else "Bars"
    return f"{shape} are {INTERVAL}; the dotted line is undefended CLIP on clean images"


def _methods_figure(view: View, methods: list[str], *, shaded: bool = False) -> Figure:
    figure = style.new_figure(height=plot.room_for(methods, 3.0))
    axes = style.new_axes(figure)
    ends = _draw(view, axes, methods, MEAN)
    _finish(view, axes, methods)
    if shaded:
        right = axes.get_xlim()[1]
        axes.axvspan(255 * CALIBRATED, right, color=style.INK, alpha=0.07, linewidth=0, zorder=0)
        plot.note(axes, "beyond calibration", (right, 1.0), ("data", "axes fraction"), (-3, -2), ha="right", va="top")
    plot.label_ends(axes, ends)
    return figure


def _mapping_figure(view: View, group: dict[str, str]) -> Figure:
    figure = style.new_figure(height=3.0)
    axes = style.new_axes(figure)
    ends = []
    for (kind, label), marker in zip(group.items(), "osD^", strict=False):
        rows, colour = view.rows(label), style.MAPPINGS.get(kind, style.INK)
        plot.accuracy_line(axes, rows, style.Look(colour, marker).line)
        if rows:
            ends.append(plot.End(MAPPING_NAMES.get(kind, kind), 255 * rows[-1].eps, 100 * rows[-1].accuracy, colour))
    _finish(view, axes, list(group.values()))
    plot.label_ends(axes, ends)
    return figure


def _draw(view: View, axes: Axes, methods: list[str], dataset: str) -> list[plot.End]:
    ends = []
    for label in methods:
        rows, look = view.rows(label, dataset), view.looks[label]
        plot.accuracy_line(axes, rows, look.line, bars=len(methods) > plot.BANDS)
        if rows:
            ends.append(plot.End(label, 255 * rows[-1].eps, 100 * rows[-1].accuracy, look.colour, look.dashes))
    return ends


def _finish(view: View, axes: Axes, labels: list[str]) -> None:
    plot.budget_axis(axes, view.budgets)
    ceiling = view.ceiling()
    plot.percent_axis(axes, [ceiling, *(row.high for label in labels for row in view.rows(label))])
    plot.ceiling_line(axes, ceiling)


def _sets_figure(view: View, methods: list[str]) -> Figure:
    from matplotlib.lines import Line2D

    def draw(axes: Axes, name: str) -> None:
        _draw(view, axes, methods, name)
        plot.ceiling_line(axes, view.ceiling(name), "")
        plot.budget_axis(axes, view.budgets, name="")
        axes.set_ylim(0, 100)

    figure = plot.panels(view.sets, draw, above=0.17 * -(-len(methods) // 3))
    figure.supxlabel("attack budget ε in 1/255, square-root scale", fontsize=style.TEXT, color=style.INK)
    figure.supylabel("accuracy in %", fontsize=style.TEXT, color=style.INK)
    style.legend(figure, [Line2D([], [], **view.looks[label].line) for label in methods], methods, columns=3)
    return figure


# ---------------------------------------------------------------------- cost


def against_cost(view: View) -> list[FigureOf]:
    """Accuracy, clean and under attack, against work per image (not in the paper)."""
    view.require()
    methods = [label for label in methods_of(view) if any(math.isfinite(_work(view, label, c)) for c in (True, False))]
    if not methods:
        raise MissingDataError("it did not count encoder passes; run the evaluation again")
    what = "accuracy against encoder forward passes per image, a backward pass counted as two: clean images above, the "
    what += "mean over budgets below"
    band = f"Bars are {INTERVAL}, under attack the mean interval over budgets"
    make = partial(_cost_figure, view, methods)
    return [view.figure("cost", "Cost against accuracy", what, "beyond the paper", make, band=band)]


def _work(view: View, label: str, clean: bool) -> float:
    rows = [row for row in view.rows(label) if (row.eps == 0) == clean]
    return metrics.mean_of_measured([row.passes + BACKWARD * float(np.nan_to_num(row.backward_passes)) for row in rows])


def _cost_figure(view: View, methods: list[str]) -> Figure:
    figure = style.new_figure(height=4.6 if len(methods) <= 8 else 6.2)
    upper = style.new_axes(figure, 2, 1, 1)
    lower = style.new_axes(figure, 2, 1, 2, sharex=upper)
    drawn = [(axes, *_cost_points(view, axes, methods, clean)) for axes, clean in ((upper, True), (lower, False))]
    works = [x for _, points, _ in drawn for x, _, _ in points if math.isfinite(x)]
    _work_axis(lower, min(works) / 1.4, max(works) * 1.6)
    upper.tick_params(labelbottom=False)
    style.name_axes(upper, title="clean images")
    work = "encoder passes, forward + 2 × backward, per image, log scale"
    style.name_axes(lower, work, title="under attack, mean over budgets")
    figure.supylabel("accuracy in %", fontsize=style.TEXT, color=style.INK)
    for axes, points, bars in drawn:
        plot.label_points(axes, points, bars)
    return figure


def _cost_points(
    view: View, axes: Axes, methods: list[str], clean: bool
) -> tuple[list[tuple[float, float, str]], list[tuple[float, float]]]:
    """Draw one marker per method; returns the points to label, and points on the bars for labels to avoid."""
    points, bars, reached = [], [], []
    for label in methods:
        rows = [row for row in view.rows(label) if (row.eps == 0) == clean]
        low, middle, high = (
            100 * metrics.mean_of_measured([getattr(row, name) for row in rows]) for name in ("low", "accuracy", "high")
        )
        x, look = _work(view, label, clean), view.looks[label]
        axes.vlines(x, low, high, color=look.colour, linewidth=1.0, alpha=0.7)
        axes.plot([x], [middle], **{**look.line, "markersize": 6, "linestyle": "none"})
        points.append((x, middle, label))
        bars += [(x, float(height)) for height in np.linspace(low, high, 12) if math.isfinite(x * height)]
        reached += [bound for bound in (low, high) if math.isfinite(bound)]
    # The axis need not start at zero, but markers at zero must not be cut.
    axes.set_ylim(max(min(reached, default=0.0) - 12, -4.0), min(max(reached, default=100.0) + 8, 104.0))
    return points, bars


def _work_axis(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
