"""A figure before it is drawn, and a run's data for figures.

Units in all figures: budgets in 255ths of the pixel range (0 for clean images), accuracies in per cent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from react_clip.calibration import Calibration
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import CLEAN, MEAN
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report.run import Run
from react_clip.report.style import Line, lines_of, method_of


class MissingDataError(ReactClipError):
    """A run has no data for a figure; the message says what is missing and which recipe has it."""


@dataclass(frozen=True)
class FigureOf:
    """A figure that a run has data for; it is drawn when ``make`` is called."""

    name: str
    """Name of its file, without a suffix."""
    title: str
    caption: str
    """The quantities shown, the number of images, threat model, scoring, and the meaning of bands and bars."""
    paper: str
    """The corresponding figure of the paper."""
    make: Callable[[], Figure]


@dataclass(frozen=True)
class Draft:
    """A figure without its texts, which are in ``captions.toml``."""

    make: Callable[[], Figure]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Words for the braces of title and caption."""
    suffix: str = ""
    """Added to the kind's name where a run has several figures of the kind."""


@dataclass(frozen=True, eq=False)
class View:
    """A run under one of its attacks. Asking for data that the run lacks raises :class:`MissingDataError`."""

    run: Run
    attack: str | None = None
    calibration: Calibration | None = None

    @property
    def result(self) -> EvaluationResult:
        """The run's result."""
        if self.run.result is None:
            why = self.run.missing[0] if self.run.missing else "result.json is not there"
            raise MissingDataError(f"there is no result to draw ({why})")
        return self.run.result

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """The result's rows of clean images and of this attack, from clean images to the largest budget."""
        columns = [column.name for column in dataclasses.fields(Row)]
        rows = [row for row in self.result.rows if row.attack in (CLEAN, self.attack)]
        frame = pd.DataFrame(rows, columns=columns).drop_duplicates(["defense", "dataset", "eps"])
        shares = ["accuracy", "low", "high"]
        frame[shares] = 100 * frame[shares].astype(float)
        return frame.assign(eps=_in_255ths(frame["eps"])).sort_values("eps", kind="stable")

    @cached_property
    def images(self) -> pd.DataFrame:
        """Rows per image of clean images and of those under this attack."""
        images = self.run.images
        if images is None:
            raise MissingDataError("there are no rows per image (per_image.parquet); `react-clip evaluate` writes them")
        images = images[images["attack"].isin([CLEAN, self.attack])]
        return images.assign(eps=_in_255ths(images["eps"])).replace([math.inf, -math.inf], math.nan)

    @cached_property
    def defenses(self) -> list[str]:
        """Labels of all defences."""
        return list(dict.fromkeys(row.defense for row in self.result.rows))

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The recipe's entry of each defence."""
        return {label: self.run.defenses.get(label, {}) for label in self.defenses}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The method behind each label."""
        return {label: method_of(label, entry.get("kind", "")) for label, entry in self.settings.items()}

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Line and marker of each defence, the same in every figure."""
        return lines_of(self.kinds)

    @cached_property
    def budgets(self) -> list[float]:
        """The attack's budgets, rising."""
        budgets = sorted({float(eps) for eps in self.numbers["eps"] if eps > 0})
        if not budgets:
            raise MissingDataError("it attacked no image; add attacks to the recipe, as recipes/table1.yaml has them")
        return budgets

    @property
    def sets(self) -> list[str]:
        """The data sets."""
        return list(dict.fromkeys(row.dataset for row in self.result.rows if row.dataset != MEAN))

    def rows(self, defense: str, dataset: str = MEAN) -> pd.DataFrame:
        """One defence's rows of the result, indexed by budget."""
        numbers = self.numbers
        return numbers[(numbers["defense"] == defense) & (numbers["dataset"] == dataset)].set_index("eps")

    @cached_property
    def means(self) -> pd.DataFrame:
        """Rows of the mean over sets, indexed by budget and defence."""
        return self.numbers[self.numbers["dataset"] == MEAN].set_index(["eps", "defense"]).sort_index()

    def ceiling(self, dataset: str = MEAN) -> float:
        """Accuracy of undefended CLIP on clean images; NaN if it is not known."""
        for label, kind in self.kinds.items():
            rows = self.rows(label, dataset)
            if kind == "undefended" and 0.0 in rows.index:
                return float(rows.at[0.0, "accuracy"])
        if self.run.images is None:
            return math.nan
        clean = self.of(self.defenses[0]).query("eps == 0")
        right = (clean["clean_prediction"] == clean["label"]).groupby(clean["dataset"]).mean()
        return 100 * float(right.mean() if dataset == MEAN else right.get(dataset, math.nan))

    def of(self, defense: str) -> pd.DataFrame:
        """One defence's rows per image."""
        return self._by_defense.get(defense, self.images.iloc[:0])

    @cached_property
    def _by_defense(self) -> dict[str, pd.DataFrame]:
        return dict(list(self.images.groupby("defense", sort=False)))

    def measured(self, defense: str, signal: str) -> float:
        """Share of a defence's rows per image for which a signal is known, in [0, 1]."""
        rows = self.of(defense)
        return float(rows[signal].notna().mean()) if len(rows) else 0.0

    def signal(self, defense: str, signal: str, eps: float, dataset: str = MEAN) -> NDArray[np.float64]:
        """Values of a signal at one budget, where known.

        Counted are images that undefended CLIP gets right when clean and, under attack, that were attacked.
        """
        rows = self.of(defense)
        counted = (rows["eps"] == eps) & (rows["clean_prediction"] == rows["label"]) & (rows["attacked"] | (eps == 0))
        if dataset != MEAN:
            counted &= rows["dataset"] == dataset
        values: NDArray[np.float64] = rows.loc[counted, signal].dropna().to_numpy(dtype=np.float64)
        return values


def _in_255ths(eps: pd.Series) -> pd.Series:
    return (255 * eps.astype(float)).round(6)
