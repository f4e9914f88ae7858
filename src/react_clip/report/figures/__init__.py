"""The paper's figures, made from a run; for figures without data, one line says what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import CLEAN
from react_clip.report.figures import accuracy, distributions, leakage, sweeps
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.sweeps import calibration_figure
from react_clip.report.run import Run
from react_clip.report.style import slug

__all__ = ["FigureOf", "calibration_figure", "figures_of"]


@dataclass(frozen=True)
class _Kind:
    """A kind of figure; a run may have several of one kind, for each sweep, mapping or method."""

    name: str
    what: str
    build: Callable[[View], list[FigureOf]]


_KINDS = (
    _Kind("accuracy", "Figure 1, accuracy across budgets", accuracy.across_budgets),
    _Kind("anchor-scale", "Figure 3, a fixed anchor scale", sweeps.anchor_scale),
    _Kind("drift", "Figure 4, drift across budgets", distributions.drift),
    _Kind("calibration", "Figure 5, calibration", sweeps.calibration),
    _Kind("gate-scores", "Figure 6, what the gate sees", distributions.gate_scores),
    _Kind("scales", "Figure 7, correction scales", distributions.scales),
    _Kind("mappings", "Figure 8, accuracy per mapping", accuracy.per_mapping),
    _Kind("beyond", "Figure 9, beyond the calibrated range", accuracy.beyond_range),
    _Kind("sweep-tau", "appendix, threshold", partial(sweeps.sensitivity, "tau")),
    _Kind("sweep-views", "appendix, number of views", partial(sweeps.sensitivity, "views")),
    _Kind("sweep-alpha", "appendix, extrapolation strength", partial(sweeps.sensitivity, "alpha")),
    _Kind("sweep", "sweeps over other numbers", sweeps.others),
    _Kind("cost", "cost against accuracy", accuracy.against_cost),
    _Kind("accuracy-per-set", "appendix, accuracy set by set", accuracy.per_set),
    _Kind("drift-per-set", "appendix, drift set by set", partial(distributions.drift, per_set=True)),
    _Kind("gate-scores-per-set", "appendix, gate scores set by set", partial(distributions.gate_scores, per_set=True)),
    _Kind("scales-per-set", "appendix, correction scales set by set", distributions.scales_per_set),
    _Kind("leakage", "appendix, label leakage", leakage.over_grid),
    _Kind("leakage-published", "appendix, leakage as published", leakage.published),
    _Kind("leakage-control", "appendix, leakage without an attack", leakage.control),
)


def figures_of(run: Run, *, calibration: Calibration | None = None) -> tuple[list[FigureOf], dict[str, str]]:
    """The figures that a run has data for, and for each other kind one line that says what is missing.

    Args:
        run: a run of :func:`react_clip.report.run.read_runs`.
        calibration: points and fits to show beside the run.
    """
    rows = run.result.rows if run.result is not None else ()
    attacks: list[str | None] = list(dict.fromkeys(row.attack for row in rows if row.attack != CLEAN.label))
    views = [View(run, attack, calibration) for attack in attacks or [None]]
    figures: list[FigureOf] = []
    reasons: dict[str, str] = {}
    for kind in _KINDS:
        found: list[FigureOf] = []
        # A calibration has its own attack.
        for view in views if kind.name != "calibration" else views[:1]:
            try:
                found += [_with_attack(figure, view, len(views) > 1) for figure in kind.build(view)]
            except MissingDataError as reason:
                reasons.setdefault(kind.name, f"{kind.what}: {reason}")
        figures += found
        if found:
            reasons.pop(kind.name, None)
    return figures, reasons


def _with_attack(figure: FigureOf, view: View, several: bool) -> FigureOf:
    """Add the attack to a figure's name and title where a run has several attacks."""
    if not several or figure.name == "calibration":
        return figure
    name, title = f"{figure.name}-{slug(str(view.attack))}", f"{figure.title}, {view.attack}"
    return dataclasses.replace(figure, name=name, title=title)
