"""One finished toy run that many tests look at, and a single thread for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import toy_run

from react_clip.evaluation import EvaluationResult
from threads import one_thread


# Of a module: in a folder without __init__.py a fixture of a "package" would last for the rest of the run.
@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    """An uninterrupted run; look, do not touch."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with one_thread():
        return folder, toy_run(folder)


@pytest.fixture(scope="session")
def rows_of() -> Any:
    """Per-image rows of a run as dictionaries, with NaN as None so that they compare."""
    import pyarrow.parquet as pq

    def read(folder: Path) -> list[dict[str, Any]]:
        rows = pq.read_table(folder / "per_image.parquet").to_pylist()
        return [{key: None if value != value else value for key, value in row.items()} for row in rows]

    return read
