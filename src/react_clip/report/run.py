"""Read a run for the report: its result, its rows per image, and one line for each part that is missing.

Reading does not fail on a run that is unfinished, damaged or from another version; only a folder that does not exist is
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from react_clip.config import pop_kind
from react_clip.errors import MissingFileError, ReactClipError, first_line, missing_or_wrong
from react_clip.evaluation import store
from react_clip.evaluation.result import EvaluationResult, merge
from react_clip.evaluation.strict_yaml import read_yaml
from react_clip.optional import require

SCORINGS = {
    "leakage_free": "only images that undefended CLIP classifies correctly are attacked; accuracy counts all images",
    "attack_all": "every image is attacked; right answers on images that undefended CLIP gets wrong when clean are "
    "counted as leaked",
}
_TEXTS = ("dataset", "attack", "defense")
_NUMBERS = ("eps", "r", "J", "score", "sigma", "d_low", "d_high")
_OTHERS = (
    *("index", "label", "draw", "clean_prediction", "plain_prediction", "prediction", "passes", "backward_passes"),
    *("attacked", "attack_success", "correct", "gated"),
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Run:
    """One run, or several over the same photos merged into one."""

    folders: tuple[Path, ...]
    result: EvaluationResult | None
    recipe: dict[str, Any]
    """The recipe of the result, or of the folder where there is no result; empty if neither can be read."""
    images: pd.DataFrame | None
    """Rows of ``per_image.parquet``; columns that an old run did not measure are NaN."""
    missing: tuple[str, ...]
    """One line for each part that is not there, with the way to get it."""

    @property
    def title(self) -> str:
        """The run's title, or its folder's name."""
        return self.result.title if self.result is not None else str(self.recipe.get("title", self.folders[0].name))

    @property
    def defenses(self) -> dict[str, dict[str, Any]]:
        """The recipe's entry of each defence, by label."""
        entries = [dict(entry) for entry in self.recipe.get("defenses", []) if isinstance(entry, dict)]
        entries = [{"kind": str(pop_kind(entry)), **entry} for entry in entries]
        return {str(entry.get("label", entry["kind"])): entry for entry in entries}


def conditions(result: EvaluationResult) -> str:
    """Threat model and scoring in words; every number is shown with them."""
    scoring = SCORINGS.get(result.scoring, "not known to this version")
    return f"Threat model: {result.threat} ({result.threat_meaning}). Scoring: {result.scoring} ({scoring})."


def read_run(folder: str | Path) -> Run:
    """Read a folder of ``react-clip evaluate``."""
    folder = Path(folder)
    if not folder.is_dir():
        raise missing_or_wrong(folder, f"{folder} is no folder; give the --out folder of `react-clip evaluate`")
    missing: list[str] = []
    result = _or_missing(missing, store.RESULT, lambda: EvaluationResult.load(folder / store.RESULT))
    recipe = result.recipe if result is not None else None
    if recipe is None:
        recipe = _or_missing(missing, store.RECIPE, lambda: read_yaml(folder / store.RECIPE))
    images = _or_missing(missing, store.PER_IMAGE, lambda: _read_images(folder / store.PER_IMAGE))
    if not (folder / store.RESULT).exists():
        shards = sum(1 for _ in (folder / store.SHARDS).rglob("*.safetensors"))
        state = f"{shards} finished pieces of work are kept" if shards else "nothing has been computed yet"
        missing.insert(0, f"the run is not finished ({state}): the same `react-clip evaluate` command continues it")
    return Run((folder,), result, recipe or {}, images, tuple(missing))


def check_is_run(folder: Path) -> None:
    """Raise unless the folder holds a file of a run."""
    if not any((folder / name).exists() for name in (store.RESULT, store.RECIPE, store.PER_IMAGE, store.SHARDS)):
        raise ReactClipError(
            f"{folder} is no run: it has neither {store.RESULT} nor {store.RECIPE}; give the --out folder of "
            "`react-clip evaluate`"
        )


def read_runs(folders: Sequence[str | Path]) -> Run:
    """Read one run, or merge several over the same photos; each defence keeps its rows."""
    return join_runs([read_run(folder) for folder in folders])


_ROW = ["dataset", "index", "attack", "eps", "defense", "draw"]
"""Columns that tell the answers in ``per_image.parquet`` apart."""


def join_runs(runs: Sequence[Run]) -> Run:
    """One run with the rows of several over the same photos."""
    if len(runs) == 1:
        return runs[0]
    results = [run.result for run in runs if run.result is not None]
    if len(results) < len(runs):
        absent = next(run.folders[0] for run in runs if run.result is None)
        raise ReactClipError(f"{absent} has no readable result to join with the others; finish it, or report it alone")
    merged = merge(results)
    images = [run.images for run in runs if run.images is not None]
    return Run(
        folders=tuple(run.folders[0] for run in runs),
        result=merged,
        recipe=merged.recipe,
        images=pd.concat(images, ignore_index=True).drop_duplicates(_ROW) if images else None,
        missing=tuple(f"{run.folders[0].name}: {line}" for run in runs for line in run.missing),
    )


def _or_missing(missing: list[str], name: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except ReactClipError as error:
        missing.append(str(error))
    except Exception as error:
        # Damaged files raise whatever their libraries raise; the page reports it and shows the rest.
        missing.append(f"{name} cannot be read ({first_line(error)}); run the evaluation again to write it")
    return None


def _read_images(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise MissingFileError(f"{path} does not exist; figures and rows per image need it")
    table = require("pyarrow.parquet", "reading per-image results", extra="eval").read_table(path)
    if absent := [name for name in (*_TEXTS, *_OTHERS) if name not in table.column_names]:
        raise ReactClipError(f"{path} has no column {absent[0]!r}; it was written by another version of react-clip")
    frame = table.to_pandas().reindex(columns=[*_TEXTS, *_NUMBERS, *_OTHERS])
    return frame.astype(dict.fromkeys(_TEXTS, object) | dict.fromkeys(_NUMBERS, np.float64))
