"""What a billion images take on 8, 64 and 512 GPUs, from what was measured on one machine, and what saturates first.

    python benchmarks/scale_model.py

Measured: images a second of the defence on one GPU, clean and attacked (results/bench); what the engine costs above the
plain path, seconds to decode an image and bytes that move (results/scale-overhead.json); the driver's work, a second,
an actor and a parcel, and what it does before the first parcel (results/scale-driver.json). Assumed, and to be replaced
by what you have: the flags below. Every resource has a capacity in images a second; the smallest one is the speed of
the cluster.

Checks say how wrong the arithmetic is: the run with two workers, predicted from the one with one; the driver's CPU time
in the run of 10,000 images, predicted from a fit to runs with far smaller parcels; and that fit in its own runs. The
result is benchmarks/results/scale-model.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve_fuzz import RESULTS, where, write

CLUSTERS = (8, 64, 512)
SHARED = ("storage", "driver")
"""What does not grow with the number of GPUs."""
_CONTENDERS = {"clean": "ReACT", "attacked": "all 14 passes"}
"""Whose speed counts: who keeps features draws all views of an open gate; ReACT in the bench stops at the answer."""
_MOST_GPUS = 1 << 20


@dataclass(frozen=True)
class Measured:
    """One machine's numbers."""

    clean_per_second: float
    attacked_per_second: float
    overhead: float
    decode_seconds: float
    stored_bytes: float
    read_bytes: float
    written_bytes: float
    driver_share: float
    """Of a core, for Ray Data's loop alone."""
    driver_share_per_actor: float
    driver_seconds_per_parcel: float
    tar_seconds: float
    """To plan one image of a tar shard."""
    parcel_seconds: float
    """To plan one parcel and make its block."""
    parcel_memory: float
    """Bytes of the driver's memory that a waiting parcel takes."""
    plan_bytes: float
    """Of plan.json, a parcel."""


