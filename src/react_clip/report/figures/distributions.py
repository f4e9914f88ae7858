"""Distributions over images: drift against the budget, gate scores and anchor scales as violins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from react_clip import mappings
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures import plot
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.sweeps import MAPPING_NAMES
from react_clip.report.style import COLOURS, INK, PAPER, SMALL, TEXT, budget_colour, new_axes, new_figure, slug

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = NDArray[np.float64]
Scale = Callable[[float, str], Values]
"""Anchor scales of the counted images at a budget, on one data set or on all."""

MEASURED = 0.95
"""Least share of images on which a signal must be known: the gate skips it for some images, not at random."""
_DRIFTS = {
    "d_low": ("weak noise, d_low", "#56B4E9", "^"),
    "d_high": ("strong noise, d_high", "#E69F00", "s"),
    "r": ("relative drift, r", COLOURS["react"], "o"),
}
_SCORES = {"r": "drift r", "J": "instability J", "score": "score r + J"}
_VIOLIN = "Violins are densities over images, with the median and the middle half"


def drift(view: View, *, per_set: bool = False) -> list[FigureOf]:
    """Drift against the budget, over all sets (Figure 4) or for every data set (appendix)."""
    view.require(sets=2 if per_set else 1)
    source = source_of(view, "r")
    known = _known_drifts(view, source)
    sets = "one row per data set" if per_set else "all data sets together"
    what = f"drift under noise ({', '.join(known)}) of images that undefended CLIP gets right, "
    what += f"as {source!r} measures it, {sets}"
    if known == ["r"]:
        what += "; this run did not keep d_low and d_high, so r is drawn alone"
    title = "Drift under noise across attack strengths" + (", set by set" if per_set else "")
    paper = "Appendix, relative cross-noise drift per data set" if per_set else "Figure 4"
    make = partial(_drift_figure, view, source, view.sets if per_set else [MEAN])
    band = "Lines are means, bands hold the middle 80 % of images, dark bands the middle half"
    return [view.figure("drift-per-set" if per_set else "drift", title, what, paper, make, band=band)]


def gate_scores(view: View, *, per_set: bool = False) -> list[FigureOf]:
    """r, J and their sum, clean and per budget, over all sets (Figure 6) or for every data set (appendix)."""
    view.require(sets=2 if per_set else 1)
    source = source_of(view, "J")
    sets = "one row per data set" if per_set else "all sets together"
    what = f"what the gate sees of images that undefended CLIP gets right, as {source!r} measures it, {sets}"
    title = "Complementary evidence for intervention" + (", set by set" if per_set else "")
    paper = "Appendix, intervention-metric distributions" if per_set else "Figure 6"
    make = partial(_scores_figure, view, source, view.sets if per_set else [MEAN])
    band = f"{_VIOLIN}; the dashed line is what 95 % of the clean images stay below"
    return [view.figure("gate-scores-per-set" if per_set else "gate-scores", title, what, paper, make, band=band)]


def scales(view: View) -> list[FigureOf]:
    """Anchor scales that the mappings give (Figure 7)."""
    found = {name: (scale, MEAN) for name, scale in _scales(view).items()}
    what = "anchor scales that each mapping gives to images which undefended CLIP gets right, all data sets together"
    make = partial(_scale_panels, view, found, columns=1, height=1.35)
    title = "Distribution of sample-specific correction scales"
    return [view.figure("scales", title, what, "Figure 7", make, band=_VIOLIN)]


def scales_per_set(view: View) -> list[FigureOf]:
    """Anchor scales for every data set, one figure per mapping (appendix)."""
    view.require(sets=2)
    figures = []
    for name, scale in _scales(view).items():
        what = f"anchor scales of the {name} mapping for images that undefended CLIP gets right"
        title, paper = f"Correction scales set by set, {name}", "Appendix, per-dataset correction-scale distributions"
        make = partial(_scale_panels, view, {one: (scale, one) for one in view.sets}, columns=3, height=1.2)
        figures.append(view.figure(f"scales-per-set-{slug(name)}", title, what, paper, make, band=_VIOLIN))
    return figures


def source_of(view: View, signal: str) -> str:
    """The defence that measured a signal on the most images, which must be nearly all."""
    view.require()
    best, share = "", 0.0
    for label in view.defenses:
        # Among equals the paper's own probe is taken: others average more draws.
        known = _measured(view, label, signal) + (0.001 if view.kinds[label] == "react" else 0.0)
        if known > max(share, 0.001):
            best, share = label, known
    if not best:
        raise MissingDataError(f"no defence of it measures {signal}; recipes/table4.yaml measures it")
    if share < MEASURED:
        raise MissingDataError(
            f"{signal} is known for {100 * min(share, 1.0):.0f} % of the rows only, those that the gate needed it for, "
            f"which would bias the picture; recipes/table4.yaml has `lazy: false`"
        )
    return best


def _measured(view: View, label: str, signal: str) -> float:
    """Share of a defence's rows for which a signal is known."""
    rows = view.of(label)
    return float(np.isfinite(rows[signal]).mean()) if len(rows) else 0.0


