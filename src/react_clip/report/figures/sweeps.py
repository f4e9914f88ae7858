"""Accuracy against swept numbers of a defence, and the points and curves of a calibration.

``react-clip evaluate`` writes each defence's ``family`` and ``params`` (the swept fields) into ``result.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from react_clip.calibration import Calibration, best_scale
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import format_eps, value_at
from react_clip.report import style
from react_clip.report.figures import plot
from react_clip.report.figures.base import Draft, MissingDataError, View

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
_IN_PAPER = ("tau", "views", "alpha", SCALE, "mapping.kind")
"""Fields that have figures of their own."""
_PUBLISHED_ALPHA = 2.0
"""The extrapolation strength at which the paper sweeps the anchor scale."""

_STAR: style.Line = {"marker": "*", "markersize": 11}

Settings = Mapping[str, Mapping[str, Any]]
"""Entries of a recipe's ``defenses`` by label."""


@dataclass(frozen=True)
class Sweep:
    """Defences of one family that differ in one or two fields; not every pair of values has to be there."""

    kind: str
    fields: tuple[str, ...]
    cells: Mapping[tuple[Any, ...], str]
    """Label of the defence for each combination of values, in the order of ``fields``."""
    alpha: float | None = None
    """Extrapolation strength that all share, where they have one."""

    def values(self, field: str) -> list[float]:
        """The values of one field, rising."""
        axis = self.fields.index(field)
        return sorted({cell[axis] for cell in self.cells})

    def along(self, field: str, other: float | None = None) -> list[tuple[float, str]]:
        """Values of one field, rising, with their labels; of two fields, the second one has the value ``other``."""
        axis = self.fields.index(field)
        cells = ((cell, label) for cell, label in self.cells.items() if other is None or cell[1 - axis] == other)
        return sorted((cell[axis], label) for cell, label in cells)


def sweeps_of(settings: Settings) -> list[Sweep]:
    """The sweeps of a recipe: families with one or two swept numbers, or with several kinds of mapping.

    A number needs three values (two are a comparison); of two numbers, one may have two.
    """
    families: dict[tuple[str, ...], list[str]] = {}
    for label, entry in settings.items():
        if entry.get("params"):
            families.setdefault((str(entry.get("family", label)), *entry["params"]), []).append(label)
    sweeps = []
    for (_, *fields), labels in families.items():
        cells = {tuple(settings[label]["params"].values()): label for label in labels}
        counts = sorted(len(set(values)) for values in zip(*cells, strict=True))
        numbers = all(_is_number(value) for cell in cells for value in cell)
        if (fields == ["mapping.kind"] and counts[0] > 1) or (
            numbers and len(fields) <= 2 and counts[0] >= 2 and counts[-1] >= 3
        ):
            first = settings[labels[0]]
            sweeps.append(Sweep(str(first.get("kind", "")), tuple(fields), cells, first.get("alpha")))
    return sweeps


def along(table: pd.DataFrame, points: Sequence[tuple[float, str]], eps: float) -> pd.DataFrame:
    """Rows of some defences at one budget, from a table indexed by budget and defence.

    ``points`` are values and labels; the values are the index of what is returned. Labels that the table does not have
    are left out.
    """
    known = [(value, label) for value, label in points if (eps, label) in table.index]
    rows = table.loc[[(eps, label) for _, label in known]]
    return rows.set_axis(pd.Index([value for value, _ in known], dtype=float), axis="index")


def methods_of(view: View) -> list[str]:
    """Labels of the defences that are methods of their own, not points of a sweep or one mapping among several."""
    swept = {label for sweep in sweeps_of(view.settings) for label in sweep.cells.values()}
    methods = [label for label in view.defenses if label not in swept]
    if len(methods) < 2 and swept:
        raise MissingDataError(
            "its defences are points of a sweep, not methods to compare; recipes/table1.yaml compares them"
        )
    return methods


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---------------------------------------------------------------------- figures


def anchor_scale(view: View) -> list[Draft]:
    """Accuracy against a fixed anchor scale; each budget has its own best one (Figure 3)."""
    drafts = []
    for sweep in sweeps_of(view.settings):
        if sweep.fields != (SCALE,) and set(sweep.fields) != {SCALE, "alpha"}:
            continue
        alpha, other = sweep.alpha, None
        if "alpha" in sweep.fields:
            alphas = sweep.values("alpha")
            alpha = other = _PUBLISHED_ALPHA if _PUBLISHED_ALPHA in alphas else alphas[-1]
        at = "" if alpha is None else f" at α = {alpha:g}"
        make = partial(_figure, view, SCALE, sweep.along(SCALE, other))
        drafts.append(Draft(make, {"kind": sweep.kind, "at": at}))
    if not drafts:
        raise MissingDataError(
            "no defences differ in a constant anchor scale alone; recipes/anchor-scale.yaml sweeps it"
        )
    return drafts


