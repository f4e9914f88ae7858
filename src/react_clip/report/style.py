"""How figures look: one colour a method everywhere, colour-blind-safe, readable at column width.

Whatever is neither a method nor a budget is drawn in ``INK`` on ``PAPER``, and nothing else is: a page with another
ground replaces these two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
PAPER = "#ffffff"

COLOURS = {
    "undefended": "#767676",
    "react": "#0072B2",
    "aom": "#E69F00",
    "defend-clip": "#56B4E9",
    "ttc": "#D55E00",
    "doc": "#CC79A7",
    "mac": "#009E73",
    "anti-adv": "#8C6D31",
    "hd": "#B5A900",
    "tte": "#44AA99",
    "r-tpt": "#AA4499",
    "ss-tpt": "#C2452D",
    "tecoa": "#7F7FD5",
    "pmg-aft": "#5E8C31",
    "fare": "#6F4FA8",
    "clip-ft": "#A6604A",
    "linear": "#0072B2",
    "logistic": "#D55E00",
    "power_law": "#009E73",
    "constant": "#E69F00",
}
"""One colour per method or mapping: Okabe and Ito's palette, then muted colours of like lightness."""

COLUMN_WIDTH = 4.6
"""Inches: half a page, so that text set at 8 points stays 8 points."""
TEXT = 8.0
SMALL = 7.5
"""Points; nothing is set smaller."""

Dashes = tuple[float, tuple[float, ...] | None]
"""A dash pattern as matplotlib takes it: an offset, and lengths in line widths or ``None`` for a solid line."""
SOLID: Dashes = (0, None)
DASHED: Dashes = (0, (4, 1.6))
DOTTED: Dashes = (0, (1.2, 1.4))
DASH_DOT: Dashes = (0, (5, 1.5, 1.2, 1.5))
_VARIANTS = (DASHED, DASH_DOT, DOTTED, (0, (7, 1.5)), (0, (2.4, 2.4)))


@dataclass(frozen=True)
class Look:
    """How one defence is drawn; its variants share colour and marker, but not dashes and filling."""

    colour: str
    marker: str
    dashes: Dashes = SOLID
    filled: bool = True

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot``."""
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markersize": 4.2,
            "linewidth": 1.4,
            "markeredgecolor": self.colour,
            "markerfacecolor": self.colour if self.filled else PAPER,
        }


# Dashes tell the families apart: anchors are solid, counterattacks dashed, augmented views dotted, other weights mixed.
_BASE = {
    "undefended": ("o", SOLID),
    "react": ("o", SOLID),
    "aom": ("s", SOLID),
    "defend-clip": ("^", SOLID),
    "ttc": ("D", DASHED),
    "doc": ("v", DASHED),
    "mac": ("P", DASHED),
    "anti-adv": ("X", DASHED),
    "hd": ("<", DASHED),
    "tte": (">", DOTTED),
    "r-tpt": ("p", DOTTED),
    "ss-tpt": ("h", DOTTED),
    "tecoa": ("*", DASH_DOT),
    "pmg-aft": ("d", DASH_DOT),
    "fare": ("8", DASH_DOT),
    "clip-ft": ("H", DASH_DOT),
}
LOOKS = {kind: Look(COLOURS[kind], marker, dashes) for kind, (marker, dashes) in _BASE.items()}
TOWERS = ("pmg-aft", "clip-ft", "tecoa", "fare")
"""Methods that are other weights: their defence is none, so the label alone tells them from plain CLIP."""
_OTHER = ("#7A5195", "#BC5090", "#2F7F6F", "#A05D20", "#4F6D9A")
"""For kinds that are not ours, in the order of their appearance."""


def kind_of(label: str, config: Mapping[str, Any]) -> str:
    """The method behind a label, from its configuration.

    >>> kind_of("our best", {"kind": "react"}), kind_of("TeCoA, eps 4", {"kind": "undefended"})
    ('react', 'tecoa')
    """
    kind = str(config.get("kind", "")) or slug(label)
    if kind != "undefended":
        return kind
    return next((tower for tower in TOWERS if f"-{tower}-" in f"-{slug(label)}-"), kind)


def looks_of(kinds: Mapping[str, str]) -> dict[str, Look]:
    """A look for every label of a run, given the method behind each; variants of a method share its colour."""
    looks: dict[str, Look] = {}
    seen: dict[str, int] = {}
    strangers = list(dict.fromkeys(kind for kind in kinds.values() if kind not in LOOKS))
    for label, kind in kinds.items():
        number = seen[kind] = seen.get(kind, -1) + 1
        base = LOOKS.get(kind) or Look(_OTHER[strangers.index(kind) % len(_OTHER)], "o", (0, (3, 1, 1, 1, 1, 1)))
        looks[label] = (
            base if not number else Look(base.colour, base.marker, _VARIANTS[(number - 1) % len(_VARIANTS)], False)
        )
    return looks


def slug(text: str) -> str:
    """Text as part of a file name.

    >>> slug("pgd-10 step eps/4")
    'pgd-10-step-eps-4'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