@dataclass(frozen=True)
class Cluster:
    """What is assumed about machines and their surroundings."""

    cores_per_gpu: float
    gpus_per_node: int
    workers_per_gpu: int
    node_bytes_per_second: float
    """Either way."""
    crossing: float
    """Share of decoded pixels that are defended on another node than they were decoded on."""
    storage_bytes_per_second: float
    parcel: int
    attacked: float
    dollars_per_gpu_hour: float

    def nodes(self, gpus: int) -> int:
        return -(-gpus // self.gpus_per_node)

    def actors(self, gpus: int) -> float:
        """Workers, and a decoder on every core."""
        return gpus * (self.workers_per_gpu + self.cores_per_gpu)


def capacities(measured: Measured, cluster: Cluster, gpus: int) -> dict[str, float]:
    """Images a second that each resource allows."""
    image = (1 - cluster.attacked) / measured.clean_per_second + cluster.attacked / measured.attacked_per_second
    nodes = cluster.nodes(gpus)
    crossing = cluster.crossing * measured.stored_bytes if nodes > 1 else 0.0
    busiest = crossing + max(measured.read_bytes, measured.written_bytes)
    looking = measured.driver_share + measured.driver_share_per_actor * cluster.actors(gpus)
    return {
        "encoder": gpus / (image * measured.overhead),
        "decoding": gpus * cluster.cores_per_gpu / measured.decode_seconds,
        "network": nodes * cluster.node_bytes_per_second / busiest,
        "storage": cluster.storage_bytes_per_second / (measured.read_bytes + measured.written_bytes),
        # It has one core: what looking around leaves of it goes to parcels.
        "driver": cluster.parcel * max(0.0, 1 - looking) / measured.driver_seconds_per_parcel,
    }


def forecast(measured: Measured, cluster: Cluster, gpus: int, images: int) -> dict[str, Any]:
    """How fast, limited by what, for how much."""
    found = capacities(measured, cluster, gpus)
    limit = min(found, key=found.__getitem__)
    hours = images / found[limit] / 3600 if found[limit] else float("inf")
    return {
        "gpus": gpus,
        "images_per_second": round(found[limit]),
        "limited_by": limit,
        "hours": round(hours, 2),
        "dollars_per_million_images": round(1e6 * hours * gpus * cluster.dollars_per_gpu_hour / images, 3),
        "used": {name: round(found[limit] / value, 3) if value else 1.0 for name, value in found.items()},
        "capacities": {name: round(value) for name, value in found.items()},
    }


def saturation(measured: Measured, cluster: Cluster) -> dict[str, int]:
    """The first number of GPUs, in whole nodes, whose encoders ask more of a shared resource than it has."""

    def enough(name: str, nodes: int) -> bool:
        found = capacities(measured, cluster, nodes * cluster.gpus_per_node)
        return found[name] >= found["encoder"]

    first = {}
    for name in SHARED:
        low, high = 0, _MOST_GPUS // cluster.gpus_per_node
        while high - low > 1:  # a shared resource never gets better with more GPUs
            middle = (low + high) // 2
            low, high = (middle, high) if enough(name, middle) else (low, middle)
        first[name] = high * cluster.gpus_per_node
    return first


def before(measured: Measured, cluster: Cluster, images: int) -> dict[str, float]:
    """What the driver of one job does before the first image is defended."""
    parcels = -(-images // cluster.parcel)
    return {
        "parcels": parcels,
        "tar_hours": round(images * measured.tar_seconds / 3600, 2),
        "parcel_hours": round(parcels * measured.parcel_seconds / 3600, 3),
        "memory_bytes": round(parcels * measured.parcel_memory),
        "plan_bytes": round(parcels * measured.plan_bytes),
    }


# ---------------------------------------------------------------------- checks


def check_workers(run: dict[str, Any], driver: dict[str, Any]) -> dict[str, float]:
    """The same arithmetic on the machine that was measured: cores are shared by workers, decoders and the engine.

    A core-second budget per image follows from one worker and what it leaves idle; two workers have all cores.
    """
    one, two = run["images_per_second"]["ray, 1 worker"], run["images_per_second"]["ray, 2 workers"]
    busy = 1 / one + run["decode_seconds_per_image"] + driver["cpu_seconds_per_parcel"]["driver"] / run["parcel"]
    predicted = min(2 * one, (run["cores"] - driver["cpu_share"]["driver"]) / busy)
    return _compared(predicted, two)


def check_driver(run: dict[str, Any], driver: dict[str, Any]) -> dict[str, float]:
    """CPU seconds a parcel of the driver in the large run, whose parcels are a hundred times slower than the fit's."""
    seconds = run["parcel"] / run["images_per_second"]["ray, 1 worker"]
    predicted = driver["cpu_share"]["driver"] * seconds + driver["cpu_seconds_per_parcel"]["driver"]
    return {"images": run["images"], **_compared(predicted, run["driver_cpu_seconds_per_parcel"])}


def check_fit(driver: dict[str, Any]) -> dict[str, float]:
    """How far the fit is from the runs it was made of; and how many parcels a second a driver managed in a rush."""
    errors = [one["driver_fitted"] / one["cpu_seconds"]["driver"] - 1 for one in driver["runs"].values()]
    rush = driver["rush"]
    least, most = round(min(errors), 3), round(max(errors), 3)
    return {"least": least, "most": most, "parcels_per_second": rush["parcels_per_second"], "share": rush["cpu_share"]}


def _compared(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": round(predicted, 3), "measured": measured, "error": round(predicted / measured - 1, 3)}


# ---------------------------------------------------------------------- what was measured


def gpu_speed(folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Images a second that one GPU defends, clean and attacked, and the files that say so."""
    speed, files = {}, {}
    for state, label in _CONTENDERS.items():
        files[state] = f"gpu-vit-b-16-table-{state}.json"
        rows = json.loads((folder / files[state]).read_text())["contenders"]
        speed[state] = next(row["images_per_second"] for row in rows if row["label"] == label)
    return speed, files


def gathered(run: dict[str, Any], driver: dict[str, Any], speed: dict[str, float]) -> Measured:
    start = driver["before"]
    return Measured(
        clean_per_second=speed["clean"],
        attacked_per_second=speed["attacked"],
        overhead=max(1.0, run["overhead"]),
        decode_seconds=run["decode_seconds_per_image"],
        stored_bytes=run["object_store_bytes_per_image"],
        read_bytes=run["read_bytes_per_image"],
        written_bytes=run["written_bytes_per_image"],
        driver_share=driver["cpu_share"]["driver"],
        driver_share_per_actor=driver["cpu_share_per_actor"],
        driver_seconds_per_parcel=driver["cpu_seconds_per_parcel"]["driver"],
        tar_seconds=start["tar_seconds_per_image"],
        parcel_seconds=start["plan_seconds_per_parcel"] + start["block_seconds_per_parcel"],
        parcel_memory=start["block_memory_bytes_per_parcel"],
        plan_bytes=start["plan_bytes_per_parcel"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--attacked", type=float, default=0.01, help="share of images that are attacked (%(default)s)")
    parser.add_argument("--parcel", type=int, default=4096)
    parser.add_argument("--cores-per-gpu", type=float, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--workers-per-gpu", type=int, default=2, help="as the engine has them (%(default)s)")
    parser.add_argument("--node-gbit", type=float, default=100, help="network of a node, Gbit/s (%(default)s)")
    parser.add_argument("--crossing", type=float, default=1.0, help="share of pixels that cross nodes (%(default)s)")
    parser.add_argument("--storage-gbyte", type=float, default=20, help="of all storage together, GB/s (%(default)s)")
    parser.add_argument("--dollars", type=float, default=4.0, help="a GPU with its cores, an hour (%(default)s)")
    args = parser.parse_args()
    run, driver, batches = (
        json.loads((RESULTS / f"scale-{name}.json").read_text()) for name in ("overhead", "driver", "batches")
    )
    speed, files = gpu_speed(RESULTS / "bench")
    measured = gathered(run, driver, speed)
    cluster = Cluster(
        cores_per_gpu=args.cores_per_gpu,
        gpus_per_node=args.gpus_per_node,
        workers_per_gpu=args.workers_per_gpu,
        node_bytes_per_second=args.node_gbit * 1e9 / 8,
        crossing=args.crossing,
        storage_bytes_per_second=args.storage_gbyte * 1e9,
        parcel=args.parcel,
        attacked=args.attacked,
        dollars_per_gpu_hour=args.dollars,
    )
    images = int(args.images)
    result = {
        **where(),
        "images": images,
        "speed_files": files,
        "measured": asdict(measured),
        "driver_share_by_actors": driver["cpu_share_by_actors"],
        "assumed": asdict(cluster),
        "checks": {
            "two workers": check_workers(run, driver),
            "driver": check_driver(run, driver),
            "fit": check_fit(driver),
        },
        "forecast": [forecast(measured, cluster, gpus, images) for gpus in CLUSTERS],
        "saturates_at_gpus": saturation(measured, cluster),
        "before": before(measured, cluster, images),
        "batches": batches["parcels"],
    }
    write("scale-model.json", result)


if __name__ == "__main__":
    main()
