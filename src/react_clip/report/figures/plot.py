"""Drawing helpers of all figures: axes, lines with intervals, small multiples, and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from react_clip.report.style import INK, SMALL, TEXT, name_axes, new_figure, style_axes

Numbers = NDArray[np.floating[Any]]
Share = Literal["all", "col", "none"]

BUDGETS = "attack budget ε in 1/255"
BUDGETS_ROOT = f"{BUDGETS}, square-root scale"
BANDS = 6
"""Most lines whose intervals are drawn as bands; more bands would hide each other, so bars are drawn."""
_GAP = 1.06
"""Distance between labels, in label heights."""
_ANGLES = np.arange(16) * math.pi / 8
_OFFSETS = [
    (reach * np.array([math.cos(angle), math.sin(angle)]), 0.5 - 0.5 * float(np.sign(round(math.cos(angle), 6))))
    for reach in (6.0, 11.0, 17.0, 24.0, 32.0, 42.0, 54.0, 68.0, 84.0)
    for angle in _ANGLES
]
"""Places of a label around its point, nearest first: offset in points, and the share of its width to the left."""
_LINE = 24
"""Characters after which a label is wrapped."""
_LABEL: dict[str, Any] = {"color": INK, "va": "center", "ha": "left", "linespacing": 1.0, "annotation_clip": False}


# ---------------------------------------------------------------------- panels


def chart(height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = new_figure(height=height)
    return figure, style_axes(figure.add_subplot())


def panels(
    titles: Sequence[str],
    draw: Callable[[Axes, int], None],
    *,
    columns: int = 1,
    height: float = 1.25,
    above: float = 0.0,
    sharex: Share = "all",
    sharey: Share = "all",
) -> Figure:
    """Small multiples: one panel per title, each drawn by ``draw``.

    Args:
        titles: titles of the panels, from left to right and from top to bottom.
        draw: called with the axes and the number of a panel.
        columns: most panels side by side.
        height: inches of a panel.
        above: inches for a legend over the panels.
        sharex, sharey: which panels have the same axis, as in ``Figure.subplots``.
    """
    columns = min(columns, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = new_figure(height=0.6 + above + height * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=sharex, sharey=sharey).ravel()
    for unused in grid[len(titles) :]:
        unused.remove()
    for number, (axes, title) in enumerate(zip(grid, titles, strict=False)):
        style_axes(axes)
        draw(axes, number)
        axes.set_title(title, fontsize=TEXT if lines == 1 else SMALL, color=INK, loc="left", pad=3)
        # The lowest panel of each column carries the labels of the x axis; the last row may be shorter.
        axes.tick_params(labelbottom=number + columns >= len(titles))
    return figure


def name_figure(figure: Figure, x: str = "", y: str = "") -> None:
    """Labels below and beside all panels."""
    figure.supxlabel(x, fontsize=TEXT, color=INK)
    figure.supylabel(y, fontsize=TEXT, color=INK)


# ---------------------------------------------------------------------- lines and axes


def interval_line(
    axes: Axes,
    rows: pd.DataFrame,
    line: dict[str, Any],
    *,
    label: str = "",
    bars: bool = False,
    value: str = "accuracy",
) -> None:
    """A line with its interval as a band, or as bars.

    Args:
        axes: where to draw.
        rows: columns ``low``, ``high`` and the one that ``value`` names, against the index.
        line: arguments of ``Axes.plot``.
        label: text that :func:`label_ends` writes at the end of the line.
        bars: draw the interval as bars.
        value: column of the line.
    """
    x, low, high = (column.to_numpy(dtype=float) for column in (rows.index, rows["low"], rows["high"]))
    if bars:
        axes.vlines(x, low, high, color=line["color"], linewidth=0.8, alpha=0.7)
    else:
        axes.fill_between(x, low, high, color=line["color"], alpha=0.14, linewidth=0)
    axes.plot(x, rows[value].to_numpy(dtype=float), clip_on=False, label=label or None, **line)


def budget_axis(axes: Axes, budgets: Sequence[float], *, name: str = "") -> None:
    """Budgets on a square-root scale, which gives weak attacks room; clean images are at 0."""
    axes.set_xscale("function", functions=(_root, _square))
    axes.set_xticks([0.0, *budgets], budget_ticks(budgets))
    axes.set_xticks([], minor=True)
    if not name and len(budgets) > 4:
        # A small panel is too narrow for horizontal labels.
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlim(-0.004 * budgets[-1], 1.01 * budgets[-1])
    name_axes(axes, name)


def _root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
    return np.sign(x) * np.square(x)


def budget_ticks(budgets: Sequence[float]) -> list[str]:
    """Tick labels for clean images and all budgets."""
    return ["clean", *(f"{eps:.4g}" for eps in budgets)]


def budget_name(eps: float) -> str:
    """The label of a budget's line."""
    return f"{eps:.4g}/255" if eps else "clean"


def percent_axis(axes: Axes, highest: Iterable[float], *, name: str = "accuracy in %") -> None:
    """Per cent from 0 to a little above the highest value, at most 100."""
    top = max((value for value in highest if math.isfinite(value)), default=100.0)
    axes.set_ylim(0, min(100.0, top + 8))
    name_axes(axes, y=name)


