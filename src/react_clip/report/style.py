"""How figures look: one colour a method everywhere, colour-blind-safe, readable at column width."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "undefended": "#767676",
    "aom": "#E69F00",
    "defend-clip": "#56B4E9",
    "react": "#0072B2",
    "linear": "#0072B2",
    "logistic": "#D55E00",
    "power_law": "#009E73",
}
"""Okabe and Ito's palette, one colour per method or mapping."""

COLUMN_WIDTH = 4.6
"""Inches: half a page, so that text set at 9 points stays 9 points."""


def new_figure(height: float = 3.2, width: float = COLUMN_WIDTH) -> Figure:
    """An empty figure in the house style; it never touches global matplotlib state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=160)


def save_figure(figure: Figure, path: Path) -> None:
    """PNG and SVG side by side, each whole or not at all."""
    for suffix in (".png", ".svg"):
        with atomic_path(path.with_suffix(suffix)) as temporary:
            figure.savefig(temporary, format=suffix[1:])
