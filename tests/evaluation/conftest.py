"""One finished toy run that many tests look at, and a single thread for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import toy_run

from react_clip.evaluation import EvaluationResult


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run faster on one thread, and leave the others to other people."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def finished(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    """An uninterrupted run; look, do not touch."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, toy_run(folder)


@pytest.fixture(scope="session")
def rows_of() -> Any:
    """Per-image rows of a run as dictionaries, with NaN as None so that they compare."""
    import pyarrow.parquet as pq

    def read(folder: Path) -> list[dict[str, Any]]:
        rows = pq.read_table(folder / "per_image.parquet").to_pylist()
        return [{key: None if value != value else value for key, value in row.items()} for row in rows]

    return read
