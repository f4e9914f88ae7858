"""Ray clusters of several nodes on this machine, as real as it gets without a second machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs the scale extra")


@contextlib.contextmanager
def started(*cpus: int) -> Iterator[Any]:
    """A cluster with one node per entry, connected to; the first node is the head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Two nodes that last for a module; tests that kill a node start their own cluster with ``started``."""
    with started(2, 2) as cluster:
        yield cluster
