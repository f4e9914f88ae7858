"""Accuracy against swept numbers of a defence, and the points and curves of a calibration.

``react-clip evaluate`` writes each defence's ``family`` and ``params`` (the swept fields) into ``result.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from react_clip.calibration import Calibration, best_scale
from react_clip.errors import ReactClipError
from react_clip.evaluation.grid import value_at
from react_clip.evaluation.recipe import format_eps
from react_clip.evaluation.result import Row
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import INTERVAL, FigureOf, MissingDataError, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 3
"""Values that make a sweep; two are a comparison."""
SCALE = "mapping.sigma"
NAMES = {
    "tau": "intervention threshold τ",
    "views": "number of anchor views M",
    "alpha": "extrapolation strength α",
    SCALE: "anchor scale σ (pixels in [0, 1])",
    "probe_samples": "noise draws per probe",
    "sigma_low": "weak probe noise (pixels in [0, 1])",
    "sigma_high": "strong probe noise (pixels in [0, 1])",
}
MAPPING_NAMES = {"linear": "linear", "logistic": "logistic", "power_law": "power law", "constant": "fixed scale"}
_PAPER = {
    "tau": ("Appendix, sensitivity to the threshold", "recipes/table3.yaml"),
    "views": ("Appendix, number of anchor views", "recipes/sweep-views.yaml"),
    "alpha": ("Appendix, extrapolation strength", "recipes/sweep-alpha.yaml"),
}
_PUBLISHED_ALPHA = 2.0
"""The extrapolation strength at which the paper sweeps the anchor scale."""

Settings = Mapping[str, Mapping[str, Any]]
"""Entries of a recipe's ``defenses`` by label."""


@dataclass(frozen=True)
class Sweep:
    """Defences that differ in one number."""

    kind: str
    field: str
    points: tuple[tuple[float, str], ...]
    """Values of the field, rising, each with its defence's label."""
    alpha: float | None = None
    """Extrapolation strength that all share, where they have one."""


@dataclass(frozen=True)
class Grid:
    """Defences that differ in two numbers; not every pair has to be there."""

    kind: str
    fields: tuple[str, str]
    cells: Mapping[tuple[float, float], str]

    def values(self, field: str) -> list[float]:
        """The values of one field, rising."""
        axis = self.fields.index(field)
        return sorted({cell[axis] for cell in self.cells})

    def along(self, field: str, at: float) -> tuple[tuple[float, str], ...]:
        """Values of one field and labels, in the cells whose other field has the value ``at``."""
        axis = self.fields.index(field)
        return tuple(sorted((cell[axis], label) for cell, label in self.cells.items() if cell[1 - axis] == at))


def sweeps_of(settings: Settings) -> list[Sweep]:
    """Families with one swept number and at least three values of it."""
    found = []
    for (_, *fields), labels in _families(settings).items():
        points = {settings[label]["params"][fields[0]]: label for label in labels}
        if len(fields) == 1 and len(points) >= LEAST and all(map(_is_number, points)):
            entry = settings[labels[0]]
            found.append(
                Sweep(str(entry.get("kind", "")), fields[0], tuple(sorted(points.items())), entry.get("alpha"))
            )
    return found


def grids_of(settings: Settings) -> list[Grid]:
    """Families with two swept numbers, at least two values of each and three of one."""
    found = []
    for (_, *fields), labels in _families(settings).items():
        cells = {tuple(settings[label]["params"].values()): label for label in labels}
        if len(fields) != 2 or not all(_is_number(value) for cell in cells for value in cell):
            continue
        counts = [len({cell[axis] for cell in cells}) for axis in (0, 1)]
        if min(counts) >= 2 and max(counts) >= LEAST:
            found.append(Grid(str(settings[labels[0]].get("kind", "")), (fields[0], fields[1]), cells))
    return found


def by_mapping(settings: Settings) -> list[dict[str, str]]:
    """Families that differ in the kind of their mapping alone: labels by kind, at least two kinds."""
    groups = [labels for (_, *fields), labels in _families(settings).items() if fields == ["mapping.kind"]]
    return [
        {settings[label]["params"]["mapping.kind"]: label for label in labels} for labels in groups if len(labels) > 1
    ]


