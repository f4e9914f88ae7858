"""Small matrices for the machine's limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from react_clip.bench import hardware


# Of a module: in a folder without __init__.py a fixture of a "package" would last for the rest of the run.
@pytest.fixture(scope="module", autouse=True)
def _small_matrices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hardware.MATRIX_SIDE, "cpu", 256)
        patch.setitem(hardware.COPIED_BYTES, "cpu", 2**20)
        yield
