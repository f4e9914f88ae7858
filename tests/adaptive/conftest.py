"""A single thread for everybody here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from threads import one_thread


# Of a module: in a folder without __init__.py a fixture of a "package" would last for the rest of the run.
@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
