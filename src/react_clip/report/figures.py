"""The paper's figures, each made from a result."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from react_clip.calibration import Calibration
from react_clip.report.style import COLOURS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = {"linear": "linear", "logistic": "logistic", "power_law": "power law"}


def calibration_figure(result: Calibration) -> Figure:
    """Calibration points and the fitted curves, each labelled where it ends."""
    figure = new_figure()
    axes = figure.add_subplot()
    drifts = [point.mean_drift for point in result.points]
    grid = torch.linspace(0.0, 1.15 * max(drifts), 200)
    curves = {name: fit(grid) for name, fit in result.fits.items()}
    top = max(float(values.max()) for values in curves.values())
    heights = spread([float(values[-1]) for values in curves.values()], gap=0.07 * top)
    for (name, values), height in zip(curves.items(), heights, strict=True):
        used = result.fits[name] == result.config.mapping
        axes.plot(grid.tolist(), values.tolist(), color=COLOURS[name], linewidth=2.2 if used else 1.2)
        label = _LABELS[name] + (" (used)" if used else "")
        axes.text(1.18 * max(drifts), height, label, color=COLOURS[name], va="center", fontsize=8)
    for point in result.points:
        axes.plot(point.mean_drift, point.best_sigma, marker="*", markersize=11, color="#222222", linestyle="none")
        axes.annotate(
            f"{point.eps * 255:g}/255",
            (point.mean_drift, point.best_sigma),
            xytext=(0, -15),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )
    axes.set_xlim(0, 1.5 * max(drifts))
    axes.set_ylim(0, 1.15 * top)
    axes.set_xlabel("mean relative cross-noise drift r")
    axes.set_ylabel("best anchor scale \u03c3")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights for labels, moved up as little as keeps them ``gap`` apart.

    >>> spread([1.0, 0.95, 0.5], gap=0.1)
    [1.05, 0.95, 0.5]
    """
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for below, above in pairwise(order):
        placed[above] = round(max(placed[above], placed[below] + gap), 6)
    return placed
