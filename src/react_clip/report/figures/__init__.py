"""The paper's figures, made from a run; for figures without data, one line says what is missing."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

from react_clip.calibration import Calibration
from react_clip.report.figures import accuracy, distributions, leakage, sweeps
from react_clip.report.figures.base import Draft, FigureOf, MissingDataError, View
from react_clip.report.figures.sweeps import calibration_figure
from react_clip.report.run import Run, conditions
from react_clip.report.style import slug

__all__ = ["FigureOf", "calibration_figure", "figures_of"]

_KINDS: dict[str, Callable[[View], list[Draft]]] = {
    "accuracy": accuracy.across_budgets,
    "anchor-scale": sweeps.anchor_scale,
    "drift": distributions.drift,
    "gate-scores": distributions.gate_scores,
    "scales": distributions.scales,
    "mappings": accuracy.per_mapping,
    "beyond": partial(accuracy.across_budgets, beyond=True),
    "sweep-tau": partial(sweeps.sensitivity, field="tau", recipe="recipes/table3.yaml"),
    "sweep-views": partial(sweeps.sensitivity, field="views", recipe="recipes/sweep-views.yaml"),
    "sweep-alpha": partial(sweeps.sensitivity, field="alpha", recipe="recipes/sweep-alpha.yaml"),
    "sweep": sweeps.sensitivity,
    "cost": accuracy.against_cost,
    "accuracy-per-set": accuracy.per_set,
    "drift-per-set": partial(distributions.drift, per_set=True),
    "gate-scores-per-set": partial(distributions.gate_scores, per_set=True),
    "scales-per-set": distributions.scales_per_set,
    "leakage-counts": partial(leakage.over_grid, leakage.leaked),
    "leakage-reported": partial(leakage.over_grid, leakage.reported),
    "leakage-corrected": partial(leakage.over_grid, leakage.corrected),
    "leakage-published": leakage.published,
    "leakage-control": leakage.control,
}
"""Kinds of figures; a run may have several of one kind, one for each sweep, mapping or method."""


def figures_of(run: Run, *, calibration: Calibration | None = None) -> tuple[list[FigureOf], dict[str, str]]:
    """The figures that a run has data for, and for each other kind one line that says what is missing.

    Args:
        run: a run of :func:`react_clip.report.run.read_runs`.
        calibration: points and fits to show beside the run.
    """
    rows = run.result.rows if run.result is not None else ()
    attacks: list[str | None] = list(dict.fromkeys(row.attack for row in rows if row.eps))
    views = [View(run, attack, calibration) for attack in attacks or [None]]
    figures: list[FigureOf] = []
    reasons: dict[str, str] = {}
    for kind in _KINDS:
        drawn: list[FigureOf] = []
        for view in views:
            try:
                drawn += _figures(kind, view, f"-{slug(str(view.attack))}" if len(views) > 1 else "")
            except MissingDataError as reason:
                reasons.setdefault(kind, f"{kind} ({_texts()[kind]['paper']}): {reason}")
        figures += drawn
        if drawn:
            reasons.pop(kind, None)
    if calibration is not None:
        draft = sweeps.of_calibration(calibration)
        texts = _texts()["calibration"]
        caption = texts["what"].format(**draft.values)
        figures.append(FigureOf("calibration", texts["title"], caption, texts["paper"], draft.make))
    else:
        words = "no calibration is given; `react-clip calibrate --out FILE` writes one"
        reasons["calibration"] = f"calibration (Figure 5): {words}"
    return figures, reasons


def _figures(kind: str, view: View, attack: str) -> list[FigureOf]:
    """All figures of one kind; raises :class:`MissingDataError` where there is none.

    Args:
        kind: a key of ``_KINDS``.
        view: the run under one attack.
        attack: added to names where a run has several attacks.
    """
    result = view.result
    if view.budgets and kind.endswith("-per-set") and len(view.sets) < 2:
        raise MissingDataError("it has one data set; name several under `datasets`")
    images = sum(info.images for info in result.sets)
    sets = f"{len(result.sets)} data sets" if len(result.sets) != 1 else result.sets[0].name
    about = f"{images:,} images of {sets}; {result.model}; attack: {view.attack or 'none'}. {conditions(result)}"
    names: list[str] = []
    figures = []
    for draft in _KINDS[kind](view):
        title, what, band = (_texts()[kind][part].format(**draft.values) for part in ("title", "what", "band"))
        name = "-".join(filter(None, [kind, draft.suffix])) + attack
        names.append(name)
        number = f"-{names.count(name)}" if names.count(name) > 1 else ""
        title = f"{title}, {view.attack}" if attack else title
        figures.append(FigureOf(name + number, title, f"{what} {about} {band}", _texts()[kind]["paper"], draft.make))
    return figures


@cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    """Title, place in the paper, and first and last sentence of the caption, by kind of figure."""
    return tomllib.loads(Path(__file__).with_name("captions.toml").read_text(encoding="utf-8"))