def _finite(values: Any) -> Values:
    numbers = np.asarray(values, dtype=np.float64)
    return numbers[np.isfinite(numbers)]


# ---------------------------------------------------------------------- drift


def _known_drifts(view: View, source: str) -> list[str]:
    return [name for name in _DRIFTS if _measured(view, source, name) >= MEASURED]


def _drift_figure(view: View, source: str, sets: list[str]) -> Figure:
    known = _known_drifts(view, source)
    together = sets == [MEAN]
    columns = len(known) if together or len(known) > 1 else 3
    lines = 1 if together else -(-len(sets) * len(known) // columns)
    figure = new_figure(height=2.5 if together else 0.5 + 1.2 * lines)
    firsts: dict[str, Axes] = {}
    for number, (dataset, signal) in enumerate((dataset, signal) for dataset in sets for signal in known):
        axes = new_axes(figure, lines, columns, number + 1, sharey=firsts.get(signal))
        firsts.setdefault(signal, axes)
        _drift_line(axes, view, source, dataset, signal)
        axes.tick_params(labelbottom=number + columns >= len(sets) * len(known))
        if together:
            title = _DRIFTS[signal][0] if len(known) > 1 else ""
        else:
            title = f"{dataset}, {signal}" if len(known) > 1 else dataset
        axes.set_title(
            title,
            fontsize=TEXT if together else SMALL,
            color=INK,
            loc="left",
            pad=4 if together else 3,
        )
    if known == ["r"]:
        figure.supylabel("relative cross-noise drift r", fontsize=TEXT, color=INK)
    figure.supxlabel("attack budget ε in 1/255, square-root scale", fontsize=TEXT, color=INK)
    return figure


def _drift_line(axes: Axes, view: View, source: str, dataset: str, signal: str) -> None:
    _, colour, marker = _DRIFTS[signal]
    x, means, bands = [], [], []
    for eps in (0.0, *view.budgets):
        values = _finite(view.right(source, eps, dataset)[signal])
        if len(values):
            x.append(255 * eps)
            means.append(float(values.mean()))
            bands.append(np.percentile(values, [10, 25, 75, 90]).tolist())
    if x:
        low, first, third, high = zip(*bands, strict=True)
        axes.fill_between(x, first, third, color=colour, alpha=0.2, linewidth=0)
        plot.interval_line(
            axes, x, low, means, high, {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        )
    plot.budget_axis(axes, view.budgets, name="")


# ---------------------------------------------------------------------- violins


def _scales(view: View) -> dict[str, Scale]:
    """The scales of every mapping of the run, and of the fits of a calibration that comes with it.

    Scales are those that the run stored; where it stored none, they are computed from r.
    """
    view.require()
    found: dict[str, tuple[str, mappings.Mapping, bool]] = {}
    for label, entry in view.settings.items():
        mapping = _mapping(entry)
        stored, drifts = (_measured(view, label, name) >= MEASURED for name in ("sigma", "r"))
        seen = any(mapping == other for _, other, _ in found.values())
        if mapping is None or isinstance(mapping, mappings.Constant) or seen or not (stored or drifts):
            continue
        found[label] = (label, mapping, stored)
    if view.calibration is not None:
        source = source_of(view, "r")
        for name, fit in view.calibration.fits.items():
            if all(fit != other for _, other, _ in found.values()):
                found[f"calibrated {MAPPING_NAMES.get(name, name)}"] = (source, fit, False)
    if not found:
        raise MissingDataError("no defence of it maps a drift to a scale; recipes/table1.yaml runs react, which does")
    kinds = [mapping.kind for _, mapping, _ in found.values()]
    titles: dict[str, Scale] = {}
    for name, (label, mapping, stored) in found.items():
        title = MAPPING_NAMES.get(mapping.kind, mapping.kind)
        title = title if kinds.count(mapping.kind) == 1 else f"{title}, {name}"
        titles[title] = partial(_scale_values, view, label, None if stored else mapping)
    return titles


def _mapping(entry: dict[str, Any]) -> mappings.Mapping | None:
    try:
        return mappings.Mapping.from_dict(entry["mapping"])
    except (KeyError, TypeError, ValueError, ReactClipError):
        return None


def _scale_values(view: View, label: str, mapping: mappings.Mapping | None, eps: float, dataset: str) -> Values:
    rows = view.right(label, eps, dataset)
    return _finite(rows["sigma"] if mapping is None else mapping(torch.as_tensor(_finite(rows["r"]))).numpy())


def _scores_figure(view: View, source: str, sets: Sequence[str]) -> Figure:
    together = list(sets) == [MEAN]
    figure = new_figure(height=2.5 if together else 0.5 + 1.15 * len(sets))
    firsts: dict[str, Axes] = {}
    for number, (dataset, signal) in enumerate((dataset, signal) for dataset in sets for signal in _SCORES):
        share = firsts.get(signal)
        axes = new_axes(figure, len(sets), len(_SCORES), number + 1, sharex=share, sharey=share)
        firsts.setdefault(signal, axes)
        values = [_finite(view.right(source, eps, dataset)[signal]) for eps in (0.0, *view.budgets)]
        _violins(axes, values, view.budgets)
        if len(values[0]):
            level = float(np.percentile(values[0], 95))
            axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), alpha=0.75, zorder=1)
        axes.tick_params(labelbottom=dataset == sets[-1])
        title = _SCORES[signal] if together else f"{dataset}, {signal.replace('score', 'r + J')}"
        axes.set_title(title, fontsize=TEXT if together else SMALL, color=INK, loc="left", pad=4)
    figure.supxlabel("attack budget ε in 1/255", fontsize=TEXT, color=INK)
    return figure


