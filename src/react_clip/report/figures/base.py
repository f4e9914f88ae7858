"""What a figure is, and the view of a run that all figures are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from react_clip.calibration import Calibration
from react_clip.errors import ReactClipError
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import CLEAN, MEAN
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report.figures import sweeps
from react_clip.report.figures.sweeps import Grid, Sweep
from react_clip.report.run import PerImage, Run, defense_settings
from react_clip.report.style import Look, kind_of, looks_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = "95 % intervals over images"
_SCORINGS = {
    "leakage_free": "leakage-free: only what undefended CLIP gets right is attacked, accuracy is over all images",
    "attack_all": "attack_all: every image is attacked",
}


class MissingDataError(ReactClipError):
    """A run has no data for a figure: what it lacks, and what would have it."""


@dataclass(frozen=True)
class FigureOf:
    """A figure that a run has data for; nothing is drawn before ``make`` is called."""

    name: str
    """Its file's name, without a suffix."""
    title: str
    caption: str
    """What is shown, on how many images, under which threat model and scoring, and what bands and bars are."""
    paper: str
    """The paper's figure that it stands for."""
    make: Callable[[], Figure]


@dataclass(frozen=True, eq=False)
class View:
    """A run under one of its attacks. Whatever is asked for and not there raises :class:`MissingDataError`."""

    run: Run
    attack: str | None = None
    timings: Mapping[str, float] | None = None
    """Milliseconds per image, by defence."""
    calibration: Calibration | None = None

    @property
    def result(self) -> EvaluationResult:
        """The run's numbers."""
        if self.run.result is None:
            why = self.run.missing[0] if self.run.missing else "result.json is not there"
            raise MissingDataError(f"there is no result to draw ({why})")
        return self.run.result

    @cached_property
    def images(self) -> PerImage:
        """The run's rows per image: clean ones and those under this attack."""
        images = self.run.images
        if images is None:
            raise MissingDataError("there are no rows per image (per_image.parquet); `react-clip evaluate` writes them")
        return images.where((images["attack"] == CLEAN.label) | (images["attack"] == self.attack))

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Each defence's configuration, where the result has rows of it."""
        known = defense_settings(self.run)
        return {label: known.get(label, {}) for label in self.defenses}

    @cached_property
    def defenses(self) -> list[str]:
        """Every defence of the result."""
        return list(dict.fromkeys(row.defense for row in self.result.rows))

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The method behind each defence."""
        return {label: kind_of(label, config) for label, config in self.settings.items()}

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How each defence is drawn, the same in every figure."""
        return looks_of(self.kinds)

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """Defences that differ in one number."""
        return sweeps.sweeps(self.settings)

    @cached_property
    def grids(self) -> list[Grid]:
        """Defences that differ in two numbers."""
        return sweeps.grids(self.settings)

    @cached_property
    def methods(self) -> list[str]:
        """The defences that are methods of their own, not points of a sweep or one mapping among several."""
        swept = {label for sweep in self.sweeps for label in sweep.labels}
        swept |= {label for grid in self.grids for label in grid.labels}
        swept |= {label for group in sweeps.by_mapping(self.settings) for label in group.values()}
        found = [label for label in self.defenses if label not in swept]
        if len(found) < 2 and swept:
            raise MissingDataError(
                "its defences are points of a sweep, not methods to compare; recipes/table1.yaml compares them"
            )
        return found

    @cached_property
    def budgets(self) -> list[float]:
        """The attack's strengths, rising."""
        found = sorted({row.eps for row in self.result.rows if row.attack == self.attack and row.eps > 0})
        if not found:
            raise MissingDataError("it attacked no image; add attacks to the recipe, as recipes/table1.yaml has them")
        return found

    def require(self, *, sets: int = 1) -> None:
        """Say what is missing unless images were attacked, on so many data sets."""
        _ = self.budgets
        if len(self.sets) < sets:
            raise MissingDataError("it has one data set; name several under `datasets`")

    @property
    def sets(self) -> list[str]:
        """The data sets."""
        return list(dict.fromkeys(row.dataset for row in self.result.rows if row.dataset != MEAN))

    def rows(self, defense: str, dataset: str = MEAN) -> list[Row]:
        """One defence from clean images to the largest budget."""
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
        """Undefended CLIP's accuracy on clean images; NaN where nothing tells."""
        for label, kind in self.kinds.items():
            row = self.at(label, 0.0, dataset) if kind == "undefended" else None
            if row is not None:
                return row.accuracy
        if self.run.images is None or not len(self.run.images):
            return math.nan
        clean = self.of(self.defenses[0]).where(attack=CLEAN.label)
        right = clean["clean_prediction"] == clean["label"]
        names = self.sets if dataset == MEAN else [dataset]
        shares = [float(right[clean["dataset"] == name].mean()) for name in names if (clean["dataset"] == name).any()]
        return metrics.mean_of_measured(shares)

    def right(self, defense: str, eps: float, dataset: str = MEAN) -> PerImage:
        """The images that undefended CLIP gets right clean; under attack those of them that were attacked."""
        rows = self.of(defense)
        keep = (rows["clean_prediction"] == rows["label"]) & (rows["attacked"] | (eps == 0))
        if dataset != MEAN:
            keep &= rows["dataset"] == dataset
        return rows.where(keep, eps=eps)

    def of(self, defense: str) -> PerImage:
        """One defence's rows per image."""
        places = self._places.get(defense, np.zeros(0, dtype=np.intp))
        return PerImage({name: column[places] for name, column in self.images.columns.items()})

    @cached_property
    def _places(self) -> dict[str, NDArray[np.intp]]:
        """Where each defence's rows are: a grid has hundreds of defences, and searching for each anew takes minutes."""
        names, codes = np.unique(self.images["defense"].astype(str), return_inverse=True)
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(1, len(names)))
        return dict(zip(names.tolist(), np.split(order, starts), strict=False))

    def caption(self, what: str, band: str) -> str:
        """One paragraph: what is shown, of what, under which conditions, and what the bands are."""
        result = self.result
        images = sum(info.images for info in result.sets)
        sets = f"{len(result.sets)} data sets" if len(result.sets) != 1 else result.sets[0].name
        parts = [
            what,
            f"{images:,} images of {sets}; {result.model}; attack: {self.attack or 'none'}",
            f"threat model: {result.threat} ({result.threat_meaning})",
            f"scoring: {_SCORINGS.get(result.scoring, result.scoring)}",
            band,
        ]
        return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)
