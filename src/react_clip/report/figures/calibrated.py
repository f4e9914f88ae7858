"""Calibration points with the curves fitted to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import format_eps
from react_clip.report.figures.accuracy import MAPPING_NAMES
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.labels import End, label_ends, label_points
from react_clip.report.style import COLOURS, INK, name_axes, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def calibration(view: View) -> list[FigureOf]:
    """The points of a calibration and its fits (Figure 5)."""
    result = view.calibration
    if result is None:
        raise MissingDataError("no calibration is given; `react-clip calibrate --out FILE` writes one")
    images = max((point.images for point in result.points), default=0)
    about = ", ".join(str(result.provenance[key]) for key in ("model", "attack") if key in result.provenance)
    caption = (
        "Each star is one budget: the mean relative cross-noise drift of attacked photos, and the fixed anchor scale "
        f"that recovers most of them. The curves are least-squares fits. {images:,} photos that undefended CLIP gets "
        f"right{f' ({about})' if about else ''}; the attacker does not know the defence."
    )
    return [
        FigureOf("calibration", "From drift to anchor scale", caption, "Figure 5", lambda: calibration_figure(result))
    ]


def calibration_figure(result: Calibration) -> Figure:
    """Calibration points and the fitted curves, each labelled where it ends."""
    figure = new_figure()
    axes = new_axes(figure)
    drifts = [point.mean_drift for point in result.points]
    grid = torch.linspace(0.0, 1.12 * max(drifts), 200)
    ends, top = [], max(point.best_sigma for point in result.points)
    curves: list[tuple[float, float]] = []
    for name, fit in result.fits.items():
        values = fit(grid)
        used = fit == result.config.mapping
        colour = COLOURS.get(name, INK)
        axes.plot(grid.tolist(), values.tolist(), color=colour, linewidth=2.2 if used else 1.2)
        label = MAPPING_NAMES.get(name, name) + (" (used)" if used else "")
        ends.append(End(label, float(grid[-1]), float(values[-1]), colour))
        top = max(top, float(values.max()))
        curves += zip(grid[::4].tolist(), values[::4].tolist(), strict=True)
    for point in result.points:
        axes.plot(point.mean_drift, point.best_sigma, marker="*", markersize=11, color=INK, linestyle="none")
    axes.set_xlim(0, float(grid[-1]))
    axes.set_ylim(0, 1.12 * top)
    name_axes(axes, "mean relative cross-noise drift r", "best anchor scale σ (pixels in [0, 1])")
    label_ends(axes, ends)
    label_points(axes, [(point.mean_drift, point.best_sigma, format_eps(point.eps)) for point in result.points], curves)
    return figure
