"""What a defence costs beside what it gains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from react_clip.evaluation import metrics
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.labels import label_points
from react_clip.report.style import INK, TEXT, name_axes, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKWARD = 2.0
"""A backward pass counts as two forward ones."""


def against_accuracy(view: View) -> list[FigureOf]:
    """Work per image against accuracy, clean and under attack (beyond the paper)."""
    view.require()
    methods = view.methods
    timed = view.timings is not None
    known = [label for label in methods if any(math.isfinite(_work(view, label, clean)) for clean in (True, False))]
    if not known:
        what = "no time is given for any of its defences" if timed else "it did not count encoder passes"
        raise MissingDataError(f"{what}; run the evaluation again, or give milliseconds per image by label")
    unit = "milliseconds per image" if timed else "encoder forward passes per image, a backward pass counted as two"
    what = f"accuracy against work in {unit}: clean images above, the mean over budgets below"
    return [
        FigureOf(
            "cost",
            "Cost against accuracy",
            view.caption(what, f"Bars are {INTERVAL}, under attack the mean interval over budgets"),
            "beyond the paper",
            lambda: _figure(view, known),
        )
    ]


def _work(view: View, label: str, clean: bool) -> float:
    if view.timings is not None:
        return view.timings.get(label, math.nan)
    rows = [row for row in view.rows(label) if (row.eps == 0) == clean]
    backward = [0.0 if math.isnan(row.backward_passes) else row.backward_passes for row in rows]
    return metrics.mean_of_measured([row.passes + BACKWARD * back for row, back in zip(rows, backward, strict=True)])


def _figure(view: View, methods: list[str]) -> Figure:
    figure = new_figure(height=4.6 if len(methods) <= 8 else 6.2)
    upper = new_axes(figure, 2, 1, 1)
    lower = new_axes(figure, 2, 1, 2, sharex=upper)
    named = [(axes, *_draw(view, axes, methods, clean)) for axes, clean in ((upper, True), (lower, False))]
    works = [x for _, points, _ in named for x, _, _ in points if math.isfinite(x)]
    _work_axis(lower, min(works) / 1.4, max(works) * 1.6)
    upper.tick_params(labelbottom=False)
    name_axes(upper, title="clean images")
    unit = "milliseconds" if view.timings is not None else "encoder passes, forward + 2 × backward,"
    name_axes(lower, f"{unit} per image, log scale", title="under attack, mean over budgets")
    figure.supylabel("accuracy in %", fontsize=TEXT, color=INK)
    for axes, points, bars in named:
        label_points(axes, points, bars)
    return figure


def _draw(
    view: View, axes: Axes, methods: list[str], clean: bool
) -> tuple[list[tuple[float, float, str]], list[tuple[float, float]]]:
    """One marker a method; returns what to label, and where the bars are."""
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
    # Points need no zero; what is at zero stays whole.
    axes.set_ylim(max(min(reached, default=0.0) - 12, -4.0), min(max(reached, default=100.0) + 8, 104.0))
    return points, bars


def _work_axis(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
