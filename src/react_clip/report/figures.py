"""The seven kinds of figure of a run; for a kind without data, one line says what is missing.

Budgets are in 255ths of the pixel range (0 for clean images), accuracies and fractions in per cent. Accuracy is strict:
an attacked image counts as right only if the defence is right about it clean as well as attacked.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from tqdm import tqdm

from react_clip.defenses import ReACT
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import CLEAN, title_of
from react_clip.evaluation.results import EvaluationResult
from react_clip.report.style import (
    GREY,
    INK,
    SMALL,
    budget_colour,
    legend,
    lines_of,
    new_figure,
    save_figure,
    style_axes,
)

MEASURED = 0.95
"""Least fraction of images on which a diagnostic must be known: the gate skips some, and not at random."""
_ANSWERS = {
    *("dataset", "scoring", "threat", "attack", "defense", "eps", "draw", "seed", "attack_seed", "index", "label"),
    *("clean_prediction", "plain_prediction", "prediction", "attacked", "attack_success", "crafted_success"),
    *("correct", "clean_correct", "robust", "gated", "queries", "passes", "backward_passes", "sigma"),
}
"""Columns of images.parquet that are no diagnostics to show as distributions."""


class MissingDataError(ReactClipError):
    """A run has no data for a figure; the message says what is missing."""


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn: its files are ``<name>.svg`` and ``<name>.png``."""

    name: str
    title: str
    caption: str


def draw_all(result: EvaluationResult, folder: Path, progress: bool) -> tuple[list[Drawn], list[str]]:
    """Draw every figure that the run has data for; returns them, and one line for each of the others."""
    drawn, missing = [], []
    images = sum(info.images for info in result.sets)
    about = f"{images:,} images; {result.model}; threat model {result.threat}, scoring {result.scoring}."
    for name, (title, make) in tqdm(KINDS.items(), "figures", disable=not progress):
        try:
            save_figure(make(result), folder / name)
            drawn.append(Drawn(name, title, f"{inspect.cleandoc(str(make.__doc__))} {about}"))
        except MissingDataError as reason:
            missing.append(f"{title}: {reason}")
    return drawn, missing


# ---------------------------------------------------------------------- accuracy


def accuracy_over_budget(result: EvaluationResult) -> Figure:
    """Accuracy of each defence from clean images to the largest budget; bars are 95 % intervals."""
    return _over_budget(result, "accuracy", "accuracy in %")


def gate_over_budget(result: EvaluationResult) -> Figure:
    """Fraction of the images that undefended CLIP gets right whose answer each defence changed."""
    if not any(row.gate_rate > 0 for row in result.means):
        raise MissingDataError("no defence of it has a gate that opened")
    return _over_budget(result, "gate_rate", "gate open in %")


def _over_budget(result: EvaluationResult, column: str, name: str) -> Figure:
    means = _means(result)
    attacked = _attacked(means)
    clean = means[means["attack"] == CLEAN]
    counts = attacked.groupby("attack", sort=False)["eps"].nunique()
    attacks = [str(attack) for attack in counts.index if counts[attack] > 1 or counts.max() == 1]
    lines = lines_of(result.defenses)

    def draw(axes: Axes, attack: str) -> None:
        rows = pd.concat([clean, attacked[attacked["attack"] == attack]])
        budgets = sorted(rows["eps"].unique())
        for label, own in rows.groupby("defense", sort=False):
            own = own.sort_values("eps")
            x, y = own["eps"].map(budgets.index), 100 * own[column]
            axes.plot(x, y, label=label, **lines[str(label)])
            if column == "accuracy":
                axes.vlines(x, 100 * own["low"], 100 * own["high"], color=lines[str(label)]["color"], alpha=0.6)
        _budget_ticks(axes, budgets)
        axes.set_ylim(0, 100)

    return _panels(attacks, draw, "attack budget in 1/255", name)


