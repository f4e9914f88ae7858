"""Draw the figures of the documents from the runs in ``benchmarks/results``.

python tools/draw_figures.py    # writes docs/figures/RUN-NAME.svg
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import format_eps
from react_clip.evaluation.results import EvaluationResult, join
from react_clip.report.figures import KINDS
from react_clip.report.style import budget_colour, legend, new_figure, save_figure, style_axes

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
WANTED: dict[str, tuple[list[str], list[str]]] = {
    "table1": (["table1", "rivals", "finetuned"], ["accuracy", "sets"]),
    "extended": (["table1-extended", "extended"], ["accuracy"]),
    "table4": (["table4"], ["scores"]),
    "second-look": (["second-look"], ["accuracy"]),
    "standard": (["standard"], ["passes"]),
    "leakage": (["leakage"], ["leakage"]),
}
"""Name of the files: the runs, and the kinds of figure that documents show."""


def main() -> None:
    """Draw everything; a run without data for a figure is an error."""
    for name, (runs, kinds) in WANTED.items():
        result = join([EvaluationResult.load(RESULTS / run) for run in runs])
        for kind in kinds:
            save_figure(KINDS[kind][1](result), FIGURES / f"{name}-{kind}")
    calibration = Calibration.load(RESULTS / "calibration" / "clip-vit-b-16.json")
    save_figure(calibration_figure(calibration), FIGURES / "calibration")
    for path in FIGURES.glob("*.png"):
        path.unlink()  # documents show SVG


def calibration_figure(calibration: Calibration) -> Figure:
    """Mean drift and best anchor scale of each budget (stars), and the fitted mappings."""
    figure = new_figure()
    x, y = "mean relative cross-noise drift r", "best anchor scale σ (pixels in [0, 1])"
    axes = style_axes(figure.add_subplot(), x, y)
    points = calibration.points
    grid = torch.linspace(0.0, 1.12 * max(point.mean_drift for point in points), 200)
    for name, fit in calibration.fits.items():
        used = fit == getattr(calibration.config, "mapping", None)
        label = name.replace("_", " ") + (" (used)" if used else "")
        axes.plot(grid, fit(grid), linewidth=2.2 if used else 1.2, label=label)
    for place, point in enumerate(points):
        colour = budget_colour(place + 1, len(points))
        star = {"marker": "*", "markersize": 11, "linestyle": "none", "color": colour}
        axes.plot([point.mean_drift], [point.best_sigma], label=format_eps(point.eps), **star)
    axes.set_ylim(bottom=0)
    legend(figure)
    return figure


if __name__ == "__main__":
    main()
