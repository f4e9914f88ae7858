"""Drawing helpers of all figures: axes, lines with intervals, small multiples, and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from react_clip.evaluation.recipe import format_eps
from react_clip.evaluation.result import Row
from react_clip.report.style import INK, SMALL, SOLID, TEXT, Dashes, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

Numbers = NDArray[np.floating[Any]]

_GAP = 1.06
"""Distance between labels, in label heights."""
_REACHES = (6.0, 11.0, 17.0, 24.0, 32.0, 42.0, 54.0, 68.0, 84.0)
"""Distances in points from a point to its label, tried in this order."""
_LINE = 24
"""Characters after which a label is wrapped."""


def spread(heights: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Move label heights as little as possible so that they are ``gap`` apart and, if there is room, within bounds.

    >>> spread([1.0, 0.95, 0.5], gap=0.1)
    [1.025, 0.925, 0.5]
    >>> spread([0.0, 0.0], gap=0.2, low=0.0)
    [0.0, 0.2]
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    # Isotonic regression: with the gaps subtracted, heights must rise; neighbours that do not share their mean.
    pools: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, count = heights[index] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            other, size = pools.pop()
            mean, count = (other * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    top = high - gap * (len(heights) - 1)
    level = [min(max(mean, low), max(top, low)) for mean, count in pools for _ in range(count)]
    placed = list(heights)
    for rank, index in enumerate(order):
        placed[index] = round(level[rank] + rank * gap, 6)
    return placed


@dataclass(frozen=True)
class End:
    """The label of a line and the point where the line ends."""

    text: str
    x: float
    y: float
    colour: str
    dashes: Dashes = SOLID


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Label every line to the right of the axes. Call it last: limits must be final."""
    from matplotlib.text import Text

    ends = [end for end in ends if math.isfinite(end.y)]
    figure = axes.get_figure(root=True)
    if not ends or figure is None:
        return
    notes = []
    for end in ends:
        note = axes.annotate(
            fill(end.text, _LINE),
            xy=(end.x, end.y),
            xytext=(1.06, 0.5),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=TEXT,
            color=INK,
            linespacing=1.0,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 1.0,
                "linestyle": end.dashes,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0.0, 0.5),
            },
        )
        notes.append(note)
    figure.draw_without_rendering()
    tall = max(Text.get_window_extent(note).height for note in notes) / axes.bbox.height
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    for note, height in zip(notes, spread(wanted, _GAP * tall, low=0.0, high=1.0), strict=True):
        note.set_position((1.06, height))


def room_for(labels: Sequence[str], least: float) -> float:
    """Height in inches of a figure whose right side holds these labels one above the other."""
    lines = max((fill(label, _LINE).count("\n") + 1 for label in labels), default=1)
    return max(least, 0.75 + len(labels) * lines * TEXT * 1.36 / 72)


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str]], avoid: Sequence[tuple[float, float]] = ()
) -> None:
    """Label points, away from each other and from the points in ``avoid``. Call it last."""
    from matplotlib.text import Text

    figure = axes.get_figure(root=True)
    points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not points or figure is None:
        return
    notes = [_point_label(axes, *point) for point in points]
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    centres = [axes.transData.transform(point[:2]) for point in points]
    taken = [_around(x, y, 3.5 * unit) for x, y in centres]
    taken += [_around(x, y, unit) for x, y in map(axes.transData.transform, avoid)]
    inside = np.array([axes.bbox.extents])
    # Candidate offsets, nearest first.
    reach, turn = (grid.ravel() for grid in np.meshgrid(_REACHES, np.arange(16) * math.pi / 8, indexing="ij"))
    across, up = reach * np.cos(turn), reach * np.sin(turn)
    shift = np.where(across < -1, 1.0, np.where(across > 1, 0.0, 0.5))
    for note, (x, y) in zip(notes, centres, strict=True):
        size = Text.get_window_extent(note)
        left, low = x + across * unit - shift * size.width, y + up * unit - size.height / 2
        boxes = np.stack([left, low, left + size.width, low + size.height], axis=1)
        outside = size.width * size.height - _shared(boxes, inside).sum(axis=1)
        best = int(np.argmin(_shared(boxes, np.array(taken)).sum(axis=1) + 4 * outside + reach * unit))
        taken.append(boxes[best])
        note.set_horizontalalignment("right" if shift[best] == 1 else "left" if shift[best] == 0 else "center")
        note.set_position((float(across[best]), float(up[best])))
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(bool(reach[best] > 8))


