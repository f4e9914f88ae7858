"""How far features move under probe noise, against the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures.base import FigureOf, MissingDataError, View
from react_clip.report.figures.parts import budget_axis, interval_line
from react_clip.report.style import COLOURS, COLUMN_WIDTH, INK, SMALL, TEXT, new_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIGNALS = {
    "d_low": ("weak noise, d_low", "#56B4E9", "^"),
    "d_high": ("strong noise, d_high", "#E69F00", "s"),
    "r": ("relative drift, r", COLOURS["react"], "o"),
}
MEASURED = 0.95
"""Share of images on which a signal must be known; on fewer, those that are missing were not missing by chance."""
_RECIPE = "recipes/table4.yaml measures it"


def signals(view: View) -> list[FigureOf]:
    """Drift against the budget, over all sets (Figure 4)."""
    source = source_of(view, "r")
    return [
        FigureOf(
            "drift",
            "Drift under noise across attack strengths",
            _caption(view, source, "all data sets together"),
            "Figure 4",
            lambda: _figure(view, source, [MEAN]),
        )
    ]


def per_set(view: View) -> list[FigureOf]:
    """The same for every data set (figures of the appendix)."""
    view.require(sets=2)
    source = source_of(view, "r")
    return [
        FigureOf(
            "drift-per-set",
            "Drift under noise across attack strengths, set by set",
            _caption(view, source, "one row a data set"),
            "Appendix, relative cross-noise drift per data set",
            lambda: _figure(view, source, view.sets),
        )
    ]


def source_of(view: View, signal: str) -> str:
    """The defence that measured a signal on (nearly) every image; among several, the one that measured most."""
    view.require()
    best, share = None, 0.0
    for label in view.defenses:
        known = np.isfinite(view.of(label)[signal])
        # The paper's own probe comes first among equals: others average more draws.
        found = float(known.mean()) + (0.001 if view.kinds[label] == "react" else 0.0) if len(known) else 0.0
        if found > share:
            best, share = label, found
    if best is None:
        raise MissingDataError(f"no defence of it measures {signal}; {_RECIPE}")
    if share < MEASURED:
        raise MissingDataError(
            f"{signal} is known for {100 * min(share, 1.0):.0f} % of the rows only, those that the gate needed it for, "
            f"which would bias the picture; recipes/table4.yaml has `lazy: false`"
        )
    return best


def _known(view: View, source: str) -> list[str]:
    rows = view.of(source)
    return [name for name in _SIGNALS if np.isfinite(rows[name]).mean() >= MEASURED]


def _caption(view: View, source: str, sets: str) -> str:
    known = _known(view, source)
    what = f"drift under noise ({', '.join(known)}) of images that undefended CLIP gets right, "
    what += f"as {source!r} measures it, {sets}"
    if known == ["r"]:
        what += "; this run did not keep d_low and d_high, so r is drawn alone"
    return view.caption(what, "Lines are means, bands hold the middle 80 % of images, dark bands the middle half")


def _figure(view: View, source: str, sets: list[str]) -> Figure:
    known = _known(view, source)
    alone = sets == [MEAN]
    columns = len(known) if alone or len(known) > 1 else 3
    lines = 1 if alone else -(-len(sets) * len(known) // columns)
    figure = new_figure(height=2.5 if alone else 0.5 + 1.2 * lines, width=COLUMN_WIDTH)
    row_starts: dict[str, Axes] = {}
    for place, (dataset, signal) in enumerate((dataset, signal) for dataset in sets for signal in known):
        axes = new_axes(figure, lines, columns, place + 1, sharey=row_starts.get(signal))
        row_starts.setdefault(signal, axes)
        _draw(axes, view, source, dataset, signal)
        last = place + columns >= len(sets) * len(known)
        axes.tick_params(labelbottom=last)
        if alone:
            axes.set_title(_SIGNALS[signal][0] if len(known) > 1 else "", fontsize=TEXT, color=INK, loc="left", pad=4)
        else:
            name = f"{dataset}, {signal}" if len(known) > 1 else dataset
            axes.set_title(name, fontsize=SMALL, color=INK, loc="left", pad=3)
    if known == ["r"]:
        figure.supylabel("relative cross-noise drift r", fontsize=TEXT, color=INK)
    figure.supxlabel("attack budget ε in 1/255, square-root scale", fontsize=TEXT, color=INK)
    return figure


def _draw(axes: Axes, view: View, source: str, dataset: str, signal: str) -> None:
    _, colour, marker = _SIGNALS[signal]
    x, means, bands = [], [], []
    for eps in (0.0, *view.budgets):
        values = view.right(source, eps, dataset)[signal]
        values = values[np.isfinite(values)]
        if len(values):
            x.append(255 * eps)
            means.append(float(values.mean()))
            bands.append(np.percentile(values, [10, 25, 75, 90]).tolist())
    if x:
        low, first, third, high = zip(*bands, strict=True)
        axes.fill_between(x, first, third, color=colour, alpha=0.2, linewidth=0)
        interval_line(axes, x, low, means, high, {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4})
    budget_axis(axes, view.budgets, name="")
