"""Parts that several figures share: accuracies with their intervals, axes of budgets and of per cents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from react_clip.evaluation.recipe import format_eps
from react_clip.evaluation.result import Row
from react_clip.report.style import INK, SMALL, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDS = 6
"""Lines up to which intervals are bands; more of them would hide each other, and bars take over."""


def accuracy_line(axes: Axes, rows: Sequence[Row], line: dict[str, Any], *, bars: bool = False) -> Any:
    """Accuracy in % against the budget in 1/255, with its interval; returns the line."""
    x = [255 * row.eps for row in rows]
    low, middle, high = ([100 * getattr(row, name) for row in rows] for name in ("low", "accuracy", "high"))
    return interval_line(axes, x, low, middle, high, line, bars=bars)


def interval_line(
    axes: Axes,
    x: Sequence[float],
    low: Sequence[float],
    middle: Sequence[float],
    high: Sequence[float],
    line: dict[str, Any],
    *,
    bars: bool = False,
) -> Any:
    """A line with a band, or with bars where bands would hide each other."""
    if bars:
        axes.vlines(x, low, high, color=line["color"], linewidth=0.8, alpha=0.7)
    else:
        axes.fill_between(x, low, high, color=line["color"], alpha=0.14, linewidth=0)
    return axes.plot(x, middle, clip_on=False, **line)[0]


def budget_axis(
    axes: Axes, budgets: Sequence[float], *, name: str = "attack budget ε in 1/255, square-root scale"
) -> None:
    """Clean images at 0; the root gives weak attacks room."""
    axes.set_xscale("function", functions=(_root, _square))
    ticks = [0.0, *(255 * eps for eps in budgets)]
    axes.set_xticks(ticks, ["clean", *(f"{tick:.4g}" for tick in ticks[1:])])
    axes.set_xticks([], minor=True)
    if not name and len(budgets) > 4:
        # A panel among others is too narrow for so many words side by side.
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlim(-0.004 * ticks[-1], ticks[-1] * 1.01)
    if name:
        axes.set_xlabel(name, fontsize=8, color=INK)


def _root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
    return np.sign(x) * np.square(x)


def percent_axis(axes: Axes, highest: Iterable[float], *, name: str = "accuracy in %") -> None:
    """From 0 to a little above the highest share, never beyond 100 %."""
    top = max((share for share in highest if math.isfinite(share)), default=1.0)
    axes.set_ylim(0, min(100.0, 100 * top + 8))
    if name:
        axes.set_ylabel(name, fontsize=8, color=INK)


def ceiling_line(axes: Axes, share: float, text: str = "CLIP, clean") -> None:
    """Undefended accuracy on clean images: no honest defence of this classifier is above it under attack."""
    if not math.isfinite(share):
        return
    axes.axhline(100 * share, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
    if text:
        axes.annotate(
            f"{text} {100 * share:.1f} %",
            xy=(1.0, 100 * share),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=SMALL,
            color=INK,
        )


def panels(
    names: Sequence[str],
    draw: Callable[[Axes, str], None],
    *,
    columns: int = 3,
    height: float = 1.25,
    above: float = 0.0,
) -> Figure:
    """Small multiples: one panel a name, all on the same axes, with room for a key above them."""
    columns = min(columns, len(names))
    lines = math.ceil(len(names) / columns)
    figure = new_figure(height=0.6 + above + height * lines)
    first: Axes | None = None
    for place, name in enumerate(names):
        axes = new_axes(figure, lines, columns, place + 1, sharex=first, sharey=first)
        first = first or axes
        draw(axes, name)
        axes.set_title(name, fontsize=SMALL, color=INK, loc="left", pad=3)
        axes.tick_params(labelbottom=place + columns >= len(names), labelleft=place % columns == 0)
    return figure


def budget_name(eps: float) -> str:
    """What a line of one budget is called."""
    return format_eps(eps) if eps else "clean"
