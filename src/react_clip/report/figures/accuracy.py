"""Accuracy against the budget: all methods, beyond the calibrated range, per data set, and per mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from react_clip.calibration import BUDGETS
from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures import sweeps
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.labels import End, label_ends, room_for
from react_clip.report.figures.parts import BANDS, accuracy_line, budget_axis, ceiling_line, panels, percent_axis
from react_clip.report.style import COLOURS, INK, SMALL, Look, legend, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CALIBRATED = max(BUDGETS)
"""The largest budget that mappings are fitted to."""
MAPPING_NAMES = {"linear": "linear", "logistic": "logistic", "power_law": "power law", "constant": "fixed scale"}


def across_budgets(view: View) -> list[FigureOf]:
    """All methods against the budget (the paper's Figure 1)."""
    if view.budgets[0] > CALIBRATED * 1.001:
        raise MissingDataError(
            "every budget is beyond the calibrated range, see Figure 9; recipes/table1.yaml has the others"
        )
    methods = view.methods
    what = "accuracy of each defence from clean images to the largest budget, the mean over data sets"
    return [
        FigureOf(
            "accuracy",
            "Accuracy across attack strengths",
            view.caption(what, _bands(len(methods))),
            "Figure 1",
            lambda: _methods_figure(view, methods),
        )
    ]


def beyond_range(view: View) -> list[FigureOf]:
    """The same where budgets exceed those that the mapping was fitted to (Figure 9)."""
    if view.budgets[-1] <= CALIBRATED * 1.001:
        raise MissingDataError(
            "no budget exceeds the calibrated 16/255; recipes/table1-extended.yaml has 24/255 and 32/255"
        )
    methods = view.methods
    what = "accuracy of each defence; shaded are budgets beyond the 16/255 that the mapping was calibrated on"
    return [
        FigureOf(
            "beyond",
            "Robustness beyond the calibrated range",
            view.caption(what, _bands(len(methods))),
            "Figure 9",
            lambda: _methods_figure(view, methods, shaded=True),
        )
    ]


def per_set(view: View) -> list[FigureOf]:
    """Figure 1 for every data set (the paper has it as tables of the appendix)."""
    view.require(sets=2)
    methods = view.methods
    return [
        FigureOf(
            "accuracy-per-set",
            "Accuracy across attack strengths, set by set",
            view.caption(
                "accuracy of each defence on each data set; the dotted line is CLIP on clean images", INTERVAL
            ),
            "Appendix, per-dataset breakdown of Table 1",
            lambda: _sets_figure(view, methods),
        )
    ]


def per_mapping(view: View) -> list[FigureOf]:
    """One line a mapping, everything else the same (Figure 8)."""
    view.require()
    groups = sweeps.by_mapping(view.settings)
    if not groups:
        raise MissingDataError(
            "no defences differ in the kind of their mapping alone; recipes/mappings.yaml compares three kinds"
        )
    what = "accuracy with each correction-strength mapping, all else equal, the mean over data sets"
    return [
        FigureOf(
            "mappings" if number == 0 else f"mappings-{number + 1}",
            "Behaviour across correction-strength mappings",
            view.caption(what, f"Bands are {INTERVAL}"),
            "Figure 8",
            lambda group=group: _mapping_figure(view, group),  # type: ignore[misc]
        )
        for number, group in enumerate(groups)
    ]


def _bands(lines: int) -> str:
    return f"{'Bands' if lines <= BANDS else 'Bars'} are {INTERVAL}; the dotted line is undefended CLIP on clean images"


def _methods_figure(view: View, methods: list[str], *, shaded: bool = False) -> Figure:
    figure = new_figure(height=room_for(methods, 3.0))
    axes = new_axes(figure)
    ends = _draw(view, axes, methods, MEAN)
    budget_axis(axes, view.budgets)
    rows = [row for label in methods for row in view.rows(label)]
    ceiling = view.ceiling()
    percent_axis(axes, [*(row.high for row in rows), ceiling])
    ceiling_line(axes, ceiling)
    if shaded:
        right = axes.get_xlim()[1]
        axes.axvspan(255 * CALIBRATED, right, color=INK, alpha=0.07, linewidth=0, zorder=0)
        axes.annotate(
            "beyond calibration",
            xy=(right, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-3, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=SMALL,
            color=INK,
        )
    label_ends(axes, ends)
    return figure


def _draw(view: View, axes: Axes, methods: list[str], dataset: str) -> list[End]:
    ends = []
    for label in methods:
        rows, look = view.rows(label, dataset), view.looks[label]
        accuracy_line(axes, rows, look.line, bars=len(methods) > BANDS)
        if rows:
            ends.append(End(label, 255 * rows[-1].eps, 100 * rows[-1].accuracy, look.colour, look.dashes))
    return ends


def _sets_figure(view: View, methods: list[str]) -> Figure:
    def draw(axes: Axes, name: str) -> None:
        _draw(view, axes, methods, name)
        ceiling_line(axes, view.ceiling(name), "")
        budget_axis(axes, view.budgets, name="")
        axes.set_ylim(0, 100)

    figure = panels(view.sets, draw, above=0.17 * -(-len(methods) // 3))
    figure.supxlabel("attack budget ε in 1/255, square-root scale", fontsize=8, color=INK)
    figure.supylabel("accuracy in %", fontsize=8, color=INK)
    _method_key(figure, {label: view.looks[label] for label in methods})
    return figure


def _method_key(figure: Figure, looks: dict[str, Look]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look.line) for look in looks.values()]
    legend(figure, handles, list(looks), columns=3)


def _mapping_figure(view: View, group: dict[str, str]) -> Figure:
    figure = new_figure(height=3.0)
    axes = new_axes(figure)
    ends = []
    for (kind, label), marker in zip(group.items(), "osD^", strict=False):
        rows, colour = view.rows(label), COLOURS.get(kind, INK)
        accuracy_line(axes, rows, Look(colour, marker).line)
        if rows:
            ends.append(End(MAPPING_NAMES.get(kind, kind), 255 * rows[-1].eps, 100 * rows[-1].accuracy, colour))
    budget_axis(axes, view.budgets)
    ceiling = view.ceiling()
    percent_axis(axes, [ceiling, *(row.high for label in group.values() for row in view.rows(label))])
    ceiling_line(axes, ceiling)
    label_ends(axes, ends)
    return figure
