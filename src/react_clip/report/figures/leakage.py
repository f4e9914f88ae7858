"""Label leakage (appendix of the paper): right answers on images that undefended CLIP gets wrong when clean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from react_clip.evaluation import metrics
from react_clip.evaluation.grid import value_at
from react_clip.evaluation.metrics import Estimate
from react_clip.evaluation.recipe import CLEAN
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.sweeps import NAMES, SCALE, Grid, grids_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED = {SCALE: 0.1, "alpha": 1.2}
_PAPER = "Appendix, label leakage"
_NEEDS = "recipes/leakage.yaml attacks all (`scoring: attack_all`), over a grid of scale and alpha"
_NO_ATTACK = style.COLOURS["mac"]
_BARS: dict[str, dict[str, Any]] = {
    "as reported": {"alpha": 0.45, "hatch": "////", "edgecolor": style.PAPER},
    "leaked answers not counted": {},
}


def leaked(view: View, label: str, eps: float) -> Estimate | None:
    """Images that were wrong clean and are right after attack and defence, over all sets; a count has no interval."""
    row = view.at(label, eps)
    return None if row is None else Estimate(row.leakage, math.nan, math.nan)


def reported(view: View, label: str, eps: float) -> Estimate | None:
    """Accuracy as it is reported where every image is attacked."""
    row = view.at(label, eps)
    return None if row is None else Estimate(row.accuracy, row.low, row.high)


def corrected(view: View, label: str, eps: float) -> Estimate | None:
    """Accuracy without the leaked answers, the mean over sets."""
    rows = [row for name in view.sets if (row := view.at(label, eps, name)) is not None]
    if not rows:
        return None
    shares = [min(max(row.accuracy - row.leakage_share, 0.0), 1.0) for row in rows]
    return metrics.mean_over_sets(shares, [row.n for row in rows])


def flipped(view: View, label: str) -> float:
    """Images that are wrong clean and that the defence gets right without an attack, the mean over draws."""
    rows = view.of(label)
    rows = rows[rows["attack"] == CLEAN.label]
    wrong = rows["clean_prediction"] != rows["label"]
    return float((wrong & rows["correct"]).sum()) / rows["draw"].nunique() if len(rows) else math.nan


@dataclass(frozen=True)
class _Measure:
    """One of the quantities that are drawn over a grid."""

    name: str
    title: str
    axis: str
    of: Callable[[View, str, float], Estimate | None]
    share: bool = True
    """Whether it is a share of images in [0, 1] rather than a count."""


_MEASURES = (
    _Measure("leakage-counts", "Leakage counts", "leaked images", leaked, share=False),
    _Measure("leakage-reported", "Accuracy under leakage", "accuracy in %, leaked answers counted", reported),
    _Measure("leakage-corrected", "Accuracy without leakage", "accuracy in %, leaked answers not counted", corrected),
)


def leakage_grids(view: View) -> list[Grid]:
    """The grids over anchor scale and extrapolation strength, where every image was attacked."""
    _require_attack_all(view)
    found = [grid for grid in grids_of(view.settings) if set(grid.fields) == {SCALE, "alpha"}]
    if not found:
        raise MissingDataError(f"no defences differ in anchor scale and alpha; {_NEEDS}")
    return found


def _require_attack_all(view: View) -> None:
    view.require()
    if view.result.scoring != "attack_all":
        raise MissingDataError(f"only what undefended CLIP gets right was attacked, so nothing can leak; {_NEEDS}")


def over_grid(view: View) -> list[FigureOf]:
    """Every measure against alpha at each budget's best scale, and against the scale at the largest alpha."""
    grids = leakage_grids(view)
    return [_against(view, grids, field, measure) for measure in _MEASURES for field in ("alpha", SCALE)]


def published(view: View) -> list[FigureOf]:
    """AOM and Defend-CLIP with the published constants, with and without leaked answers."""
    _require_attack_all(view)
    found = [label for label, entry in view.settings.items() if _is_published(entry)]
    if not found:
        raise MissingDataError(
            "no aom or defend-clip has the published anchor scale 0.1 and alpha 1.2; add one to the recipe"
        )
    what = "accuracy of the published configuration (σ = 0.1, α = 1.2), as reported where every image is attacked, and "
    what += "with leaked answers not counted; the number is the difference in points"
    band = f"Whiskers of the bars are {INTERVAL}; the dotted line is undefended CLIP on clean images"
    title = "The published configuration with and without leakage"
    make = partial(_published_figure, view, found)
    return [view.figure("leakage-published", title, what, _PAPER, make, band=band)]