def accuracy_over_passes(result: EvaluationResult) -> Figure:
    """Accuracy under the worst attack over work per image (a backward pass counts as two); filled by the clean loss."""
    means = _means(result)
    worst = _attacked(means).sort_values("accuracy").groupby("defense").first()
    work = worst["passes"] + 2 * worst["backward_passes"].fillna(0)
    if not work.notna().any():
        raise MissingDataError("it did not count encoder passes")
    images = result.images[result.images["attack"] == CLEAN]
    plain = (images["clean_prediction"] == images["label"]).groupby(images["dataset"], observed=True).mean().mean()
    lost = 100 * (plain - means[means["attack"] == CLEAN].set_index("defense")["accuracy"])
    scale = ScalarMappable(Normalize(0, max(5.0, lost.max())), "Reds")
    figure = new_figure(height=3.8)
    x = "encoder passes per attacked image, forward + 2 × backward, log scale"
    axes = style_axes(figure.add_subplot(), x, "accuracy under the worst attack in %")
    for label, line in lines_of(result.defenses).items():
        row = 100 * worst.loc[label, ["low", "accuracy", "high"]]
        axes.vlines(work[label], row["low"], row["high"], color=line["color"], alpha=0.6)
        point = {**line, "linestyle": "none", "markersize": 7, "markerfacecolor": scale.to_rgba(lost[label])}
        axes.plot([work[label]], [row["accuracy"]], label=label, **point)
    axes.set_xscale("log")
    bar = figure.colorbar(scale, ax=axes)
    bar.set_label("points lost on clean images", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    legend(figure)
    return figure


def sets_as_heat_map(result: EvaluationResult) -> Figure:
    """Accuracy on each data set under the attack that leaves least in the mean."""
    if len(result.sets) < 2:
        raise MissingDataError("it has one data set; name several under `datasets`")
    attacked = _attacked(_means(result))
    attack, eps = attacked.groupby(["attack", "eps"])["accuracy"].mean().idxmin()
    rows = pd.DataFrame([asdict(row) for row in result.rows if (row.attack, row.eps) == (attack, eps)])
    cells = 100 * rows.pivot_table(index="dataset", columns="defense", values="accuracy", sort=False)
    figure = new_figure(height=1.4 + 0.22 * len(cells), width=max(3.0, 1.4 + 0.5 * len(cells.columns)))
    axes = figure.add_subplot()
    axes.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(cells.columns)), cells.columns, rotation=60, ha="right", fontsize=SMALL)
    axes.set_yticks(range(len(cells)), cells.index, fontsize=SMALL)
    axes.set_title(f"accuracy in %, {title_of(attack, eps)}", fontsize=SMALL, loc="left")
    for (row, column), value in np.ndenumerate(cells.to_numpy()):
        colour = "black" if value > 60 else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=SMALL, color=colour)
    return figure


# ---------------------------------------------------------------------- diagnostics of the defences


def diagnostics_of(result: EvaluationResult) -> list[tuple[str, str]]:
    """Defences and their own diagnostics, by the names that the defence gives them.

    A diagnostic must be measured on nearly every image. Of several defences of one kind, the first is taken.
    """
    found, kinds = [], set[str]()
    for label, entry in result.defenses.items():
        own = result.images[result.images["defense"] == label].select_dtypes("number")
        names = [str(name) for name in own if name not in _ANSWERS and not str(name).startswith("part ")]
        varied = [name for name in names if own[name].notna().mean() >= MEASURED and own[name].nunique() > 2]
        found += [(label, name) for name in sorted(varied) if entry["kind"] not in kinds]
        kinds.add(entry["kind"])
    return found


def scores_clean_and_attacked(result: EvaluationResult) -> Figure:
    """Diagnostics of the defences on images that undefended CLIP gets right, as box plots; dashed is the threshold."""
    panels = {f"{label}: {name}": (label, name) for label, name in diagnostics_of(result)}
    if not panels:
        raise MissingDataError(f"no defence of it measured a diagnostic on {MEASURED:.0%} of the images")
    images = result.images
    counted = (images["clean_prediction"] == images["label"]) & (images["attacked"] | (images["attack"] == CLEAN))
    budgets = [0.0, *sorted(images.loc[images["eps"] > 0, "eps"].unique())]
    entries = result.defenses

    def draw(axes: Axes, panel: str) -> None:
        label, name = panels[panel]
        own = images[counted & (images["defense"] == label)]
        values = [own.loc[own["eps"] == eps, name].dropna() for eps in budgets]
        places = range(len(budgets))
        boxes = axes.boxplot(values, positions=places, showfliers=False, patch_artist=True, medianprops={"color": INK})
        for place, box in enumerate(boxes["boxes"]):
            box.set(facecolor=budget_colour(place, len(budgets)), alpha=0.6)
        threshold = entries[label].get("threshold", entries[label].get("tau"))
        if name == "score" and threshold is not None:
            axes.axhline(threshold, color=INK, linewidth=0.8, linestyle="--")
        _budget_ticks(axes, budgets)

    return _panels(list(panels), draw, "attack budget in 1/255", "", share_y=False)


