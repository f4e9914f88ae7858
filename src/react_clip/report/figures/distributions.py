"""Distributions over images as violins: what the gate sees, and the scale that the drift is mapped to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from react_clip import mappings
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures.accuracy import MAPPING_NAMES
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.drift import MEASURED, source_of
from react_clip.report.figures.parts import panels
from react_clip.report.style import INK, PAPER, SMALL, TEXT, budget_colour, new_axes, new_figure, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = NDArray[np.float64]
Scale = Callable[[float, str], Values]
"""Scales of the counted images at a budget, on a data set or all."""

_SCORES = {"r": "drift r", "J": "instability J", "score": "score r + J"}
_VIOLIN = "Violins are densities over images, with the median and the middle half"
_GUARD = "the dashed line is what 95 % of the clean images stay below"


def gate_scores(view: View) -> list[FigureOf]:
    """r, J and their sum, clean and per budget (Figure 6)."""
    source = source_of(view, "J")
    what = f"what the gate sees of images that undefended CLIP gets right, as {source!r} measures it, all sets together"
    return [
        FigureOf(
            "gate-scores",
            "Complementary evidence for intervention",
            view.caption(what, f"{_VIOLIN}; {_GUARD}"),
            "Figure 6",
            lambda: _scores_figure(view, source, [MEAN]),
        )
    ]


def gate_scores_per_set(view: View) -> list[FigureOf]:
    """The same for every data set (figures of the appendix)."""
    view.require(sets=2)
    source = source_of(view, "J")
    what = (
        f"what the gate sees of images that undefended CLIP gets right, as {source!r} measures it, one row a data set"
    )
    return [
        FigureOf(
            "gate-scores-per-set",
            "Complementary evidence for intervention, set by set",
            view.caption(what, f"{_VIOLIN}; {_GUARD}"),
            "Appendix, intervention-metric distributions",
            lambda: _scores_figure(view, source, view.sets),
        )
    ]


def scales(view: View) -> list[FigureOf]:
    """Which anchor scales the mappings give (Figure 7)."""
    found = _scales(view)
    what = "anchor scales that each mapping gives to images which undefended CLIP gets right, all data sets together"
    return [
        FigureOf(
            "scales",
            "Distribution of sample-specific correction scales",
            view.caption(what, _VIOLIN),
            "Figure 7",
            lambda: _scales_figure(view, found),
        )
    ]


def scales_per_set(view: View) -> list[FigureOf]:
    """The same for every data set, one figure a mapping (figures of the appendix)."""
    view.require(sets=2)
    return [
        FigureOf(
            f"scales-per-set-{slug(name)}",
            f"Correction scales set by set, {name}",
            view.caption(f"anchor scales of the {name} mapping for images that undefended CLIP gets right", _VIOLIN),
            "Appendix, per-dataset correction-scale distributions",
            lambda scale=scale: _scales_sets_figure(view, scale),  # type: ignore[misc]
        )
        for name, scale in _scales(view).items()
    ]


def _scales(view: View) -> dict[str, Scale]:
    """A function for every mapping of the run, and for the fits of a calibration that comes with it.

    The scale that a run kept is taken as it is; where it kept none, it follows from r.
    """
    view.require()
    found: dict[str, tuple[str, mappings.Mapping, bool]] = {}
    for label, config in view.settings.items():
        mapping = _mapping(config)
        rows = view.of(label)
        kept, drifts = (len(rows) and np.isfinite(rows[name]).mean() >= MEASURED for name in ("sigma", "r"))
        seen = any(mapping == other for _, other, _ in found.values())
        if mapping is None or isinstance(mapping, mappings.Constant) or seen or not (kept or drifts):
            continue
        found[label] = (label, mapping, bool(kept))
    if view.calibration is not None:
        source = source_of(view, "r")
        for name, fit in view.calibration.fits.items():
            if all(fit != other for _, other, _ in found.values()):
                found[f"calibrated {MAPPING_NAMES.get(name, name)}"] = (source, fit, False)
    if not found:
        raise MissingDataError("no defence of it maps a drift to a scale; recipes/table1.yaml runs react, which does")
    kinds = [mapping.kind for _, mapping, _ in found.values()]
    return {
        _mapping_title(name, mapping, kinds): _scale(view, label, mapping, kept)
        for name, (label, mapping, kept) in found.items()
    }


def _mapping(config: dict[str, Any]) -> mappings.Mapping | None:
    try:
        return mappings.Mapping.from_dict(config["mapping"])
    except (KeyError, TypeError, ValueError, ReactClipError):
        return None


def _mapping_title(name: str, mapping: mappings.Mapping, kinds: Sequence[str]) -> str:
    kind = MAPPING_NAMES.get(mapping.kind, mapping.kind)
    return kind if kinds.count(mapping.kind) == 1 else f"{kind}, {name}"


def _scale(view: View, label: str, mapping: mappings.Mapping, kept: bool) -> Scale:
    def values(eps: float, dataset: str) -> Values:
        rows = view.right(label, eps, dataset)
        return _finite(rows["sigma"] if kept else mapping(torch.as_tensor(_finite(rows["r"]))).numpy())

    return values


def _finite(values: Any) -> Values:
    numbers = np.asarray(values, dtype=np.float64)
    return numbers[np.isfinite(numbers)]


def _scores_figure(view: View, source: str, sets: Sequence[str]) -> Figure:
    together = list(sets) == [MEAN]
    figure = new_figure(height=2.5 if together else 0.5 + 1.15 * len(sets))
    firsts: list[Axes] = []
    for row, dataset in enumerate(sets):
        for column, (signal, title) in enumerate(_SCORES.items()):
            share = firsts[column] if row else None
            axes = new_axes(
                figure, len(sets), len(_SCORES), row * len(_SCORES) + column + 1, sharex=share, sharey=share
            )
            firsts += [axes] if not row else []
            values = [_finite(view.right(source, eps, dataset)[signal]) for eps in (0.0, *view.budgets)]
            violins(axes, values, view.budgets)
            _clean_line(axes, values[0])
            axes.tick_params(labelbottom=row == len(sets) - 1)
            words = title if together else f"{dataset}, {signal if signal != 'score' else 'r + J'}"
            axes.set_title(words, fontsize=TEXT if together else SMALL, color=INK, loc="left", pad=4)
    figure.supxlabel("attack budget ε in 1/255", fontsize=TEXT, color=INK)
    return figure


def _scales_figure(view: View, found: dict[str, Scale]) -> Figure:
    return _scale_panels(view, {name: (scale, MEAN) for name, scale in found.items()}, columns=1, height=1.35)


def _scales_sets_figure(view: View, scale: Scale) -> Figure:
    return _scale_panels(view, {name: (scale, name) for name in view.sets}, columns=3, height=1.2)


def _scale_panels(view: View, wanted: dict[str, tuple[Scale, str]], columns: int, height: float) -> Figure:
    budgets = (0.0, *view.budgets)
    values = {name: [scale(eps, dataset) for eps in budgets] for name, (scale, dataset) in wanted.items()}
    top = max((float(numbers.max()) for found in values.values() for numbers in found if len(numbers)), default=1.0)

    def draw(axes: Axes, name: str) -> None:
        violins(axes, values[name], view.budgets)
        axes.set_ylim(0, 1.06 * top or 1.0)

    figure = panels(list(wanted), draw, columns=columns, height=height)
    figure.supxlabel("attack budget ε in 1/255", fontsize=TEXT, color=INK)
    figure.supylabel("anchor scale σ (pixels in [0, 1])", fontsize=TEXT, color=INK)
    return figure


def violins(axes: Axes, values: Sequence[Values], budgets: Sequence[float]) -> None:
    """One violin a budget, clean images first, with the median and the middle half inside."""
    for place, (eps, numbers) in enumerate(zip((0.0, *budgets), values, strict=True)):
        if not len(numbers):
            continue
        colour = budget_colour(eps)
        # A density needs numbers that differ; what is all the same is its own picture.
        if len(numbers) > 2 and np.ptp(numbers) > 1e-9:
            drawn: Any = axes.violinplot([numbers], positions=[place], widths=0.85, showextrema=False)
            for part in drawn["bodies"]:
                part.set(facecolor=colour, alpha=0.55, edgecolor=colour, linewidth=0.6)
        first, median, third = np.percentile(numbers, [25, 50, 75])
        axes.vlines(place, first, third, color=INK, linewidth=2.2)
        axes.plot([place], [median], marker="o", markersize=3.2, color=PAPER, markeredgecolor=INK, linestyle="none")
    axes.set_xticks(range(len(budgets) + 1), ["clean", *(f"{255 * eps:.4g}" for eps in budgets)])
    axes.set_xlim(-0.6, len(budgets) + 0.6)


def _clean_line(axes: Axes, clean: Values) -> None:
    if len(clean):
        level = float(np.percentile(clean, 95))
        axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), alpha=0.75, zorder=1)