CLEAN = "#767676"
_RAMP = ("#F2A12E", "#E4606A", "#A8328C", "#5B3DB5")
"""Light to dark, orange to violet: the order is visible in grey, too."""


def budget_colour(eps: float) -> str:
    """The colour of a budget; each doubling is one step from 1/255 to 32/255.

    >>> budget_colour(0.0), budget_colour(1 / 255), budget_colour(32 / 255)
    ('#767676', '#F2A12E', '#5B3DB5')
    """
    if eps <= 0:
        return CLEAN
    place = min(max(math.log2(eps * 255) / 5, 0.0), 1.0) * (len(_RAMP) - 1)
    first = min(int(place), len(_RAMP) - 2)
    low, high = (_channels(_RAMP[first + step]) for step in (0, 1))
    mixed = (round(a + (place - first) * (b - a)) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def budget_line(eps: float) -> dict[str, Any]:
    """Arguments of ``Axes.plot`` for a budget's line; clean images are dashed."""
    step = "spv^Dd*"[min(max(round(math.log2(eps * 255)) + 1, 0), 6)] if eps > 0 else "o"
    return {
        "color": budget_colour(eps),
        "linestyle": SOLID if eps > 0 else DASHED,
        "linewidth": 1.4,
        "marker": step,
        "markersize": 3.8,
    }


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))


def new_figure(height: float = 3.2, width: float = COLUMN_WIDTH) -> Figure:
    """An empty figure in the house style; it never touches global matplotlib state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160, facecolor=PAPER)


def new_axes(figure: Figure, *place: Any, **options: Any) -> Axes:
    """Axes in ink on no ground, with lines to read heights by."""
    axes: Axes = figure.add_subplot(*place, **options)
    plain(axes)
    return axes


def plain(axes: Axes) -> None:
    """Take off what carries no information, and draw the rest in ink."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
        axes.spines[side].set_linewidth(0.7)
    axes.tick_params(which="both", colors=INK, labelsize=SMALL, width=0.7, length=3)
    axes.tick_params(which="minor", length=0)
    axes.grid(axis="y", color=INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)


def name_axes(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Words beside the axes; what is empty stays away."""
    if x:
        axes.set_xlabel(x, fontsize=TEXT, color=INK)
    if y:
        axes.set_ylabel(y, fontsize=TEXT, color=INK)
    if title:
        axes.set_title(title, fontsize=TEXT, color=INK, loc="left", pad=4)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """A key above small multiples, where lines are too many to be labelled one by one."""
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        handlelength=2.4,
        columnspacing=1.4,
    )


def save_figure(figure: Figure, path: Path) -> None:
    """PNG and SVG side by side, each whole or not at all; the same figure gives the same SVG, byte for byte."""
    import matplotlib

    # What stands where is settled once: it is the slow part, and both files shall agree.
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    with matplotlib.rc_context({"svg.hashsalt": "react-clip", "svg.fonttype": "path"}):
        for suffix in (".png", ".svg"):
            drawing = suffix == ".svg"
            metadata = {"Date": None} if drawing else None
            with atomic_path(path.with_name(path.name.removesuffix(path.suffix) + suffix)) as temporary:
                # A picture in a file has its own paper; a drawing in a page takes the page's.
                figure.savefig(temporary, format=suffix[1:], transparent=drawing, metadata=metadata)
