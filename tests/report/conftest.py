"""A finished run to report on."""

from __future__ import annotations

from pathlib import Path

import pytest

from synthetic_runs import save_run, synthetic_run

HOSTILE = "<img src=x onerror=alert(1)>"
"""A class name that would run code if it ever became markup."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run whose title and class names nobody should trust."""
    result = synthetic_run(names=(HOSTILE, "</script><script>alert(2)</script>", "tabby cat"))
    object.__setattr__(result, "title", "Toys {{ run }} </title>")
    return save_run(result, tmp_path_factory.mktemp("runs") / "toy")
