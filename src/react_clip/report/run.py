"""A run as the report sees it: what is there, and one line for each thing that is not.

Reading never fails on a run that is unfinished, damaged or from another version; only a folder that does not exist is
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from react_clip.config import pop_kind
from react_clip.errors import ReactClipError, first_line
from react_clip.evaluation import run_dir, yaml_text
from react_clip.evaluation.merge import merge
from react_clip.evaluation.result import EvaluationResult
from react_clip.optional import require

_NUMBERS = ("eps", "r", "J", "score", "sigma", "d_low", "d_high")
_TEXTS = ("dataset", "attack", "defense")
_WHOLE = ("index", "label", "draw", "clean_prediction", "plain_prediction", "prediction", "passes", "backward_passes")
_FLAGS = ("attacked", "attack_success", "correct", "gated")


@dataclass(frozen=True, eq=False)
class PerImage:
    """Columns of ``per_image.parquet`` as arrays of one length; what an old run did not measure is NaN."""

    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["index"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def where(self, mask: NDArray[np.bool_] | None = None, **equal: str | int | float | bool) -> PerImage:
        """The rows that the mask keeps and whose columns have these values.

        >>> rows = PerImage({"index": np.arange(3), "eps": np.array([0.0, 4 / 255, 4 / 255])})
        >>> len(rows.where(eps=4 / 255))
        2
        """
        keep = np.ones(len(self), dtype=np.bool_) if mask is None else mask.copy()
        for name, value in equal.items():
            column = self.columns[name]
            keep &= np.isclose(column, value, rtol=1e-6) if isinstance(value, float) else column == value
        return PerImage({name: column[keep] for name, column in self.columns.items()})

    def values(self, name: str) -> list[Any]:
        """The different values of a column, in the order of their first appearance."""
        return list(dict.fromkeys(self.columns[name].tolist()))


@dataclass(frozen=True, eq=False)
class Run:
    """One run, or several over the same photos joined to one."""

    folders: tuple[Path, ...]
    result: EvaluationResult | None
    recipe: dict[str, Any] | None
    images: PerImage | None
    missing: tuple[str, ...]
    """One line for each thing that is not there, with the way to get it."""

    @property
    def title(self) -> str:
        """What the run is called, from whatever part of it is left."""
        if self.result is not None:
            return self.result.title
        return str((self.recipe or {}).get("title", self.folders[0].name))


def read_run(folder: str | Path) -> Run:
    """Read what a folder of ``react-clip evaluate`` holds."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ReactClipError(f"{folder} is no folder; give the --out folder of `react-clip evaluate`")
    missing: list[str] = []
    result = _or_missing(missing, run_dir.RESULT, lambda: EvaluationResult.load(folder / run_dir.RESULT))
    recipe = None
    if result is None:  # a result holds its recipe
        recipe = _or_missing(missing, run_dir.RECIPE, lambda: yaml_text.read_mapping(folder / run_dir.RECIPE))
    images = _or_missing(missing, run_dir.PER_IMAGE, lambda: _read_images(folder / run_dir.PER_IMAGE))
    if not (folder / run_dir.RESULT).exists():
        shards = sum(1 for _ in (folder / run_dir.SHARDS).rglob("*.safetensors"))
        state = f"{shards} finished pieces of work are kept" if shards else "nothing has been computed yet"
        missing.insert(0, f"the run is not finished ({state}): the same `react-clip evaluate` command continues it")
    return Run((folder,), result, recipe, images, tuple(missing))


def read_runs(folders: Sequence[str | Path]) -> Run:
    """One run as it is; several runs over the same photos joined to one, each defence a row of its own."""
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 1:
        return runs[0]
    results = [run.result for run in runs]
    complete = [result for result in results if result is not None]
    if len(complete) < len(runs):
        absent = next(run.folders[0] for run in runs if run.result is None)
        raise ReactClipError(f"{absent} has no readable result to join with the others; finish it, or report it alone")
    images = [run.images for run in runs if run.images is not None]
    return Run(
        folders=tuple(run.folders[0] for run in runs),
        result=merge(complete),
        recipe=runs[0].recipe,
        images=_concatenated(images) if images else None,
        missing=tuple(f"{run.folders[0].name}: {line}" for run in runs for line in run.missing),
    )


def _concatenated(parts: Sequence[PerImage]) -> PerImage:
    return PerImage({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns})


def _or_missing(missing: list[str], name: str, read: Any) -> Any:
    try:
        return read()
    except ReactClipError as error:
        missing.append(str(error))
    except Exception as error:
        # Damaged files fail in as many ways as their libraries have exceptions; the page says so and goes on.
        reason = first_line(error)
        missing.append(f"{name} cannot be read ({reason}); run the evaluation again to write it")
    return None


def _read_images(path: Path) -> PerImage:
    if not path.exists():
        raise ReactClipError(f"{path} does not exist; figures and rows per image need it")
    parquet = require("pyarrow.parquet", "reading per-image results", extra="eval")
    table = parquet.read_table(path)
    if absent := [name for name in (*_TEXTS, *_WHOLE, *_FLAGS) if name not in table.column_names]:
        raise ReactClipError(f"{path} has no column {absent[0]!r}; it was written by another version of react-clip")
    columns: dict[str, NDArray[Any]] = {}
    for name in _TEXTS:
        columns[name] = np.asarray(table[name].to_pylist(), dtype=object)
    for name in _NUMBERS:
        measured = name in table.column_names
        columns[name] = table[name].to_numpy().astype(np.float64) if measured else np.full(len(table), np.nan)
    for name in (*_WHOLE, *_FLAGS):
        columns[name] = table[name].to_numpy()
    return PerImage(columns)


def defense_settings(run: Run) -> dict[str, dict[str, Any]]:
    """Each defence's configuration by its label, from the recipe of the result."""
    source = run.result.recipe if run.result is not None else run.recipe or {}
    found = source.get("defenses", [])
    configs = [{"kind": pop_kind(values := dict(item)), **values} for item in found if isinstance(item, dict)]
    return {str(config.get("label", config["kind"])): config for config in configs}
