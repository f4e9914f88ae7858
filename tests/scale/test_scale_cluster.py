"""Joining a cluster: one's own, one that is not there, and one with other software."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import ray

import react_clip as rc
from react_clip.cli import main
from react_clip.environment import versions
from react_clip.scale.cluster import connected


def test_a_cluster_of_ones_own_ends_with_the_work() -> None:
    with connected() as joined:
        assert joined is ray
        assert ray.is_initialized()
        with connected() as again:
            assert again is ray
        assert ray.is_initialized(), "whoever found it running leaves it running"
    assert not ray.is_initialized()


def test_an_address_without_a_cluster_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, photos: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:  # bound and silent: nobody listens there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--model", str(tiny_folder), "--labels", "cat, dog", "--config", "paper", "--quiet"]
        command = ["embed", str(photos), "--out", str(tmp_path / "out"), *options, "--engine", "ray", "--address"]
        assert main([*command, address]) == 2
    shown = capsys.readouterr().err
    assert f"no Ray cluster answers at {address}" in shown
    assert shown.count("\n") == 1
    assert main([*command, "somewhere"]) == 2
    assert "--address is 'somewhere'; write host:port" in capsys.readouterr().err


def test_workers_with_other_software_are_refused(cluster_of: Any, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(Path(rc.__file__).parent, copy / "react_clip", ignore=shutil.ignore_patterns("__pycache__"))
    init = copy / "react_clip" / "environment.py"
    init.write_text(init.read_text().replace(f'__version__ = "{rc.__version__}"', '__version__ = "0.0.1"'))
    with cluster_of(1) as cluster:
        with connected(cluster.address):
            pass
        node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(copy)})
        wanted = f"has react-clip 0.0.1, here {rc.__version__}; install the same versions on both sides"
        with pytest.raises(rc.ReactClipError, match=wanted), connected(cluster.address):
            pytest.fail("nobody should get here")
        cluster.remove_node(node)


def test_software_names_what_decides_results() -> None:
    assert versions().keys() == {"react-clip", "torch", "transformers", "python"}
