"""A figure before it is drawn, and the view of a run from which all figures are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from react_clip.calibration import Calibration
from react_clip.errors import ReactClipError
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import CLEAN, MEAN
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report.run import Run, conditions
from react_clip.report.style import Look, looks_of, method_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = "95 % intervals over images"


class MissingDataError(ReactClipError):
    """A run has no data for a figure; the message says what is missing and which recipe has it."""


@dataclass(frozen=True)
class FigureOf:
    """A figure that a run has data for; it is drawn when ``make`` is called."""

    name: str
    """Its file's name, without a suffix."""
    title: str
    caption: str
    """What is shown, the number of images, threat model, scoring, and what bands and bars are."""
    paper: str
    """The paper's figure that it corresponds to."""
    make: Callable[[], Figure]


@dataclass(frozen=True, eq=False)
class View:
    """A run under one of its attacks. Asking for data that the run lacks raises :class:`MissingDataError`."""

    run: Run
    attack: str | None = None
    calibration: Calibration | None = None

    @property
    def result(self) -> EvaluationResult:
        """The run's numbers."""
        if self.run.result is None:
            why = self.run.missing[0] if self.run.missing else "result.json is not there"
            raise MissingDataError(f"there is no result to draw ({why})")
        return self.run.result

    @cached_property
    def images(self) -> pd.DataFrame:
        """Rows per image of clean images and of those under this attack."""
        images = self.run.images
        if images is None:
            raise MissingDataError("there are no rows per image (per_image.parquet); `react-clip evaluate` writes them")
        return images[images["attack"].isin([CLEAN.label, self.attack])]

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The recipe's entry of each defence that the result has rows of."""
        return {label: self.run.defenses.get(label, {}) for label in self.defenses}

    @cached_property
    def defenses(self) -> list[str]:
        """Labels of all defences."""
        return list(dict.fromkeys(row.defense for row in self.result.rows))

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The method behind each label."""
        return {label: method_of(label, entry.get("kind", "")) for label, entry in self.settings.items()}

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Line and marker of each defence, the same in every figure."""
        return looks_of(self.kinds)

    @cached_property
    def budgets(self) -> list[float]:
        """The attack's budgets, rising."""
        found = sorted({row.eps for row in self.result.rows if row.attack == self.attack and row.eps > 0})
        if not found:
            raise MissingDataError("it attacked no image; add attacks to the recipe, as recipes/table1.yaml has them")
        return found

    def require(self, *, sets: int = 1) -> None:
        """Raise unless images were attacked on at least ``sets`` data sets."""
        _ = self.budgets
        if len(self.sets) < sets:
            raise MissingDataError("it has one data set; name several under `datasets`")

    @property
    def sets(self) -> list[str]:
        """The data sets."""
        return list(dict.fromkeys(row.dataset for row in self.result.rows if row.dataset != MEAN))

    def rows(self, defense: str, dataset: str = MEAN) -> list[Row]:
        """One defence's rows, from clean images to the largest budget."""
        return self._rows.get((defense, dataset), [])

    @cached_property
    def _rows(self) -> dict[tuple[str, str], list[Row]]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in sorted(self.result.rows, key=lambda row: row.eps):
            if row.attack in (CLEAN.label, self.attack):
                found.setdefault((row.defense, row.dataset), []).append(row)
        return found

    def at(self, defense: str, eps: float, dataset: str = MEAN) -> Row | None:
        """One defence at one budget, 0 for clean images."""
        return next((row for row in self.rows(defense, dataset) if math.isclose(row.eps, eps, rel_tol=1e-6)), None)

    def ceiling(self, dataset: str = MEAN) -> float:
        """Undefended CLIP's accuracy on clean images; NaN if it is not known."""
        for label, kind in self.kinds.items():
            row = self.at(label, 0.0, dataset) if kind == "undefended" else None
            if row is not None:
                return row.accuracy
        if self.run.images is None or self.run.images.empty:
            return math.nan
        clean = self.of(self.defenses[0]).query("attack == @CLEAN.label")
        right = (clean["clean_prediction"] == clean["label"]).groupby(clean["dataset"]).mean()
        return metrics.mean_of_measured([float(right[name]) for name in right.index if dataset in (MEAN, name)])

    def right(self, defense: str, eps: float, dataset: str = MEAN) -> pd.DataFrame:
        """Rows of images that undefended CLIP gets right when clean; under attack, of those that were attacked."""
        rows = self.of(defense)
        keep = (rows["clean_prediction"] == rows["label"]) & (rows["attacked"] | (eps == 0))
        if dataset != MEAN:
            keep &= rows["dataset"] == dataset
        return rows[keep & np.isclose(rows["eps"], eps, rtol=1e-6)]

    def of(self, defense: str) -> pd.DataFrame:
        """One defence's rows per image."""
        return self._by_defense.get(defense, self.images.iloc[:0])

    @cached_property
    def _by_defense(self) -> dict[str, pd.DataFrame]:
        return dict(list(self.images.groupby("defense", sort=False)))

    def figure(
        self, name: str, title: str, what: str, paper: str, make: Callable[[], Figure], *, band: str = ""
    ) -> FigureOf:
        """A figure of this view; ``what`` and ``band`` begin and end its caption."""
        result = self.result
        images = sum(info.images for info in result.sets)
        sets = f"{len(result.sets)} data sets" if len(result.sets) != 1 else result.sets[0].name
        about = f"{images:,} images of {sets}; {result.model}; attack: {self.attack or 'none'}."
        caption = f"{what[0].upper()}{what[1:]}. {about} {conditions(result)}" + (f" {band}." if band else "")
        return FigureOf(name, title, caption, paper, make)
