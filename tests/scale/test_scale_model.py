"""The arithmetic of benchmarks/scale_model.py and the fit of scale_driver.py: the smallest capacity decides."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The script as a module; it imports others from its folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("scale_model")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def measured(model: Any) -> Any:
    return model.Measured(
        clean_per_second=1000.0,
        attacked_per_second=500.0,
        overhead=1.0,
        decode_seconds=0.001,
        stored_bytes=100_000.0,
        read_bytes=10_000.0,
        written_bytes=2_000.0,
        driver_share=0.1,
        driver_share_per_actor=0.0,
        driver_seconds_per_parcel=0.01,
        tar_seconds=3.6e-5,
        parcel_seconds=0.0036,
        parcel_memory=5000.0,
        plan_bytes=60.0,
    )


@pytest.fixture(scope="module")
def cluster(model: Any) -> Any:
    return model.Cluster(
        cores_per_gpu=16,
        gpus_per_node=8,
        workers_per_gpu=2,
        node_bytes_per_second=1e10,
        crossing=1.0,
        storage_bytes_per_second=1.2e9,
        parcel=1000,
        attacked=0.0,
        dollars_per_gpu_hour=3.6,
    )


def test_capacities_follow_from_what_was_measured(model: Any, measured: Any, cluster: Any) -> None:
    found = model.capacities(measured, cluster, 16)
    assert found == pytest.approx(
        {
            "encoder": 16 * 1000,
            "decoding": 16 * 16 / 0.001,
            "network": 2 * 1e10 / 110_000,  # what is read and decoded elsewhere comes in
            "storage": 1.2e9 / 12_000,
            "driver": 1000 * 0.9 / 0.01,  # the loop takes a tenth of its core
        }
    )
    assert model.capacities(measured, cluster, 8)["network"] == pytest.approx(1e10 / 10_000)  # one node: none crosses
    half = replace(cluster, attacked=0.5)
    assert model.capacities(measured, half, 3)["encoder"] == pytest.approx(3 / (0.5 / 1000 + 0.5 / 500))


def test_the_smallest_capacity_decides(model: Any, measured: Any, cluster: Any) -> None:
    free = model.forecast(measured, cluster, 8, 10**9)
    assert (free["limited_by"], free["images_per_second"]) == ("encoder", 8000)
    assert free["hours"] == pytest.approx(10**9 / 8000 / 3600, abs=0.01)
    assert free["dollars_per_million_images"] == pytest.approx(1e6 / 8000 / 3600 * 8 * 3.6, abs=0.001)
    assert free["used"]["encoder"] == 1.0
    for limit, other in (
        ("decoding", {"cores_per_gpu": 0.5}),
        ("network", {"node_bytes_per_second": 1e6}),
        ("storage", {"storage_bytes_per_second": 1e6}),
        ("driver", {"parcel": 10}),
    ):
        assert model.forecast(measured, replace(cluster, **other), 64, 10**9)["limited_by"] == limit
    lost = model.forecast(replace(measured, driver_share_per_actor=0.01), cluster, 64, 10**9)
    assert (lost["limited_by"], lost["images_per_second"]) == ("driver", 0)


def test_shared_resources_saturate_where_the_encoders_outgrow_them(model: Any, measured: Any, cluster: Any) -> None:
    assert model.saturation(measured, cluster) == {"storage": 104, "driver": 96}  # from 100,000 and 90,000 images/s
    for name, gpus in model.saturation(measured, cluster).items():
        enough, short = (model.capacities(measured, cluster, count) for count in (gpus - 8, gpus))
        assert enough[name] >= enough["encoder"]
        assert short[name] < short["encoder"]


def test_what_comes_before_grows_with_the_collection(model: Any, measured: Any, cluster: Any) -> None:
    found = model.before(measured, cluster, 10**9)
    assert found == {
        "parcels": 10**6,
        "tar_hours": 10.0,
        "parcel_hours": 1.0,
        "memory_bytes": 5 * 10**9,
        "plan_bytes": 60 * 10**6,
    }


def test_checks_compare_with_the_run_that_was_measured(model: Any) -> None:
    speeds = {"ray, 1 worker": 25.0, "ray, 2 workers": 50.0}
    run = {"images": 10, "images_per_second": speeds, "decode_seconds_per_image": 0.001, "parcel": 250, "cores": 2}
    driver = {"cpu_share": {"driver": 0.05}, "cpu_seconds_per_parcel": {"driver": 0.02}}
    cpu = model.check_driver({**run, "driver_cpu_seconds_per_parcel": 0.52}, driver)
    assert cpu == {"images": 10, "predicted": 0.52, "measured": 0.52, "error": 0.0}
    runs = {name: {"driver_fitted": fitted, "cpu_seconds": {"driver": 10.0}} for name, fitted in (("a", 9), ("b", 12))}
    fit = model.check_fit({"runs": runs, "rush": {"parcels_per_second": 70.0, "cpu_share": 0.9}})
    assert (fit["least"], fit["most"]) == (-0.1, 0.2)
    two = model.check_workers(run, driver)
    assert two["predicted"] == pytest.approx(1.95 / (0.04 + 0.001 + 0.00008), abs=0.001)
    assert two["error"] < 0


def test_the_fit_tells_seconds_from_parcels(model: Any) -> None:
    driver = importlib.import_module("scale_driver")
    sizes = ((10, 60.0), (250, 10.0), (1000, 20.0))
    runs = [driver.Run(n, seconds, {"driver": 0.05 * seconds + 0.012 * n}) for n, seconds in sizes]
    assert driver.fit(runs, "driver") == pytest.approx((0.05, 0.012))