def _around(x: float, y: float, reach: float) -> Numbers:
    return np.array([x - reach, y - reach, x + reach, y + reach])


def _shared(boxes: Numbers, others: Numbers) -> Numbers:
    """Overlap areas ``[N, M]`` of boxes ``[N, 4]`` (left, low, right, high) and others ``[M, 4]``."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    area: Numbers = np.clip(high - low, 0.0, None).prod(axis=-1)
    return area


def _point_label(axes: Axes, x: float, y: float, text: str) -> Annotation:
    return axes.annotate(
        text,
        xy=(x, y),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=SMALL,
        color=INK,
        va="center",
        annotation_clip=False,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "alpha": 0.6},
    )


# ---------------------------------------------------------------------- lines and axes

BANDS = 6
"""Most lines whose intervals are drawn as bands; more bands would hide each other, so bars are drawn."""


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
    """A line with its interval as a band, or as bars."""
    if bars:
        axes.vlines(x, low, high, color=line["color"], linewidth=0.8, alpha=0.7)
    else:
        axes.fill_between(x, low, high, color=line["color"], alpha=0.14, linewidth=0)
    return axes.plot(x, middle, clip_on=False, **line)[0]


def budget_axis(
    axes: Axes, budgets: Sequence[float], *, name: str = "attack budget ε in 1/255, square-root scale"
) -> None:
    """Budgets on a square-root scale, which gives weak attacks room; clean images are at 0."""
    axes.set_xscale("function", functions=(_root, _square))
    ticks = [0.0, *(255 * eps for eps in budgets)]
    axes.set_xticks(ticks, ["clean", *(f"{tick:.4g}" for tick in ticks[1:])])
    axes.set_xticks([], minor=True)
    if not name and len(budgets) > 4:
        # A small panel is too narrow for horizontal labels.
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlim(-0.004 * ticks[-1], ticks[-1] * 1.01)
    if name:
        axes.set_xlabel(name, fontsize=8, color=INK)


def _root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
    return np.sign(x) * np.square(x)


def percent_axis(axes: Axes, highest: Iterable[float], *, name: str = "accuracy in %") -> None:
    """Per cent from 0 to a little above the highest share, at most 100."""
    top = max((share for share in highest if math.isfinite(share)), default=1.0)
    axes.set_ylim(0, min(100.0, 100 * top + 8))
    if name:
        axes.set_ylabel(name, fontsize=8, color=INK)


def ceiling_line(axes: Axes, share: float, text: str = "CLIP, clean") -> None:
    """Dotted line at the accuracy of undefended CLIP on clean images."""
    if not math.isfinite(share):
        return
    axes.axhline(100 * share, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
    if text:
        note(axes, f"{text} {100 * share:.1f} %", (1.0, 100 * share), ("axes fraction", "data"), (-2, 2), ha="right")


def note(
    axes: Axes, text: str, xy: tuple[float, float], coords: Any, offset: tuple[float, float], **align: str
) -> None:
    """Small text, ``offset`` points away from a place."""
    options: dict[str, Any] = {"va": "bottom", **align, "fontsize": SMALL, "color": INK}
    axes.annotate(text, xy=xy, xycoords=coords, xytext=offset, textcoords="offset points", **options)


def panels(
    names: Sequence[str],
    draw: Callable[[Axes, str], None],
    *,
    columns: int = 3,
    height: float = 1.25,
    above: float = 0.0,
) -> Figure:
    """Small multiples: one panel per name, all with the same axes, ``above`` inches for a legend over them."""
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
    """The label of a budget's line."""
    return format_eps(eps) if eps else "clean"