def sensitivity(view: View, *, field: str = "", recipe: str = "") -> list[Draft]:
    """Accuracy against one field, its default marked (figures of the appendix), or against any other number."""
    drafts = []
    for sweep in sweeps_of(view.settings):
        name = sweep.fields[0]
        if len(sweep.fields) == 1 and (name == field if field else name not in _IN_PAPER):
            make = partial(_figure, view, name, sweep.along(name), default=default_of(sweep.kind, name))
            suffix = "" if field else f"{style.slug(sweep.kind)}-{style.slug(name)}"
            drafts.append(Draft(make, {"kind": sweep.kind, "field": NAMES.get(name, name)}, suffix))
    if not drafts and field:
        raise MissingDataError(f"no defences differ in {field} alone; {recipe} sweeps it")
    if not drafts:
        raise MissingDataError("no defences differ in one other number alone; a recipe's `grid` sweeps any field")
    return drafts


def _figure(view: View, field: str, points: list[tuple[float, str]], *, default: float | None = None) -> Figure:
    """One line per budget; the best anchor scale has a star, the default of another field a vertical line."""
    figure, axes = plot.chart(3.1)
    ceiling = view.ceiling() if "undefended" in view.kinds.values() else math.nan
    highest = [ceiling]
    for eps in (0.0, *view.budgets):
        rows = along(view.means, points, eps)
        plot.interval_line(axes, rows, style.budget_line(eps), label=plot.budget_name(eps))
        highest += rows["high"].tolist()
        known = rows["accuracy"].dropna()
        if field == SCALE and len(known):
            best = best_scale(known.index.tolist(), known.tolist())
            axes.plot(
                [best], [known[best]], color=style.budget_colour(eps), markeredgecolor=style.INK, zorder=5, **_STAR
            )
    plot.percent_axis(axes, highest)
    plot.ceiling_line(axes, ceiling)
    low, high = points[0][0], points[-1][0]
    margin = 0.03 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    if default is not None and low <= default <= high:
        axes.axvline(default, color=style.INK, linewidth=0.8, linestyle=(0, (2, 2)), alpha=0.7, zorder=1)
        side, offset = ("left", 3.0) if default < (low + high) / 2 else ("right", -3.0)
        plot.note(axes, f"default {default:g}", (default, 0.0), ("data", "axes fraction"), (offset, 4.0), ha=side)
    style.name_axes(axes, NAMES.get(field, field))
    plot.label_ends(figure)
    return figure


# ---------------------------------------------------------------------- calibration


def of_calibration(result: Calibration) -> Draft:
    """The points of a calibration and its fits (Figure 5)."""
    images = max((point.images for point in result.points), default=0)
    about = ", ".join(str(result.provenance[key]) for key in ("model", "attack") if key in result.provenance)
    return Draft(partial(calibration_figure, result), {"images": images, "about": f" ({about})" if about else ""})


def calibration_figure(result: Calibration) -> Figure:
    """Calibration points and the fitted curves, each labelled at its end."""
    figure, axes = plot.chart(3.2)
    stars = [(point.mean_drift, point.best_sigma, format_eps(point.eps)) for point in result.points]
    grid = torch.linspace(0.0, 1.12 * max(x for x, _, _ in stars), 200)
    x = grid.tolist()
    curves = {name: fit(grid).tolist() for name, fit in result.fits.items()}
    for name, values in curves.items():
        used = result.fits[name] == result.config.mapping
        label = MAPPING_NAMES.get(name, name) + (" (used)" if used else "")
        colour = style.MAPPINGS.get(name, style.INK)
        axes.plot(x, values, color=colour, linewidth=2.2 if used else 1.2, label=label)
    for drift, sigma, _ in stars:
        axes.plot(drift, sigma, color=style.INK, linestyle="none", **_STAR)
    axes.set_xlim(0, x[-1])
    axes.set_ylim(0, 1.12 * max(*(sigma for _, sigma, _ in stars), *map(max, curves.values()), 0.0))
    style.name_axes(axes, "mean relative cross-noise drift r", "best anchor scale σ (pixels in [0, 1])")
    plot.label_ends(figure)
    plot.label_points(axes, stars, [point for y in curves.values() for point in zip(x[::4], y[::4], strict=True)])
    return figure
