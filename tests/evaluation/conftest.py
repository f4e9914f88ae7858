"""One finished toy run that many tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import toy_run

from react_clip.evaluation import EvaluationResult


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    """An uninterrupted run; look, do not touch."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, toy_run(folder)


@pytest.fixture(scope="session")
def rows_of() -> Any:
    """Per-image rows of a run as dictionaries, with NaN as None so that they compare."""
    import pyarrow.parquet as pq

    def read(folder: Path) -> list[dict[str, Any]]:
        rows = pq.read_table(folder / "images.parquet").to_pylist()
        return [{key: None if value != value else value for key, value in row.items()} for row in rows]

    return read
