"""Label leakage at the published configuration, and what the correction does where there was no attack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from react_clip.evaluation.grid import value_at
from react_clip.evaluation.metrics import Estimate
from react_clip.evaluation.recipe import CLEAN
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View
from react_clip.report.figures.labels import End, label_ends
from react_clip.report.figures.leakage import METHOD_NAMES, NEEDS, WHERE, genuine, grids_of, leaked, reported
from react_clip.report.figures.parameters import NAMES, SCALE
from react_clip.report.figures.parts import budget_name, ceiling_line, percent_axis
from react_clip.report.figures.sweeps import Grid
from react_clip.report.style import (
    COLOURS,
    DASHED,
    INK,
    PAPER,
    SMALL,
    TEXT,
    budget_colour,
    legend,
    name_axes,
    new_axes,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED = {SCALE: 0.1, "alpha": 1.2}
_CONTROL = COLOURS["mac"]
_STYLES: dict[str, dict[str, Any]] = {
    "as reported": {"alpha": 0.45, "hatch": "////", "edgecolor": PAPER},
    "leaked answers not counted": {},
}


def published(view: View) -> list[FigureOf]:
    """AOM and Defend-CLIP as they are published, with and without leaked answers."""
    view.require()
    if view.result.scoring != "attack_all":
        raise MissingDataError(f"only what undefended CLIP gets right was attacked, so nothing can leak; {NEEDS}")
    found = [label for label, config in view.settings.items() if _is_published(config)]
    if not found:
        raise MissingDataError(
            "no aom or defend-clip has the published anchor scale 0.1 and alpha 1.2; add one to the recipe"
        )
    what = "accuracy of the published configuration (σ = 0.1, α = 1.2), as reported where every image is attacked, and "
    what += "with leaked answers not counted; the number is the difference in points"
    return [
        FigureOf(
            "leakage-published",
            "The published configuration with and without leakage",
            view.caption(what, f"Bars' whiskers are {INTERVAL}; the dotted line is undefended CLIP on clean images"),
            WHERE,
            lambda: _published_figure(view, found),
        )
    ]


def control(view: View) -> list[FigureOf]:
    """Wrong images that come out right with an attack before the correction, and without one."""
    grids = grids_of(view)
    _ = view.images
    what = (
        "images that undefended CLIP gets wrong clean and the defence gets right, summed over data sets, at the "
        "largest α: dashed under attack, solid with no attack at all"
    )
    return [
        FigureOf(
            "leakage-control",
            "Leakage with and without the attack",
            view.caption(what, "Counts are means over draws of the noise"),
            WHERE,
            lambda: _control_figure(view, grids),
        )
    ]


def flipped(view: View, label: str) -> float:
    """Images that are wrong clean and that the correction sets right with no attack, the mean over draws."""
    rows = view.of(label).where(attack=CLEAN.label)
    draws = len(rows.values("draw"))
    wrong = rows["clean_prediction"] != rows["label"]
    return float((wrong & rows["correct"]).sum()) / draws if draws else math.nan


def _is_published(config: dict[str, object]) -> bool:
    if config.get("kind") not in ("aom", "defend-clip"):
        return False
    return all(value_at(config, name) == value for name, value in PUBLISHED.items())


def _published_figure(view: View, labels: Sequence[str]) -> Figure:
    from matplotlib.patches import Patch

    figure = new_figure(height=0.7 + 1.8 * len(labels))
    ceiling = view.ceiling()
    for place, label in enumerate(labels):
        axes = new_axes(figure, len(labels), 1, place + 1)
        highest = [ceiling]
        for at, eps in enumerate(view.budgets):
            both = reported(view, label, eps), genuine(view, label, eps)
            if both[0] is not None and both[1] is not None:
                _pair(axes, at, both[0], both[1], view.looks[label].colour)
                highest.append(both[0].high)
        axes.set_xticks(range(len(view.budgets)), [budget_name(eps) for eps in view.budgets])
        percent_axis(axes, highest, name="")
        axes.set_ylim(top=min(100.0, axes.get_ylim()[1] + 8))
        ceiling_line(axes, ceiling)
        name_axes(axes, title=METHOD_NAMES.get(view.kinds[label], label))
    name_axes(axes, "attack budget ε")
    figure.supylabel("accuracy in %", fontsize=TEXT, color=INK)
    keys = [Patch(facecolor=COLOURS["undefended"], linewidth=0, **style) for style in _STYLES.values()]
    legend(figure, keys, list(_STYLES), columns=2)
    return figure


def _pair(axes: Axes, at: int, first: Estimate, second: Estimate, colour: str) -> None:
    """Two bars side by side: as reported, and without what leaked."""
    for step, (item, style) in enumerate(zip((first, second), _STYLES.values(), strict=True)):
        x = at + (step - 0.5) * 0.36
        axes.bar([x], [100 * item.value], width=0.34, linewidth=0, facecolor=colour, **style)
        axes.vlines(x, 100 * item.low, 100 * item.high, color=INK, linewidth=0.9)
    gap = 100 * (first.value - second.value)
    axes.annotate(
        f"−{gap:.1f}",
        xy=(at + 0.18, 100 * second.high),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=SMALL,
        color=INK,
    )


def _control_figure(view: View, grids: Sequence[Grid]) -> Figure:
    figure = new_figure(height=0.5 + 2.1 * len(grids))
    drawn: list[tuple[Axes, list[End]]] = []
    for place, grid in enumerate(grids):
        axes = new_axes(figure, len(grids), 1, place + 1, sharex=drawn[0][0] if drawn else None)
        points = grid.along(SCALE, grid.values("alpha")[-1])
        ends, x = [], [value for value, _ in points]
        for eps in view.budgets:
            counts = [found.value if (found := leaked(view, label, eps)) else math.nan for _, label in points]
            colour = budget_colour(eps)
            axes.plot(x, counts, color=colour, linewidth=1.3, linestyle=DASHED, marker="o", markersize=3)
            ends.append(End(budget_name(eps), x[-1], counts[-1], colour, DASHED))
        counts = [flipped(view, label) for _, label in points]
        axes.plot(x, counts, color=_CONTROL, linewidth=1.8, marker="D", markersize=3.4)
        ends.append(End("no attack", x[-1], counts[-1], _CONTROL))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
        name_axes(axes, title=METHOD_NAMES.get(grid.kind, grid.kind))
        axes.tick_params(labelbottom=place == len(grids) - 1)
        drawn.append((axes, ends))
    name_axes(drawn[-1][0], NAMES[SCALE])
    figure.supylabel("wrong images that come out right", fontsize=TEXT, color=INK)
    for axes, ends in drawn:
        label_ends(axes, ends)
    return figure