def sigma_over_drift(result: EvaluationResult) -> Figure:
    """The anchor-noise scale that the drift of each image is mapped to."""
    known = result.images.reindex(columns=["defense", "drift", "sigma"]).dropna()
    known = known[known.groupby("defense", observed=True)["sigma"].transform("nunique") > 1]
    if known.empty:
        raise MissingDataError("no defence of it maps a drift to an anchor scale")
    figure = new_figure()
    axes = style_axes(figure.add_subplot(), "relative cross-noise drift r", "anchor scale σ (pixels in [0, 1])")
    for label, line in lines_of(result.defenses).items():
        own = known[known["defense"] == label].iloc[:2000]
        if len(own):
            point = {**line, "markersize": 3, "linestyle": "none"}
            axes.plot(own["drift"], own["sigma"], label=label, alpha=0.4, rasterized=True, **point)
    legend(figure)
    return figure


# ---------------------------------------------------------------------- leakage


def leakage(result: EvaluationResult) -> Figure:
    """Accuracy with and without answers on images that CLIP gets wrong clean, for the best setting of each method."""
    if result.scoring != "attack_all":
        raise MissingDataError("only images that undefended CLIP gets right were attacked; use `scoring: attack_all`")
    means = _attacked(_means(result))
    families = {label: str(entry.get("family", label)) for label, entry in result.defenses.items()}
    means["family"] = means["defense"].map(families)
    means["kept"] = means["paper_accuracy"] - means["leakage_fraction"]

    def draw(axes: Axes, family: str) -> None:
        own = means[means["family"] == family]
        best = own.loc[own.groupby("eps")["paper_accuracy"].idxmax()].sort_values("eps")
        for step, (column, label) in enumerate((("paper_accuracy", "as reported"), ("kept", "leaked not counted"))):
            x = np.arange(len(best)) + 0.4 * (step - 0.5)
            axes.bar(x, 100 * best[column], 0.38, label=label, color=(GREY, ReACT.colour)[step])
        _budget_ticks(axes, best["eps"])
        axes.set_ylim(0, 100)

    return _panels(list(dict.fromkeys(means["family"])), draw, "attack budget in 1/255", "accuracy in %")


# ---------------------------------------------------------------------- panels


def _means(result: EvaluationResult) -> pd.DataFrame:
    """Rows of the mean over data sets."""
    return pd.DataFrame([asdict(row) for row in result.means])


def _attacked(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows under attack; of none there is nothing to draw."""
    attacked = rows[rows["eps"] > 0].copy()
    if attacked.empty:
        raise MissingDataError("it attacked no image; add attacks to the recipe")
    return attacked


def _budget_ticks(axes: Axes, budgets: Iterable[float]) -> None:
    names = ["clean" if eps == 0 else f"{255 * eps:.4g}" for eps in budgets]
    axes.set_xticks(range(len(names)), names)


def _panels(
    titles: Sequence[str], draw: Callable[[Axes, str], None], x: str, y: str, *, share_y: bool = True
) -> Figure:
    """Small multiples, at most three side by side, with one legend."""
    columns = min(3, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = new_figure(height=0.8 + (2.4 if lines == 1 else 1.7) * lines, width=3.0 + 2.2 * columns)
    grid: Any = figure.subplots(lines, columns, squeeze=False, sharey="all" if share_y else "none").ravel()
    for axes, title in zip(grid, titles, strict=False):
        style_axes(axes, title=title)
        draw(axes, title)
    for unused in grid[len(titles) :]:
        unused.remove()
    figure.supxlabel(x, fontsize=SMALL)
    figure.supylabel(y, fontsize=SMALL)
    legend(figure)
    return figure


KINDS: dict[str, tuple[str, Callable[[EvaluationResult], Figure]]] = {
    "accuracy": ("Accuracy over budget", accuracy_over_budget),
    "passes": ("Accuracy over encoder passes", accuracy_over_passes),
    "sets": ("Data sets", sets_as_heat_map),
    "scores": ("Scores clean and attacked", scores_clean_and_attacked),
    "gate": ("Gate over budget", gate_over_budget),
    "sigma": ("Anchor scale over drift", sigma_over_drift),
    "leakage": ("Label leakage", leakage),
}
"""Title and drawing function of each kind of figure, by file name; the function's docstring is the caption."""
