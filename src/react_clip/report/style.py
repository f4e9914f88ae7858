"""Colours, markers and layout of all figures: one colour per method, safe for colour-blind readers.

Everything that is neither a method nor a budget is drawn in ``INK`` on ``PAPER``, so that a page with another
background can replace these two colours.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.defenses import BaseDefense
from react_clip.errors import ReactClipError
from react_clip.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
PAPER = "#ffffff"

COLUMN_WIDTH = 4.6
"""Inches: half a page, so that text of 8 points stays 8 points."""
TEXT = 8.0
SMALL = 7.5
"""Font sizes in points; no text is smaller."""

Line = dict[str, Any]
"""Arguments of ``Axes.plot``."""
Dashes = str | tuple[float, tuple[float, ...]]
"""A line style of matplotlib: a name, or an offset and lengths in line widths."""
SOLID: Dashes = "-"
DASHED: Dashes = (0, (4, 1.6))
DOTTED: Dashes = (0, (1.2, 1.4))
DASH_DOT: Dashes = (0, (5, 1.5, 1.2, 1.5))
_VARIANTS: tuple[Dashes, ...] = (DASHED, DASH_DOT, DOTTED, (0, (7, 1.5)), (0, (2.4, 2.4)))
"""Dashes of the second, third, ... defence of one method."""

_SHAPES: dict[str, tuple[str, Dashes]] = {
    "undefended": ("o", SOLID),
    "react": ("o", SOLID),
    "second_look": ("D", SOLID),
    "aom": ("s", SOLID),
    "defend-clip": ("^", SOLID),
    "ttc": ("D", DASHED),
    "doc": ("v", DASHED),
    "mac": ("P", DASHED),
    "anti-adv": ("X", DASHED),
    "hd": ("<", DASHED),
    "csr": ("^", DASHED),
    "et3": ("s", DASHED),
    "clipure": ("v", SOLID),
    "agc": ("d", DOTTED),
    "dbd": ("8", DOTTED),
    "tte": (">", DOTTED),
    "r-tpt": ("p", DOTTED),
    "ss-tpt": ("h", DOTTED),
    "tecoa": ("*", DASH_DOT),
    "pmg-aft": ("d", DASH_DOT),
    "fare": ("8", DASH_DOT),
    "clip-ft": ("H", DASH_DOT),
}
"""Markers and dashes: anchors are solid, counterattacks dashed, augmented views dotted, other weights dash-dotted."""
TOWERS = {"pmg-aft": "#5E8C31", "clip-ft": "#A6604A", "tecoa": "#7F7FD5", "fare": "#6F4FA8"}
"""Colours of finetuned towers. Their defence is ``undefended``, so only their label tells them from plain CLIP."""
MAPPINGS = {"linear": "#0072B2", "logistic": "#D55E00", "power_law": "#009E73", "constant": "#E69F00"}
_OTHER = ("#7A5195", "#BC5090", "#2F7F6F", "#A05D20", "#4F6D9A")
"""Colours of defences that name none, in the order of their appearance."""


def colour_of(method: str) -> str | None:
    """The colour that a defence's class names, or that of a finetuned tower; ``None`` if there is none.

    >>> colour_of("react"), colour_of("fare"), colour_of("unheard-of")
    ('#0072B2', '#6F4FA8', None)
    """
    if method in TOWERS:
        return TOWERS[method]
    defense = defense_class(method)
    return defense.colour if defense else None


def label_of(kind: str) -> str:
    """The name of a defence in titles: its class's label, or the kind itself where there is no such class."""
    defense = defense_class(kind)
    return defense.label if defense else kind


def defense_class(kind: str) -> type[BaseDefense] | None:
    """The class of a kind, if there is one.

    A ``module:Class`` is looked up only where its module is imported already: kinds come from result files, and reading
    a file must not decide what is imported.
    """
    if ":" in kind and kind.partition(":")[0] not in sys.modules:
        return None
    try:
        return BaseDefense.registry.get(kind)
    except ReactClipError:
        return None


COLOURS = {method: str(colour_of(method)) for method in _SHAPES}
"""Colours of our methods: Okabe and Ito's palette first, then muted colours of similar lightness."""


