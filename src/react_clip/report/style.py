"""Colours, markers and layout of all figures: one colour per method, safe for colour-blind readers."""

from __future__ import annotations

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

GREY = "#767676"
"""Of clean images, and of what was not defended."""
_MARKERS = "osD^vP<>Xd*ph8"
_DASHES = ("-", "--", ":", "-.")

Line = dict[str, Any]
"""Arguments of ``Axes.plot``."""


def lines_of(defenses: Mapping[str, Mapping[str, Any]]) -> dict[str, Line]:
    """Colour, marker and dashes of every defence, the same in every figure.

    Defences of one kind share the colour of their class and differ in marker and dashes; finetuned towers, which are
    undefended, and classes without a colour have one of a palette.

    Args:
        defenses: the recipe's entries by label.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    known, kinds = Defense.registry.names(), list[str]()
    lines: dict[str, Line] = {}
    for place, (label, entry) in enumerate(defenses.items()):
        kind = str(entry["kind"])
        variant = kinds.count(kind)
        kinds.append(kind)
        finetuned = kind == "undefended" and variant > 0
        own = Defense.registry.get(kind).colour if kind in known and not finetuned else None
        lines[label] = {"color": own or to_hex(colormaps["tab20"](place % 20)), "linewidth": 1.3, "markersize": 4}
        lines[label] |= {"marker": _MARKERS[place % len(_MARKERS)], "linestyle": _DASHES[variant % len(_DASHES)]}
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
