"""The paper's figures, each made from a result."""

from __future__ import annotations

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
    for name, fit in result.fits.items():
        used = fit == result.config.mapping
        values = fit(grid)
        axes.plot(grid.tolist(), values.tolist(), color=COLOURS[name], linewidth=2.2 if used else 1.2)
        text = _LABELS[name] + (" (used)" if used else "")
        axes.annotate(
            text, (float(grid[-1]), float(values[-1])), xytext=(4, 0), textcoords="offset points",
            color=COLOURS[name], va="center", fontsize=8,
        )  # fmt: skip
    for point in result.points:
        axes.plot(point.mean_drift, point.best_sigma, marker="*", markersize=11, color="#222222", linestyle="none")
        axes.annotate(
            f"{point.eps * 255:g}/255", (point.mean_drift, point.best_sigma), xytext=(0, 8), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xlim(0, 1.45 * max(drifts))
    axes.set_ylim(0, None)
    axes.set_xlabel("mean relative cross-noise drift r")
    axes.set_ylabel("best anchor scale \u03c3")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
