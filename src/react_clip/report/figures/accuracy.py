"""Accuracy against the budget (all methods, per data set, per mapping) and against cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from react_clip.calibration import BUDGETS
from react_clip.evaluation.recipe import MEAN
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import Draft, MissingDataError, View
from react_clip.report.figures.sweeps import MAPPING_NAMES, methods_of, sweeps_of

CALIBRATED = round(255 * max(BUDGETS), 6)
"""The largest budget that mappings are fitted to, in 255ths."""
BACKWARD = 2.0
"""Forward passes that a backward pass counts as."""


def across_budgets(view: View, *, beyond: bool = False) -> list[Draft]:
    """All methods against the budget (Figure 1); ``beyond`` the budgets that the mapping was fitted to, Figure 9."""
    if beyond and view.budgets[-1] <= CALIBRATED:
        raise MissingDataError(
            "no budget exceeds the calibrated 16/255; recipes/table1-extended.yaml has 24/255 and 32/255"
        )
    if not beyond and view.budgets[0] > CALIBRATED:
        raise MissingDataError(
            "every budget is beyond the calibrated range, see Figure 9; recipes/table1.yaml has the others"
        )
    methods = methods_of(view)

    def make() -> Figure:
        figure, axes = plot.chart(plot.room_for(methods, 3.0))
        _draw_methods(view, axes, methods, MEAN)
        _name_and_limit(view, axes, methods)
        if beyond:
            right = axes.get_xlim()[1]
            axes.axvspan(CALIBRATED, right, color=style.INK, alpha=0.07, linewidth=0, zorder=0)
            corner = {"ha": "right", "va": "top"}
            plot.note(axes, "beyond calibration", (right, 1.0), ("data", "axes fraction"), (-3, -2), **corner)
        plot.label_ends(figure)
        return figure

    return [Draft(make, _shape(methods))]


def per_set(view: View) -> list[Draft]:
    """Figure 1 for every data set (tables in the paper's appendix)."""
    methods = methods_of(view)

    def draw(axes: Axes, number: int) -> None:
        _draw_methods(view, axes, methods, view.sets[number])
        plot.ceiling_line(axes, view.ceiling(view.sets[number]), "")
        plot.budget_axis(axes, view.budgets)
        axes.set_ylim(0, 100)

    def make() -> Figure:
        figure = plot.panels(view.sets, draw, columns=3, above=0.17 * math.ceil(len(methods) / 3))
        plot.name_figure(figure, plot.BUDGETS_ROOT, "accuracy in %")
        style.legend(figure, [Line2D([], [], **view.lines[label]) for label in methods], methods, columns=3)
        return figure

    return [Draft(make, _shape(methods))]


def per_mapping(view: View) -> list[Draft]:
    """One line per mapping, everything else the same (Figure 8)."""
    groups = [sweep.cells for sweep in sweeps_of(view.settings) if sweep.fields == ("mapping.kind",)]
    if not groups:
        raise MissingDataError(
            "no defences differ in the kind of their mapping alone; recipes/mappings.yaml compares three kinds"
        )
    return [Draft(partial(_mapping_figure, view, cells)) for cells in groups]


def _mapping_figure(view: View, cells: Mapping[tuple[Any, ...], str]) -> Figure:
    figure, axes = plot.chart(3.0)
    for ((kind,), label), marker in zip(cells.items(), "osD^", strict=False):
        line = style.line_of(style.MAPPINGS.get(kind, style.INK), marker)
        plot.interval_line(axes, view.rows(label), line, label=MAPPING_NAMES.get(kind, kind))
    _name_and_limit(view, axes, cells.values())
    plot.label_ends(figure)
    return figure


def _shape(methods: list[str]) -> dict[str, str]:
    return {"Shape": "Bands" if len(methods) <= plot.BANDS else "Bars"}


def _draw_methods(view: View, axes: Axes, methods: list[str], dataset: str) -> None:
    for label in methods:
        line, bars = view.lines[label], len(methods) > plot.BANDS
        plot.interval_line(axes, view.rows(label, dataset), line, label=label, bars=bars)


def _name_and_limit(view: View, axes: Axes, labels: Iterable[str]) -> None:
    plot.budget_axis(axes, view.budgets, name=plot.BUDGETS_ROOT)
    ceiling = view.ceiling()
    plot.percent_axis(axes, [ceiling, *(high for label in labels for high in view.rows(label)["high"])])
    plot.ceiling_line(axes, ceiling)


# ---------------------------------------------------------------------- cost


def against_cost(view: View) -> list[Draft]:
    """Accuracy, clean and under attack, against work per image (not in the paper)."""
    numbers = view.numbers[(view.numbers["dataset"] == MEAN) & view.numbers["defense"].isin(methods_of(view))]
    work = numbers["passes"] + BACKWARD * numbers["backward_passes"].astype(float).fillna(0.0)
    numbers = numbers.assign(work=work.astype(float), clean=numbers["eps"] == 0)
    costs = numbers.groupby(["clean", "defense"], sort=False)[["work", "low", "accuracy", "high"]].mean()
    if not costs["work"].notna().any():
        raise MissingDataError("it did not count encoder passes; run the evaluation again")
    return [Draft(partial(_cost_figure, view, costs))]


def _cost_figure(view: View, costs: pd.DataFrame) -> Figure:
    """``costs``: mean work, accuracy and interval, by ``clean`` (whether images are clean) and label."""
    parts = [costs.xs(clean, level="clean") for clean in (True, False)]

    def draw(axes: Axes, number: int) -> None:
        for label, x, low, middle, high in parts[number].itertuples():
            line = view.lines[label]
            axes.vlines(x, low, high, color=line["color"], linewidth=1.0, alpha=0.7)
            axes.plot([x], [middle], **{**line, "markersize": 6, "linestyle": "none"})
        lowest, highest = parts[number]["low"].min(), parts[number]["high"].max()
        if math.isfinite(lowest):
            # The axis need not start at zero, but markers at zero must not be cut.
            axes.set_ylim(max(lowest - 12, -4.0), min(highest + 8, 104.0))

    titles = ["clean images", "under attack, mean over budgets"]
    figure = plot.panels(titles, draw, height=2.0 if len(costs) <= 16 else 2.8, sharey="none")
    lower = figure.axes[-1]
    lower.set_xscale("log")
    lower.set_xlim(costs["work"].min() / 1.4, costs["work"].max() * 1.6)
    lower.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    lower.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    lower.xaxis.set_minor_formatter(NullFormatter())
    plot.name_figure(figure, "encoder passes, forward + 2 × backward, per image, log scale", "accuracy in %")
    for axes, part in zip(figure.axes, parts, strict=True):
        known = part.dropna()
        bars = [(x, y) for _, x, low, _, high in known.itertuples() for y in np.linspace(low, high, 12)]
        plot.label_points(axes, list(zip(known["work"], known["accuracy"], known.index, strict=True)), bars)
    return figure