def _scale_panels(view: View, wanted: dict[str, tuple[Scale, str]], columns: int, height: float) -> Figure:
    budgets = (0.0, *view.budgets)
    values = {name: [scale(eps, dataset) for eps in budgets] for name, (scale, dataset) in wanted.items()}
    top = max((float(numbers.max()) for found in values.values() for numbers in found if len(numbers)), default=1.0)

    def draw(axes: Axes, name: str) -> None:
        _violins(axes, values[name], view.budgets)
        axes.set_ylim(0, 1.06 * top or 1.0)

    figure = plot.panels(list(wanted), draw, columns=columns, height=height)
    figure.supxlabel("attack budget ε in 1/255", fontsize=TEXT, color=INK)
    figure.supylabel("anchor scale σ (pixels in [0, 1])", fontsize=TEXT, color=INK)
    return figure


def _violins(axes: Axes, values: Sequence[Values], budgets: Sequence[float]) -> None:
    """One violin per budget, clean images first, with the median and the middle half inside."""
    for at, (eps, numbers) in enumerate(zip((0.0, *budgets), values, strict=True)):
        if not len(numbers):
            continue
        colour = budget_colour(eps)
        # A density needs values that differ.
        if len(numbers) > 2 and np.ptp(numbers) > 1e-9:
            drawn: Any = axes.violinplot([numbers], positions=[at], widths=0.85, showextrema=False)
            for part in drawn["bodies"]:
                part.set(facecolor=colour, alpha=0.55, edgecolor=colour, linewidth=0.6)
        first, median, third = np.percentile(numbers, [25, 50, 75])
        axes.vlines(at, first, third, color=INK, linewidth=2.2)
        axes.plot([at], [median], marker="o", markersize=3.2, color=PAPER, markeredgecolor=INK, linestyle="none")
    axes.set_xticks(range(len(budgets) + 1), ["clean", *(f"{255 * eps:.4g}" for eps in budgets)])
    axes.set_xlim(-0.6, len(budgets) + 0.6)