def methods_of(view: View) -> list[str]:
    """Labels of the defences that are methods of their own, not points of a sweep or one mapping among several."""
    swept = {label for sweep in sweeps_of(view.settings) for _, label in sweep.points}
    swept |= {label for grid in grids_of(view.settings) for label in grid.cells.values()}
    swept |= {label for group in by_mapping(view.settings) for label in group.values()}
    found = [label for label in view.defenses if label not in swept]
    if len(found) < 2 and swept:
        raise MissingDataError(
            "its defences are points of a sweep, not methods to compare; recipes/table1.yaml compares them"
        )
    return found


def default_of(kind: str, field: str) -> float | None:
    """A field's default, or ``None`` where there is none that a figure could mark.

    >>> default_of("react", "alpha"), default_of("aom", "mapping.sigma"), default_of("unheard-of", "alpha")
    (2.0, 0.1, None)
    """
    defense = style.defense_class(kind)
    if defense is None:
        return None
    try:
        value = value_at(defense().to_dict(), field)
    except (ReactClipError, TypeError):
        return None
    return float(value) if _is_number(value) else None


def _families(settings: Settings) -> dict[tuple[str, ...], list[str]]:
    """Labels by family and swept fields; defences outside of sweeps are left out."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, entry in settings.items():
        if entry.get("params"):
            groups.setdefault((str(entry.get("family", label)), *entry["params"]), []).append(label)
    return groups


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---------------------------------------------------------------------- figures


def anchor_scale(view: View) -> list[FigureOf]:
    """Accuracy against a fixed anchor scale; each budget has its own best one (Figure 3)."""
    view.require()
    found = [sweep for sweep in sweeps_of(view.settings) if sweep.field == SCALE]
    for grid in grids_of(view.settings):
        if set(grid.fields) == {SCALE, "alpha"}:
            strengths = grid.values("alpha")
            alpha = _PUBLISHED_ALPHA if _PUBLISHED_ALPHA in strengths else strengths[-1]
            found.append(Sweep(grid.kind, SCALE, grid.along(SCALE, alpha), alpha))
    if not found:
        raise MissingDataError(
            "no defences differ in a constant anchor scale alone; recipes/anchor-scale.yaml sweeps it"
        )
    figures = []
    for sweep in found:
        at = "" if sweep.alpha is None else f" at α = {sweep.alpha:g}"
        what = f"accuracy of {sweep.kind}{at} against its anchor scale, one line per budget, the mean over data sets; "
        what += "a star marks the best scale of each"
        name, title = _name("anchor-scale", sweep, found), "A fixed anchor scale is a compromise"
        make = partial(_figure, view, sweep, best=True)
        figures.append(view.figure(name, title, what, "Figure 3", make, band=f"Bands are {INTERVAL}"))
    return figures


def sensitivity(field: str, view: View) -> list[FigureOf]:
    """Accuracy against one field, its default marked (figures of the appendix)."""
    view.require()
    found = [sweep for sweep in sweeps_of(view.settings) if sweep.field == field]
    if not found:
        raise MissingDataError(f"no defences differ in {field} alone; {_PAPER[field][1]} sweeps it")
    return [_sensitivity(view, sweep, _name(f"sweep-{field}", sweep, found)) for sweep in found]


def others(view: View) -> list[FigureOf]:
    """Sweeps over any other field (not in the paper)."""
    view.require()
    found = [sweep for sweep in sweeps_of(view.settings) if sweep.field not in (*_PAPER, SCALE)]
    if not found:
        raise MissingDataError("no defences differ in one other number alone; a recipe's `grid` sweeps any field")
    return [_sensitivity(view, sweep, f"sweep-{style.slug(sweep.kind)}-{style.slug(sweep.field)}") for sweep in found]


def _sensitivity(view: View, sweep: Sweep, name: str) -> FigureOf:
    field = NAMES.get(sweep.field, sweep.field)
    what = f"accuracy of {sweep.kind} against {field}, one line per budget, the mean over data sets"
    title, paper = f"Sensitivity to {field.split(' (')[0]}", _PAPER.get(sweep.field, ("beyond the paper",))[0]
    band = f"Bands are {INTERVAL}; the vertical line is the default"
    return view.figure(name, title, what, paper, partial(_figure, view, sweep, best=False), band=band)


def _name(name: str, sweep: Sweep, among: Sequence[Sweep]) -> str:
    """A unique file name: with the method where a run has several sweeps, with a number where a method has several."""
    if len(among) == 1:
        return name
    number = [other for other in among if other.kind == sweep.kind].index(sweep)
    return f"{name}-{style.slug(sweep.kind)}" + (f"-{number + 1}" if number else "")


def _figure(view: View, sweep: Sweep, *, best: bool) -> Figure:
    figure = style.new_figure(height=3.1)
    axes = style.new_axes(figure)
    ends, highest = [], []
    for eps in (0.0, *view.budgets):
        points = [(value, row) for value, label in sweep.points if (row := view.at(label, eps)) is not None]
        if not points:
            continue
        _budget_line(axes, eps, points, best=best)
        ends.append(
            plot.End(plot.budget_name(eps), points[-1][0], 100 * points[-1][1].accuracy, style.budget_colour(eps))
        )
        highest += [row.high for _, row in points]
    ceiling = view.ceiling() if "undefended" in view.kinds.values() else math.nan
    plot.percent_axis(axes, [*highest, ceiling])
    plot.ceiling_line(axes, ceiling)
    values = [value for value, _ in sweep.points]
    margin = 0.03 * (values[-1] - values[0])
    axes.set_xlim(values[0] - margin, values[-1] + margin)
    if not best:
        _mark_default(axes, default_of(sweep.kind, sweep.field))
    style.name_axes(axes, NAMES.get(sweep.field, sweep.field))
    plot.label_ends(axes, ends)
    return figure


def _budget_line(axes: Axes, eps: float, points: Sequence[tuple[float, Row]], *, best: bool) -> None:
    x = [value for value, _ in points]
    low, middle, high = ([100 * getattr(row, name) for _, row in points] for name in ("low", "accuracy", "high"))
    plot.interval_line(axes, x, low, middle, high, style.budget_line(eps))
    if best and any(math.isfinite(value) for value in middle):
        at = best_scale(x, [value if math.isfinite(value) else -1.0 for value in middle])
        star: dict[str, Any] = {"marker": "*", "markersize": 11, "markeredgecolor": style.INK, "zorder": 5}
        axes.plot([at], [middle[x.index(at)]], color=style.budget_colour(eps), **star)


def _mark_default(axes: Axes, default: float | None) -> None:
    low, high = axes.get_xlim()
    if default is None or not low <= default <= high:
        return
    axes.axvline(default, color=style.INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
    left = default < (low + high) / 2
    where: tuple[float, float] = (3, 4) if left else (-3, 4)
    plot.note(
        axes, f"default {default:g}", (default, 0.0), ("data", "axes fraction"), where, ha="left" if left else "right"
    )


# ---------------------------------------------------------------------- calibration


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
    make = partial(calibration_figure, result)
    return [FigureOf("calibration", "From drift to anchor scale", caption, "Figure 5", make)]


def calibration_figure(result: Calibration) -> Figure:
    """Calibration points and the fitted curves, each labelled at its end."""
    figure = style.new_figure()
    axes = style.new_axes(figure)
    drifts = [point.mean_drift for point in result.points]
    grid = torch.linspace(0.0, 1.12 * max(drifts), 200)
    ends, top = [], max(point.best_sigma for point in result.points)
    curves: list[tuple[float, float]] = []
    for name, fit in result.fits.items():
        values = fit(grid)
        used = fit == result.config.mapping
        colour = style.MAPPINGS.get(name, style.INK)
        axes.plot(grid.tolist(), values.tolist(), color=colour, linewidth=2.2 if used else 1.2)
        label = MAPPING_NAMES.get(name, name) + (" (used)" if used else "")
        ends.append(plot.End(label, float(grid[-1]), float(values[-1]), colour))
        top = max(top, float(values.max()))
        curves += zip(grid[::4].tolist(), values[::4].tolist(), strict=True)
    for point in result.points:
        axes.plot(point.mean_drift, point.best_sigma, marker="*", markersize=11, color=style.INK, linestyle="none")
    axes.set_xlim(0, float(grid[-1]))
    axes.set_ylim(0, 1.12 * top)
    style.name_axes(axes, "mean relative cross-noise drift r", "best anchor scale σ (pixels in [0, 1])")
    plot.label_ends(axes, ends)
    plot.label_points(
        axes, [(point.mean_drift, point.best_sigma, format_eps(point.eps)) for point in result.points], curves
    )
    return figure