def method_of(label: str, kind: str) -> str:
    """The method of a defence: its kind, or the finetuned tower that its label names.

    >>> method_of("our best", "react"), method_of("TeCoA, eps 4", "undefended")
    ('react', 'tecoa')
    """
    if kind != "undefended":
        return kind or slug(label)
    return next((tower for tower in TOWERS if f"-{tower}-" in f"-{slug(label)}-"), kind)


def line_of(colour: str, marker: str, dashes: Dashes = SOLID, *, filled: bool = True) -> Line:
    """A line with markers, filled or open."""
    face = colour if filled else PAPER
    shape = {"marker": marker, "markersize": 4.2, "markeredgecolor": colour, "markerfacecolor": face}
    return {"color": colour, "linestyle": dashes, "linewidth": 1.4, **shape}


def lines_of(methods: Mapping[str, str]) -> dict[str, Line]:
    """A line for every label; variants of a method share its colour and marker and differ in dashes and filling.

    Args:
        methods: the method behind each label.
    """
    lines: dict[str, Line] = {}
    seen: list[str] = []
    others = list(dict.fromkeys(method for method in methods.values() if colour_of(method) is None))
    for label, method in methods.items():
        variant = seen.count(method)
        seen.append(method)
        marker, dashes = _SHAPES.get(method, ("o", (0, (3, 1, 1, 1, 1, 1))))
        colour = colour_of(method) or _OTHER[others.index(method) % len(_OTHER)]
        dashes = _VARIANTS[(variant - 1) % len(_VARIANTS)] if variant else dashes
        lines[label] = line_of(colour, marker, dashes, filled=not variant)
    return lines


def slug(text: str) -> str:
    """Text as part of a file name.

    >>> slug("pgd-10 step eps/4")
    'pgd-10-step-eps-4'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


CLEAN = "#767676"
_RAMP = ("#F2A12E", "#E4606A", "#A8328C", "#5B3DB5")
"""Light to dark, so that the order is also visible in grey."""


def budget_colour(eps: float) -> str:
    """The colour of a budget in 255ths; each doubling from 1 to 32 is one step.

    >>> budget_colour(0.0), budget_colour(1), budget_colour(32)
    ('#767676', '#f2a12e', '#5b3db5')
    """
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if eps <= 0:
        return CLEAN
    return to_hex(LinearSegmentedColormap.from_list("budgets", _RAMP)(math.log2(eps) / 5))


def budget_line(eps: float) -> Line:
    """The line of a budget in 255ths; clean images are dashed."""
    if eps <= 0:
        return line_of(CLEAN, "o", DASHED)
    return line_of(budget_colour(eps), "spv^Dd*"[min(max(round(math.log2(eps)) + 1, 0), 6)])


def new_figure(height: float = 3.2, width: float = COLUMN_WIDTH) -> Figure:
    """An empty figure; global matplotlib state is not changed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160, facecolor=PAPER)


def style_axes(axes: Axes) -> Axes:
    """Give axes ink on a transparent background, horizontal grid lines and no box; returns them."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=INK, linewidth=0.7)
    axes.tick_params(which="both", colors=INK, labelsize=SMALL, width=0.7, length=3)
    axes.tick_params(which="minor", length=0)
    axes.grid(axis="y", color=INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def name_axes(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Set the labels and the title that are given."""
    if x:
        axes.set_xlabel(x, fontsize=TEXT, color=INK)
    if y:
        axes.set_ylabel(y, fontsize=TEXT, color=INK)
    if title:
        axes.set_title(title, fontsize=TEXT, color=INK, loc="left", pad=4)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """A legend above small multiples, where lines are too many to be labelled one by one."""
    look: Line = {"frameon": False, "fontsize": SMALL, "labelcolor": INK, "handlelength": 2.4, "columnspacing": 1.4}
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, **look)


def save_figure(figure: Figure, path: Path) -> None:
    """Write ``path`` as PNG and SVG, atomically; the same figure gives the same SVG, byte for byte."""
    import matplotlib

    # Lay out once: it is the slow part, and both files must agree.
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    with matplotlib.rc_context({"svg.hashsalt": "react-clip", "svg.fonttype": "path"}):
        for suffix in (".png", ".svg"):
            drawing = suffix == ".svg"
            metadata = {"Date": None} if drawing else None
            with atomic_path(path.with_name(path.name.removesuffix(path.suffix) + suffix)) as temporary:
                # The SVG is put into pages with their own background.
                figure.savefig(temporary, format=suffix[1:], transparent=drawing, metadata=metadata)
