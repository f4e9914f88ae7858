"""A single thread for everybody here, and a short look at what the machine can do: no test asks how fast it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from react_clip.bench import machine
from threads import one_thread


# Of a module: in a folder without __init__.py a fixture of a "package" would last for the rest of the run.
@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine._SIDES, "cpu", 256)
        patch.setitem(machine._COPIED, "cpu", 2**20)
        yield