def control(view: View) -> list[FigureOf]:
    """Wrong images that the defence gets right, with and without an attack before it."""
    grids = leakage_grids(view)
    _ = view.images
    what = (
        "images that undefended CLIP gets wrong when clean and the defence gets right, summed over data sets, at the "
    )
    what += "largest α: dashed under attack, solid without an attack"
    title, make = "Leakage with and without the attack", partial(_control_figure, view, grids)
    band = "Counts are means over draws of the noise"
    return [view.figure("leakage-control", title, what, _PAPER, make, band=band)]


def best_scale(view: View, grid: Grid, eps: float) -> float:
    """The anchor scale of the cell with the highest accuracy without leaked answers; of equals, the smallest alpha."""
    scale, alpha = (grid.fields.index(field) for field in (SCALE, "alpha"))

    def accuracy(cell: tuple[float, float]) -> float:
        found = corrected(view, grid.cells[cell], eps)
        return -1.0 if found is None or math.isnan(found.value) else found.value

    return max(sorted(grid.cells, key=lambda cell: (cell[alpha], cell[scale])), key=accuracy)[scale]


def _against(view: View, grids: Sequence[Grid], field: str, measure: _Measure) -> FigureOf:
    name, words = ("alpha", "α") if field == "alpha" else ("sigma", "the anchor scale")
    where = "at each budget's best anchor scale (highest accuracy without leaked answers, at any α)"
    if field == SCALE:
        where = f"at α = {max(value for grid in grids for value in grid.values('alpha')):g}"
    over = "the mean over data sets; the dotted line is CLIP clean" if measure.share else "summed over data sets"
    what = f"{measure.axis} against {NAMES[field].split(' (')[0]}, {where}, {over}"
    band = f"Bands are {INTERVAL}" if measure.share else "Counts are means over draws of the noise"
    make = partial(_grid_figure, view, grids, field, measure)
    return view.figure(f"{measure.name}-{name}", f"{measure.title} against {words}", what, _PAPER, make, band=band)


def _is_published(entry: dict[str, Any]) -> bool:
    known = entry.get("kind") in ("aom", "defend-clip")
    return known and all(value_at(entry, name) == value for name, value in PUBLISHED.items())


def _grid_panels(
    grids: Sequence[Grid], field: str, ylabel: str, draw: Callable[[Axes, Grid], list[plot.End]]
) -> tuple[Figure, list[tuple[Axes, list[plot.End]]]]:
    """One panel per grid; returns the figure, and each panel with the ends of its lines still to be labelled."""
    figure = style.new_figure(height=0.5 + 2.1 * len(grids))
    drawn: list[tuple[Axes, list[plot.End]]] = []
    for number, grid in enumerate(grids):
        axes = style.new_axes(figure, len(grids), 1, number + 1, sharex=drawn[0][0] if drawn else None)
        drawn.append((axes, draw(axes, grid)))
        axes.margins(x=0.02)
        style.name_axes(axes, title=style.label_of(grid.kind))
        axes.tick_params(labelbottom=number == len(grids) - 1)
    style.name_axes(drawn[-1][0], NAMES[field])
    figure.supylabel(ylabel, fontsize=style.TEXT, color=style.INK)
    return figure, drawn


def _grid_figure(view: View, grids: Sequence[Grid], field: str, measure: _Measure) -> Figure:
    highest = [0.0]

    def draw(axes: Axes, grid: Grid) -> list[plot.End]:
        ends = []
        for eps in view.budgets:
            scale = best_scale(view, grid, eps)
            points = grid.along("alpha", scale) if field == "alpha" else grid.along(SCALE, grid.values("alpha")[-1])
            found = [(x, value) for x, label in points if (value := measure.of(view, label, eps)) is not None]
            if found:
                highest.extend(max(value.value, value.high if measure.share else 0.0) for _, value in found)
                name = plot.budget_name(eps) + (f", σ = {scale:g}" if field == "alpha" else "")
                ends.append(_line(axes, found, eps, name, 100.0 if measure.share else 1.0))
        return ends

    figure, drawn = _grid_panels(grids, field, measure.axis, draw)
    ceiling = view.ceiling() if measure.share else math.nan
    for axes, ends in drawn:
        if measure.share:
            plot.percent_axis(axes, [*highest, ceiling], name="")
            # Curves fill the panel, so the dotted line is named above it.
            plot.ceiling_line(axes, ceiling, "")
            axes.set_title(
                f"dotted: CLIP, clean {100 * ceiling:.1f} %", loc="right", fontsize=style.SMALL, color=style.INK
            )
        else:
            axes.set_ylim(0, max(1.08 * max(highest), 1.0))
        plot.label_ends(axes, ends)
    return figure


