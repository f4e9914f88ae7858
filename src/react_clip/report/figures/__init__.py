"""The paper's figures, each made from a run: what a run has data for, and one line for what it has not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import CLEAN
from react_clip.report.figures import (
    accuracy,
    calibrated,
    cost,
    distributions,
    drift,
    leakage,
    leakage_checks,
    parameters,
)
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.calibrated import calibration_figure
from react_clip.report.figures.labels import spread
from react_clip.report.run import Run
from react_clip.report.style import save_figure, slug

__all__ = ["FigureOf", "all_figures", "calibration_figure", "spread", "why_not", "write_figures"]

Progress = Callable[[str, int, int], None]
"""Called with a figure's name, the figures written and the figures in all."""


@dataclass(frozen=True)
class _Family:
    """A figure, or one figure of each sweep, mapping or method."""

    name: str
    what: str
    build: Callable[[View], list[FigureOf]]
    per_attack: bool = True


_FAMILIES = (
    _Family("accuracy", "Figure 1, accuracy across budgets", accuracy.across_budgets),
    _Family("anchor-scale", "Figure 3, a fixed anchor scale", parameters.anchor_scale),
    _Family("drift", "Figure 4, drift across budgets", drift.signals),
    _Family("calibration", "Figure 5, calibration", calibrated.calibration, per_attack=False),
    _Family("gate-scores", "Figure 6, what the gate sees", distributions.gate_scores),
    _Family("scales", "Figure 7, correction scales", distributions.scales),
    _Family("mappings", "Figure 8, accuracy per mapping", accuracy.per_mapping),
    _Family("beyond", "Figure 9, beyond the calibrated range", accuracy.beyond_range),
    _Family("sweep-tau", "appendix, threshold", partial(parameters.sensitivity, "tau")),
    _Family("sweep-views", "appendix, number of views", partial(parameters.sensitivity, "views")),
    _Family("sweep-alpha", "appendix, extrapolation strength", partial(parameters.sensitivity, "alpha")),
    _Family("sweep", "sweeps over other numbers", parameters.others),
    _Family("cost", "cost against accuracy", cost.against_accuracy),
    _Family("accuracy-per-set", "appendix, accuracy set by set", accuracy.per_set),
    _Family("drift-per-set", "appendix, drift set by set", drift.per_set),
    _Family("gate-scores-per-set", "appendix, what the gate sees set by set", distributions.gate_scores_per_set),
    _Family("scales-per-set", "appendix, correction scales set by set", distributions.scales_per_set),
    _Family("leakage", "appendix, label leakage", leakage.over_grid),
    _Family("leakage-published", "appendix, leakage as published", leakage_checks.published),
    _Family("leakage-control", "appendix, leakage without an attack", leakage_checks.control),
)


def all_figures(
    run: Run, *, timings: Mapping[str, float] | None = None, calibration: Calibration | None = None
) -> list[FigureOf]:
    """The figures that a run has data for; nothing is drawn before a figure's ``make`` is called.

    Args:
        run: what :func:`react_clip.report.run.read_runs` returns.
        timings: milliseconds per image by defence; cost is counted in encoder passes without it.
        calibration: points and fits to show beside the run.
    """
    return _sorted_out(run, timings, calibration)[0]


def why_not(
    run: Run, *, timings: Mapping[str, float] | None = None, calibration: Calibration | None = None
) -> dict[str, str]:
    """One line for each figure that a run has no data for: what it lacks, and which recipe would have it."""
    return _sorted_out(run, timings, calibration)[1]


def write_figures(
    run: Run,
    folder: str | Path,
    progress: Progress | None = None,
    *,
    timings: Mapping[str, float] | None = None,
    calibration: Calibration | None = None,
) -> list[Path]:
    """Write every figure as ``<name>.png`` and ``.svg``; returns the files."""
    written = []
    figures = all_figures(run, timings=timings, calibration=calibration)
    for done, figure in enumerate(figures, start=1):
        path = Path(folder) / figure.name
        save_figure(figure.make(), path)
        written += [path.with_name(figure.name + suffix) for suffix in (".png", ".svg")]
        if progress is not None:
            progress(figure.name, done, len(figures))
    return written


def _sorted_out(
    run: Run, timings: Mapping[str, float] | None, calibration: Calibration | None
) -> tuple[list[FigureOf], dict[str, str]]:
    rows = run.result.rows if run.result is not None else ()
    attacks: list[str | None] = list(dict.fromkeys(row.attack for row in rows if row.attack != CLEAN.label))
    views = [View(run, attack, timings, calibration) for attack in attacks or [None]]
    figures: list[FigureOf] = []
    reasons: dict[str, str] = {}
    for family in _FAMILIES:
        found: list[FigureOf] = []
        for view in views if family.per_attack else views[:1]:
            try:
                found += [_told_apart(figure, view, len(views) > 1) for figure in family.build(view)]
            except MissingDataError as lack:
                reasons.setdefault(family.name, f"{family.what}: {lack}")
        figures += found
        if found:
            reasons.pop(family.name, None)
    return figures, reasons


def _told_apart(figure: FigureOf, view: View, several: bool) -> FigureOf:
    """Where a run has several attacks, a figure says which one it is of."""
    if not several or figure.name == "calibration":
        return figure
    name, title = f"{figure.name}-{slug(str(view.attack))}", f"{figure.title}, {view.attack}"
    return dataclasses.replace(figure, name=name, title=title)