def ceiling_line(axes: Axes, percent: float, text: str = "CLIP, clean") -> None:
    """Dotted line at the accuracy of undefended CLIP on clean images."""
    if math.isfinite(percent):
        axes.axhline(percent, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
        if text:
            note(axes, f"{text} {percent:.1f} %", (1.0, percent), ("axes fraction", "data"), (-2, 2), ha="right")


def note(
    axes: Axes, text: str, xy: tuple[float, float], coords: Any, offset: tuple[float, float], **align: str
) -> None:
    """Small text, ``offset`` points away from a point."""
    options: dict[str, Any] = {"va": "bottom", **align, "fontsize": SMALL, "color": INK}
    axes.annotate(text, xy=xy, xycoords=coords, xytext=offset, textcoords="offset points", **options)


# ---------------------------------------------------------------------- labels at the ends of lines


def label_ends(figure: Figure) -> None:
    """Write every line's label to the right of its axes. Call it last: limits must be final."""
    for axes in figure.axes:
        # matplotlib gives lines without a label a name that begins so.
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_child")]
        points = [np.asarray(line.get_xydata(), dtype=float) for line in lines]
        ends = [(line, xy[-1]) for line, xy in zip(lines, points, strict=True) if len(xy) and np.isfinite(xy[-1, 1])]
        if not ends:
            continue
        notes = [_end_label(axes, line, end) for line, end in ends]
        figure.draw_without_rendering()
        tall = max(Text.get_window_extent(label).height for label in notes) / axes.bbox.height
        to_axes = axes.transData + axes.transAxes.inverted()
        wanted = [float(to_axes.transform(end)[1]) for _, end in ends]
        for label, height in zip(notes, spread(wanted, _GAP * tall, low=0.0, high=1.0), strict=True):
            label.set_position((1.06, height))


def _end_label(axes: Axes, line: Line2D, end: Numbers) -> Annotation:
    leader = {"color": line.get_color(), "linewidth": 1.0, "linestyle": line.get_linestyle()}
    arrow = {"arrowstyle": "-", "shrinkA": 1, "shrinkB": 3, "relpos": (0.0, 0.5), **leader}
    text = fill(str(line.get_label()), _LINE)
    return axes.annotate(text, (end[0], end[1]), (1.06, 0.5), "data", "axes fraction", arrow, **_LABEL, fontsize=TEXT)


def spread(heights: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Move label heights as little as possible so that they are ``gap`` apart and, if there is room, within bounds.

    >>> spread([1.0, 0.95, 0.5], gap=0.1)
    [1.025, 0.925, 0.5]
    >>> spread([0.0, 0.0], gap=0.2, low=0.0)
    [0.0, 0.2]
    """
    order = np.argsort(heights, kind="stable")
    gaps = gap * np.arange(len(heights))
    # With the gaps subtracted, heights only need to rise.
    level = isotonic_regression(np.asarray(heights)[order] - gaps).x
    placed = np.empty(len(heights))
    placed[order] = np.clip(level, low, max(high - gaps[-1], low)) + gaps
    return [float(height) for height in placed.round(6)]


def room_for(labels: Sequence[str], least: float) -> float:
    """Height in inches of a figure whose right side holds these labels one above the other."""
    lines = max((fill(label, _LINE).count("\n") + 1 for label in labels), default=1)
    return max(least, 0.75 + len(labels) * lines * TEXT * 1.36 / 72)


# ---------------------------------------------------------------------- labels beside points


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str]], avoid: Sequence[tuple[float, float]] = ()
) -> None:
    """Label points ``(x, y, text)``, away from each other and from the points in ``avoid``. Call it last."""
    figure = axes.get_figure(root=True)
    points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not points or figure is None:
        return
    leader = {"arrowstyle": "-", "color": INK, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "alpha": 0.6}
    notes = [
        axes.annotate(text, (x, y), (6, 0), "data", "offset points", dict(leader), **_LABEL, fontsize=SMALL)
        for x, y, text in points
    ]
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    centres = axes.transData.transform([point[:2] for point in points])
    taken = [Bbox([centre, centre]).padded(3.5 * unit) for centre in centres]
    taken += [Bbox([at, at]).padded(unit) for at in map(axes.transData.transform, avoid)]
    for note, centre in zip(notes, centres, strict=True):
        size = Text.get_window_extent(note)
        # Text to the left of its point ends there, text to the right begins there.
        corners = [centre + unit * at - (shift * size.width, size.height / 2) for at, shift in _OFFSETS]
        boxes = [Bbox.from_bounds(left, low, size.width, size.height) for left, low in corners]
        faults = [box.count_overlaps(taken) + 4 * (axes.bbox.count_contains(box.corners()) < 4) for box in boxes]
        best = int(np.argmin(faults))
        taken.append(boxes[best])
        at, shift = _OFFSETS[best]
        note.set(position=tuple(at), horizontalalignment={0.0: "left", 0.5: "center", 1.0: "right"}[shift])
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(math.hypot(*at) > 8)
