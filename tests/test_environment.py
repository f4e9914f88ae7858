"""Processes that share cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from react_clip.environment import share_cores

VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "900000 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, "2"),
        ({"cpu.max": "50000 100000\n"}, "1"),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3"),
    ],
)
def test_threads_follow_the_quota_of_a_container(
    files: dict[str, str], threads: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    share_cores(tmp_path)
    assert [os.environ.get(name) for name in VARIABLES] == ["PASSIVE", threads]
    monkeypatch.setattr(os, "environ", chosen := dict.fromkeys(VARIABLES, "of the user"))
    share_cores(tmp_path)
    assert os.environ == chosen | dict.fromkeys(VARIABLES, "of the user")


def test_the_package_sets_them_before_torch_reads_them() -> None:
    program = "import react_clip, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stdout.split() == ["PASSIVE", "False"]
