"""Label leakage: what accuracies owe to images that were never CLIP's to lose (appendix of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from react_clip.evaluation import metrics
from react_clip.evaluation.metrics import Estimate
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.labels import End, label_ends
from react_clip.report.figures.parameters import NAMES, SCALE
from react_clip.report.figures.parts import budget_name, ceiling_line, interval_line, percent_axis
from react_clip.report.figures.sweeps import Grid
from react_clip.report.style import INK, SMALL, TEXT, budget_colour, budget_line, name_axes, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHERE = "Appendix, label leakage"
METHOD_NAMES = {"aom": "AOM", "defend-clip": "Defend-CLIP", "react": "ReACT"}
NEEDS = "recipes/leakage.yaml attacks all (`scoring: attack_all`), over a grid of scale and alpha"

Measure = Callable[[View, str, float], Estimate | None]


@dataclass(frozen=True)
class Kind:
    """One of the three things that are measured over a grid."""

    file: str
    title: str
    axis: str
    measure: Measure
    share: bool


def leaked(view: View, label: str, eps: float) -> Estimate | None:
    """Images that were wrong clean and are right after attack and defence, over all sets; a count has no interval."""
    row = view.at(label, eps)
    return None if row is None else Estimate(row.leakage, math.nan, math.nan)


def reported(view: View, label: str, eps: float) -> Estimate | None:
    """Accuracy as it is reported where every image is attacked."""
    row = view.at(label, eps)
    return None if row is None else Estimate(row.accuracy, row.low, row.high)


def genuine(view: View, label: str, eps: float) -> Estimate | None:
    """Accuracy without the leaked answers: set by set, then the mean, as the reported one is."""
    rows = [row for name in view.sets if (row := view.at(label, eps, name)) is not None]
    if not rows:
        return None
    shares = [min(max(row.accuracy - row.leakage_share, 0.0), 1.0) for row in rows]
    return metrics.mean_over_sets(shares, [row.n for row in rows])


COUNTS = Kind("leakage-counts", "Leakage counts", "leaked images", leaked, False)
REPORTED = Kind("leakage-reported", "Accuracy under leakage", "accuracy in %, leaked answers counted", reported, True)
GENUINE = Kind(
    "leakage-corrected", "Accuracy without leakage", "accuracy in %, leaked answers not counted", genuine, True
)


def grids_of(view: View) -> list[Grid]:
    """The grids over anchor scale and extrapolation strength, where every image was attacked."""
    view.require()
    if view.result.scoring != "attack_all":
        raise MissingDataError(f"only what undefended CLIP gets right was attacked, so nothing can leak; {NEEDS}")
    found = [grid for grid in view.grids if set(grid.fields) == {SCALE, "alpha"}]
    if not found:
        raise MissingDataError(f"no defences differ in anchor scale and alpha; {NEEDS}")
    return found


def over_grid(view: View) -> list[FigureOf]:
    """Every measure against alpha at each budget's best scale, and against the scale at the largest alpha."""
    grids = grids_of(view)
    return [_against(view, grids, field, kind) for kind in (COUNTS, REPORTED, GENUINE) for field in ("alpha", SCALE)]


def _against(view: View, grids: Sequence[Grid], field: str, kind: Kind) -> FigureOf:
    name = "alpha" if field == "alpha" else "sigma"
    place = "at each budget's best anchor scale (highest accuracy without leaked answers, at any α)"
    if field == SCALE:
        place = f"at α = {max(value for grid in grids for value in grid.values('alpha')):g}"
    over = "summed over data sets" if not kind.share else "the mean over data sets; the dotted line is CLIP clean"
    return FigureOf(
        f"{kind.file}-{name}",
        f"{kind.title} against {'α' if name == 'alpha' else 'the anchor scale'}",
        view.caption(
            f"{kind.axis} against {NAMES[field].split(' (')[0]}, {place}, {over}",
            f"Bands are {INTERVAL}" if kind.share else "Counts are means over draws of the noise",
        ),
        WHERE,
        lambda: _figure(view, grids, field, kind),
    )


def best_scale(view: View, grid: Grid, eps: float) -> float:
    """The anchor scale with the highest accuracy that owes nothing to leakage, whatever the alpha."""

    def accuracy(cell: tuple[float, float]) -> float:
        found = genuine(view, grid.cells[cell], eps)
        return -1.0 if found is None or math.isnan(found.value) else found.value

    return max(sorted(grid.cells), key=accuracy)[grid.fields.index(SCALE)]


def _figure(view: View, grids: Sequence[Grid], field: str, kind: Kind) -> Figure:
    figure = new_figure(height=0.5 + 2.1 * len(grids))
    drawn: list[tuple[Axes, list[End]]] = []
    highest = [0.0]
    for place, grid in enumerate(grids):
        axes = new_axes(figure, len(grids), 1, place + 1, sharex=drawn[0][0] if drawn else None)
        ends = []
        for eps in view.budgets:
            scale = best_scale(view, grid, eps)
            points = grid.along("alpha", scale) if field == "alpha" else grid.along(SCALE, grid.values("alpha")[-1])
            found = [(x, value) for x, label in points if (value := kind.measure(view, label, eps)) is not None]
            if found:
                highest += [max(value.value, value.high if kind.share else 0.0) for _, value in found]
                name = budget_name(eps) + (f", σ = {scale:g}" if field == "alpha" else "")
                ends.append(_line(axes, found, eps, name, 100.0 if kind.share else 1.0))
        axes.margins(x=0.02)
        name_axes(axes, title=METHOD_NAMES.get(grid.kind, grid.kind))
        axes.tick_params(labelbottom=place == len(grids) - 1)
        drawn.append((axes, ends))
    name_axes(drawn[-1][0], NAMES[field])
    figure.supylabel(kind.axis, fontsize=TEXT, color=INK)
    ceiling = view.ceiling() if kind.share else math.nan
    for axes, ends in drawn:
        if kind.share:
            percent_axis(axes, [*highest, ceiling], name="")
            # Curves fill the panel, so the line is named above it.
            ceiling_line(axes, ceiling, "")
            axes.set_title(f"dotted: CLIP, clean {100 * ceiling:.1f} %", loc="right", fontsize=SMALL, color=INK)
        else:
            axes.set_ylim(0, max(1.08 * max(highest), 1.0))
        label_ends(axes, ends)
    return figure


def _line(axes: Axes, found: Sequence[tuple[float, Estimate]], eps: float, name: str, unit: float) -> End:
    x = [value for value, _ in found]
    low, middle, high = ([unit * getattr(item, part) for _, item in found] for part in ("low", "value", "high"))
    interval_line(axes, x, low, middle, high, budget_line(eps))
    return End(name, x[-1], middle[-1], budget_colour(eps))
