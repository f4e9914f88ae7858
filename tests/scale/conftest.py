"""Ray clusters of several nodes on this machine, as real as it gets without a second machine, and collections."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import react_clip as rc
from threads import one_thread

ray = pytest.importorskip("ray", reason="needs the scale extra")
pa = pytest.importorskip("pyarrow", reason="needs the scale extra")


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


@pytest.fixture(scope="session")
def cluster_of() -> Callable[..., Any]:
    """``with cluster_of(2, 1) as cluster``: nodes with so many cores, for tests that damage theirs."""
    return started


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Two nodes that last for a module; tests that kill a node start their own cluster with ``started``."""
    with started(2, 2) as cluster:
        yield cluster


@pytest.fixture(scope="package", autouse=True)
def _no_niceness() -> Iterator[None]:
    """By default, Ray's workers stand back behind everybody else: beside other tests they take many times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As many as a worker has, so that both sides add up their sums in the same order."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def clf(tiny_folder: Path) -> rc.ZeroShotClassifier:
    """The small CLIP with three classes; workers load it from its folder."""
    return rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu"), ["cat", "dog", "teapot"])


@pytest.fixture(scope="session")
def picture() -> Callable[[int], bytes]:
    """The n-th of endlessly many photos, as a PNG file."""

    def draw(seed: int) -> bytes:
        stream = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 256, (36, 44, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(stream, "PNG")
        return stream.getvalue()

    return draw


@pytest.fixture
def photos(tmp_path: Path, picture: Callable[[int], bytes]) -> Path:
    """Twenty photos in two folders; the eighth is none."""
    folder = tmp_path / "photos"
    for i in range(20):
        path = folder / f"{'ab'[i // 10]}" / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if i == 7 else picture(i))
    return folder


@pytest.fixture(scope="session")
def write_tar() -> Callable[[Path, dict[str, bytes]], Path]:
    """Write a shard with these members."""

    def write(path: Path, members: dict[str, bytes]) -> Path:
        with tarfile.open(path, "w") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path

    return write


@pytest.fixture(scope="session")
def read_parts() -> Callable[[Path], Any]:
    """All rows of an output folder, part after part."""
    from pyarrow import parquet

    def read(folder: Path) -> Any:
        return pa.concat_tables([parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])

    return read
