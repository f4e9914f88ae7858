"""Words beside lines and points instead of a legend, placed where they do not touch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from react_clip.report.style import INK, SMALL, SOLID, TEXT, Dashes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

Numbers = NDArray[np.floating[Any]]

_AIR = 1.06
"""Height of a label with the air around it, in its own height."""
_REACHES = (6.0, 11.0, 17.0, 24.0, 32.0, 42.0, 54.0, 68.0, 84.0)
"""Distances in points at which a point's label is tried."""
_LINE = 24
"""Letters after which a label continues below."""


def spread(heights: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Heights for labels, moved as little as keeps them ``gap`` apart and, where there is room, within bounds.

    >>> spread([1.0, 0.95, 0.5], gap=0.1)
    [1.025, 0.925, 0.5]
    >>> spread([0.0, 0.0], gap=0.2, low=0.0)
    [0.0, 0.2]
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    # Without the gaps the heights only have to rise: pool neighbours that do not, and each pool stands at its mean.
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
    """Where a line ends, and what it is called."""

    text: str
    x: float
    y: float
    colour: str
    dashes: Dashes = SOLID


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Name every line to the right of the axes; call it last, for limits must stand."""
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
    for note, height in zip(notes, spread(wanted, _AIR * tall, low=0.0, high=1.0), strict=True):
        note.set_position((1.06, height))


def room_for(labels: Sequence[str], least: float) -> float:
    """Height in inches of a figure whose right side holds these labels, one above the other."""
    lines = max((fill(label, _LINE).count("\n") + 1 for label in labels), default=1)
    return max(least, 0.75 + len(labels) * lines * TEXT * 1.36 / 72)


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str]], avoid: Sequence[tuple[float, float]] = ()
) -> None:
    """Name points beside them, away from each other and from places to avoid; call it last."""
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
    # Every offset that is tried, nearest first; a label stands beside its point, above or below it.
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
    """Areas that boxes ``[N, 4]`` (left, low, right, high) share with others ``[M, 4]``."""
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