def _line(axes: Axes, found: Sequence[tuple[float, Estimate]], eps: float, name: str, unit: float) -> plot.End:
    x = [value for value, _ in found]
    low, middle, high = ([unit * getattr(item, part) for _, item in found] for part in ("low", "value", "high"))
    plot.interval_line(axes, x, low, middle, high, style.budget_line(eps))
    return plot.End(name, x[-1], middle[-1], style.budget_colour(eps))


def _control_figure(view: View, grids: Sequence[Grid]) -> Figure:
    def draw(axes: Axes, grid: Grid) -> list[plot.End]:
        points = grid.along(SCALE, grid.values("alpha")[-1])
        ends, x = [], [value for value, _ in points]
        for eps in view.budgets:
            counts = [found.value if (found := leaked(view, label, eps)) else math.nan for _, label in points]
            colour = style.budget_colour(eps)
            axes.plot(x, counts, color=colour, linewidth=1.3, linestyle=style.DASHED, marker="o", markersize=3)
            ends.append(plot.End(plot.budget_name(eps), x[-1], counts[-1], colour, style.DASHED))
        counts = [flipped(view, label) for _, label in points]
        axes.plot(x, counts, color=_NO_ATTACK, linewidth=1.8, marker="D", markersize=3.4)
        axes.set_ylim(bottom=0)
        return [*ends, plot.End("no attack", x[-1], counts[-1], _NO_ATTACK)]

    figure, drawn = _grid_panels(grids, SCALE, "wrong images that come out right", draw)
    for axes, ends in drawn:
        plot.label_ends(axes, ends)
    return figure


def _published_figure(view: View, labels: Sequence[str]) -> Figure:
    from matplotlib.patches import Patch

    figure = style.new_figure(height=0.7 + 1.8 * len(labels))
    ceiling = view.ceiling()
    for number, label in enumerate(labels):
        axes = style.new_axes(figure, len(labels), 1, number + 1)
        highest = [ceiling]
        for at, eps in enumerate(view.budgets):
            both = reported(view, label, eps), corrected(view, label, eps)
            if both[0] is not None and both[1] is not None:
                _bar_pair(axes, at, both[0], both[1], view.looks[label].colour)
                highest.append(both[0].high)
        axes.set_xticks(range(len(view.budgets)), [plot.budget_name(eps) for eps in view.budgets])
        plot.percent_axis(axes, highest, name="")
        axes.set_ylim(top=min(100.0, axes.get_ylim()[1] + 8))
        plot.ceiling_line(axes, ceiling)
        style.name_axes(axes, title=style.label_of(view.kinds[label]))
    style.name_axes(axes, "attack budget ε")
    figure.supylabel("accuracy in %", fontsize=style.TEXT, color=style.INK)
    keys = [Patch(facecolor=style.COLOURS["undefended"], linewidth=0, **look) for look in _BARS.values()]
    style.legend(figure, keys, list(_BARS), columns=2)
    return figure


def _bar_pair(axes: Axes, at: int, first: Estimate, second: Estimate, colour: str) -> None:
    """Two bars side by side, as reported and without leaked answers, and their difference in points."""
    for step, (item, look) in enumerate(zip((first, second), _BARS.values(), strict=True)):
        x = at + (step - 0.5) * 0.36
        axes.bar([x], [100 * item.value], width=0.34, linewidth=0, facecolor=colour, **look)
        axes.vlines(x, 100 * item.low, 100 * item.high, color=style.INK, linewidth=0.9)
    gap = f"−{100 * (first.value - second.value):.1f}"
    plot.note(axes, gap, (at + 0.18, 100 * second.high), "data", (0, 2), ha="center")
