"""Connecting to a cluster, and choosing workers for its nodes."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.data

import react_clip as rc
from react_clip.environment import versions
from react_clip.evaluation import Recipe
from react_clip.scale.cluster import connected, require_versions, resources
from react_clip.scale.evaluation import _Worker


def cluster_of(*nodes: dict[str, float]) -> Any:
    """What ``resources`` reads of the ``ray`` module."""
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes], data=ray.data)


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        ([{"CPU": 8}, {"CPU": 2}, {}], (None, None), ("cpu", 2, {"num_cpus": 4})),
        ([{"CPU": 5}], (4, None), ("cpu", 4, {"num_cpus": 1})),
        ([{"CPU": 8, "GPU": 4}] * 2, (None, None), ("cuda", 8, {"num_gpus": 1})),
        ([{"CPU": 8, "GPU": 2}], (4, "cuda"), ("cuda", 4, {"num_gpus": 0.5})),
        ([{"CPU": 10, "GPU": 2}], (None, "cpu"), ("cpu", 1, {"num_cpus": 8})),
    ],
)
def test_workers_fit_the_nodes(nodes: Any, asked: Any, expected: Any) -> None:
    device, pool, share = resources(cluster_of(*nodes), *asked)
    assert (device, pool.min_size, share) == expected


def test_what_cannot_work_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match="--device is cuda, but the cluster has no GPU"):
        resources(cluster_of({"CPU": 2}), None, "cuda")
    with pytest.raises(rc.ReactClipError, match=r"has torch .*, the driver torch 0.1; install the same versions"):
        require_versions({**versions(), "torch": "0.1"})
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rc.ReactClipError, match=f"no Ray cluster answers at '{address}' .*; start one with"):
            connected(address, advice="").__enter__()
    with pytest.raises(rc.ReactClipError, match="no Ray cluster answers at 'somewhere'"):
        connected("somewhere", advice="").__enter__()
    recipe = Recipe.from_dict({"title": "Tiny", "model": "tiny", "datasets": ["toys"], "defenses": ["aom"]})
    with pytest.raises(rc.ReactClipError, match=rf"does not see {tmp_path}; put --out where all nodes see it"):
        _Worker(recipe, tmp_path, {}, versions())
