"""Colours, markers and layout of all figures: one colour per method, safe for colour-blind readers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.defenses import Defense
from react_clip.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
WIDTH = 6.4
"""Inches of a figure."""
SMALL, TEXT = 7.5, 8.0
"""Font sizes in points."""

TOWERS = {"tecoa": "#7F7FD5", "pmg-aft": "#5E8C31", "fare": "#6F4FA8", "clip-ft": "#A6604A"}
"""Colour of each finetuned tower. Defences have theirs in their classes: Okabe and Ito's palette, then muted."""
GREY = "#767676"
"""Of clean images, and of what was not defended."""
_MARKERS = "osD^vP<>Xd*ph8"
_DASHES = ("-", "--", ":", "-.")

Line = dict[str, Any]
"""Arguments of ``Axes.plot``."""


def slug(text: str) -> str:
    """Text as part of a file name.

    >>> slug("pgd-10 step eps/4")
    'pgd-10-step-eps-4'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def method_of(label: str, kind: str) -> str:
    """The method of a defence: its kind, or the finetuned tower that its label names.

    >>> method_of("our best", "react"), method_of("TeCoA, eps 4", "undefended")
    ('react', 'tecoa')
    """
    towers = (tower for tower in TOWERS if f"-{tower}-" in f"-{slug(label)}-")
    return next(towers, kind) if kind == "undefended" else kind


def lines_of(defenses: Mapping[str, Mapping[str, Any]]) -> dict[str, Line]:
    """Colour, marker and dashes of every defence, the same in every figure.

    Defences of one method share its colour and differ in marker and dashes; the points of a sweep (with ``params``)
    are coloured from dark to light.

    Args:
        defenses: the recipe's entries by label.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    kinds = Defense.registry.names()
    known, seen = [*kinds, *TOWERS], list[str]()
    families = [entry.get("family") if entry.get("params") else None for entry in defenses.values()]
    lines: dict[str, Line] = {}
    for place, (label, entry) in enumerate(defenses.items()):
        method, family = method_of(label, str(entry.get("kind", ""))), families[place]
        variant = seen.count(method)
        seen.append(method)
        own = Defense.registry.get(method).colour if method in kinds else TOWERS.get(method)
        colour = own or to_hex(colormaps["tab20"](len(set(seen)) % 20))
        if family is not None and families.count(family) > 1:
            colour = to_hex(colormaps["viridis"](families[:place].count(family) / families.count(family)))
        number = (known.index(method) if method in known else len(known)) + variant
        dashes = _DASHES[variant % len(_DASHES)] if family is None else "-"
        lines[label] = {"color": colour, "marker": _MARKERS[number % len(_MARKERS)], "linestyle": dashes}
        lines[label] |= {"linewidth": 1.3, "markersize": 4}
    return lines


def budget_colour(place: int, count: int) -> Any:
    """The colour of the budget number ``place`` of ``count``, from light to dark; clean images (0) are grey."""
    from matplotlib import colormaps

    return GREY if place == 0 else colormaps["plasma_r"](0.15 + 0.75 * place / count)


def new_figure(height: float = 3.2, width: float = WIDTH) -> Figure:
    """An empty figure in inches; global matplotlib state is not changed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160)


def style_axes(axes: Axes, x: str = "", y: str = "", title: str = "") -> Axes:
    """Horizontal grid lines, no box, small texts; returns the axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", color=INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, fontsize=TEXT)
    axes.set_ylabel(y, fontsize=TEXT)
    axes.set_title(title, fontsize=TEXT, loc="left")
    return axes


def legend(figure: Figure) -> None:
    """One legend right of all panels; every label once."""
    entries: Line = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if entries:
        look: Line = {"ncols": 1 + len(entries) // 26, "frameon": False, "fontsize": SMALL}
        figure.legend(list(entries.values()), list(entries), loc="outside right upper", **look)


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``path`` as PNG and SVG, atomically; the same figure gives the same SVG, byte for byte."""
    import matplotlib

    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)  # once, not for each file: it is the slow part
        figure.set_layout_engine("none")
    with matplotlib.rc_context({"svg.hashsalt": "react-clip", "svg.fonttype": "path"}):
        for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
            with atomic_path(path.with_name(path.name.removesuffix(path.suffix) + suffix)) as temporary:
                figure.savefig(temporary, format=suffix[1:], metadata=metadata)
