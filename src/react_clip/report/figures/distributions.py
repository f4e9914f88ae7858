"""Distributions over images: drift against the budget, gate scores and anchor scales as violins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from react_clip import mappings
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures import plot
from react_clip.report.figures.base import Draft, MissingDataError, View
from react_clip.report.figures.sweeps import MAPPING_NAMES
from react_clip.report.style import COLOURS, INK, PAPER, budget_colour, slug

Values = NDArray[np.float64]
Source = tuple[str, mappings.Mapping]
"""The defence that measured the drift, and the mapping that gives its scales."""

MEASURED = 0.95
"""Least share of images on which a signal must be known: the gate skips it for some images, not at random."""
_DRIFTS = {"d_low": "weak noise, d_low", "d_high": "strong noise, d_high", "r": "relative drift, r"}
_DRIFT_LINES = {"d_low": ("#56B4E9", "^"), "d_high": ("#E69F00", "s"), "r": (COLOURS["react"], "o")}
_SCORES = {"r": "drift r", "J": "instability J", "score": "score r + J"}


def drift(view: View, *, per_set: bool = False) -> list[Draft]:
    """Drift against the budget, over all sets (Figure 4) or for every data set (appendix)."""
    source = source_of(view, "r")
    known = {name: title for name, title in _DRIFTS.items() if view.measured(source, name) >= MEASURED}
    alone = list(known) == ["r"]

    def draw(axes: Axes, dataset: str, signal: str) -> None:
        values = {eps: view.signal(source, signal, eps, dataset) for eps in (0.0, *view.budgets)}
        means = {eps: sample.mean() for eps, sample in values.items() if len(sample)}
        rows = pd.DataFrame(
            [[mean, *np.percentile(values[eps], [10, 25, 75, 90])] for eps, mean in means.items()],
            index=pd.Index(list(means), dtype=float),
            columns=["mean", "low", "first", "third", "high"],
            dtype=float,  # also where CLIP gets no image right, so that there is nothing to draw
        )
        colour, marker = _DRIFT_LINES[signal]
        axes.fill_between(rows.index.to_numpy(), rows["first"], rows["third"], color=colour, alpha=0.2, linewidth=0)
        line = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        plot.interval_line(axes, rows, line, value="mean")
        plot.budget_axis(axes, view.budgets)

    def make() -> Figure:
        figure = _signal_panels(view.sets if per_set else [MEAN], known, draw, 1.2)
        plot.name_figure(figure, plot.BUDGETS_ROOT, "relative cross-noise drift r" if alone else "")
        return figure

    words = "; this run did not keep d_low and d_high, so r is drawn alone" if alone else ""
    return [Draft(make, {"signals": ", ".join(known), "source": repr(source), "alone": words})]


def gate_scores(view: View, *, per_set: bool = False) -> list[Draft]:
    """r, J and their sum, clean and per budget, over all sets (Figure 6) or for every data set (appendix)."""
    source = source_of(view, "J")

    def draw(axes: Axes, dataset: str, signal: str) -> None:
        values = [view.signal(source, signal, eps, dataset) for eps in (0.0, *view.budgets)]
        _violins(axes, values, view.budgets)
        if len(values[0]):
            level = float(np.percentile(values[0], 95))
            axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), alpha=0.75, zorder=1)

    def make() -> Figure:
        figure = _signal_panels(view.sets if per_set else [MEAN], _SCORES, draw, 1.15)
        plot.name_figure(figure, plot.BUDGETS)
        return figure

    return [Draft(make, {"source": repr(source)})]


def scales(view: View) -> list[Draft]:
    """Anchor scales that the mappings give (Figure 7)."""
    panels = [(title, source, MEAN) for title, source in _scale_sources(view).items()]
    return [Draft(partial(_scale_panels, view, panels, columns=1, height=1.35))]


def scales_per_set(view: View) -> list[Draft]:
    """Anchor scales for every data set, one figure per mapping (appendix)."""
    drafts = []
    for title, source in _scale_sources(view).items():
        panels = [(dataset, source, dataset) for dataset in view.sets]
        make = partial(_scale_panels, view, panels, columns=3, height=1.2)
        drafts.append(Draft(make, {"mapping": title}, slug(title)))
    return drafts


def source_of(view: View, signal: str) -> str:
    """The defence that measured a signal on the most images, which must be nearly all."""
    known = {label: view.measured(label, signal) for label in view.defenses}
    # Among equals the paper's own probe is taken: others average more draws.
    best = max(known, key=lambda label: (round(known[label], 3), view.kinds[label] == "react"))
    if not known[best]:
        raise MissingDataError(f"no defence of it measures {signal}; recipes/table4.yaml measures it")
    if known[best] < MEASURED:
        raise MissingDataError(
            f"{signal} is known for {100 * known[best]:.0f} % of the rows only, those that the gate needed it for, "
            f"which would bias the picture; recipes/table4.yaml has `lazy: false`"
        )
    return best


def _signal_panels(
    sets: list[str], signals: Mapping[str, str], draw: Callable[[Axes, str, str], None], height: float
) -> Figure:
    """One panel per data set and signal, a column for each signal; ``draw`` gets axes, data set and signal."""
    together, several = sets == [MEAN], len(signals) > 1
    cells = [(dataset, signal) for dataset in sets for signal in signals]
    titles = [f"{dataset}, {signal}".replace("score", "r + J") for dataset, signal in cells] if several else sets
    if together:
        titles = list(signals.values()) if several else [""]
    return plot.panels(
        titles,
        lambda axes, number: draw(axes, *cells[number]),
        columns=len(signals) if several else 3,
        height=1.9 if together else height,
        sharey="col" if several else "all",
    )


# ---------------------------------------------------------------------- violins


def _scale_sources(view: View) -> dict[str, Source]:
    """Every mapping of the run, and the fits of a calibration that comes with it, by title."""
    sources: list[tuple[str, str, mappings.Mapping]] = []
    for label, entry in view.settings.items():
        mapping = _mapping(entry)
        if mapping is not None and view.measured(label, "r") >= MEASURED:
            sources.append((label, label, mapping))
    if view.calibration is not None:
        source = source_of(view, "r")
        fits = view.calibration.fits.items()
        sources += [(f"calibrated {MAPPING_NAMES.get(name, name)}", source, fit) for name, fit in fits]
    sources = [item for number, item in enumerate(sources) if item[2] not in [other[2] for other in sources[:number]]]
    if not sources:
        raise MissingDataError("no defence of it maps a drift to a scale; recipes/table1.yaml runs react, which does")
    kinds = [mapping.kind for _, _, mapping in sources]
    titles: dict[str, Source] = {}
    for name, label, mapping in sources:
        title = MAPPING_NAMES.get(mapping.kind, mapping.kind)
        titles[title if kinds.count(mapping.kind) == 1 else f"{title}, {name}"] = (label, mapping)
    return titles


def _mapping(entry: dict[str, Any]) -> mappings.Mapping | None:
    """The mapping of a defence; ``None`` where it has none, or a constant, whose scales are all the same."""
    try:
        mapping = mappings.Mapping.from_dict(entry["mapping"])
    except (KeyError, TypeError, ValueError, ReactClipError):
        return None
    return None if isinstance(mapping, mappings.Constant) else mapping


def _scale_panels(view: View, panels: Sequence[tuple[str, Source, str]], columns: int, height: float) -> Figure:
    """One panel for each title, source and data set."""
    values = [
        [mapping(torch.tensor(view.signal(label, "r", eps, dataset))).numpy() for eps in (0.0, *view.budgets)]
        for _, (label, mapping), dataset in panels
    ]
    top = max((float(numbers.max()) for panel in values for numbers in panel if len(numbers)), default=1.0)

    def draw(axes: Axes, number: int) -> None:
        _violins(axes, values[number], view.budgets)
        axes.set_ylim(0, 1.06 * top or 1.0)

    figure = plot.panels([title for title, _, _ in panels], draw, columns=columns, height=height)
    plot.name_figure(figure, plot.BUDGETS, "anchor scale σ (pixels in [0, 1])")
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
    axes.set_xticks(range(len(budgets) + 1), plot.budget_ticks(budgets))
    axes.set_xlim(-0.6, len(budgets) + 0.6)
