"""What a billion images take on 8, 64 and 512 GPUs, from what was measured on one machine, and what saturates first.

    python benchmarks/scale_model.py

Measured: images a second of ReACT on one GPU, clean and attacked (results/bench/rivals-*.json); what the engine costs
above the plain path, seconds to decode an image, bytes that move and the driver's own work a parcel
(results/scale-overhead.json). Assumed, and to be replaced by what you have: the flags below. Every resource has a
capacity in images a second; the smallest one is the speed of the cluster. The same arithmetic predicts the two-worker
run from the one-worker run, which was measured too, so the model's error is known. The result is
benchmarks/results/scale-model.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from serve_fuzz import RESULTS, where, write

CLUSTERS = (8, 64, 512)
_REACT = "ReACT"


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
    driver_seconds: float
    """CPU seconds of the driver for one parcel."""


@dataclass(frozen=True)
class Cluster:
    """What is assumed about machines and their surroundings."""

    cores_per_gpu: float
    gpus_per_node: int
    node_bytes_per_second: float
    storage_bytes_per_second: float
    parcel: int
    attacked: float
    dollars_per_gpu_hour: float


def capacities(measured: Measured, cluster: Cluster, gpus: int) -> dict[str, float]:
    """Images a second that each resource allows."""
    image = (1 - cluster.attacked) / measured.clean_per_second + cluster.attacked / measured.attacked_per_second
    nodes = -(-gpus // cluster.gpus_per_node)
    # Decoded pixels pass the network once at worst: a block may be decoded on another node than it is defended on.
    moved = measured.read_bytes + measured.stored_bytes + measured.written_bytes
    return {
        "encoder": gpus / (image * measured.overhead),
        "decoding": gpus * cluster.cores_per_gpu / measured.decode_seconds,
        "network": nodes * cluster.node_bytes_per_second / moved,
        "storage": cluster.storage_bytes_per_second / (measured.read_bytes + measured.written_bytes),
        "driver": cluster.parcel / measured.driver_seconds,
    }


def forecast(measured: Measured, cluster: Cluster, gpus: int, images: int) -> dict[str, Any]:
    """How fast, limited by what, for how much."""
    found = capacities(measured, cluster, gpus)
    limit = min(found, key=found.__getitem__)
    hours = images / found[limit] / 3600
    return {
        "gpus": gpus,
        "images_per_second": round(found[limit]),
        "limited_by": limit,
        "hours": round(hours, 2),
        "dollars_per_million_images": round(1e6 * hours * gpus * cluster.dollars_per_gpu_hour / images, 3),
        "capacities": {name: round(value) for name, value in found.items()},
    }


def saturation(measured: Measured, cluster: Cluster) -> dict[str, float]:
    """With how many GPUs each shared resource becomes the limit; those that grow with the cluster have none."""
    one = capacities(measured, cluster, cluster.gpus_per_node)
    encoder = one["encoder"] / cluster.gpus_per_node
    return {name: round(one[name] / encoder) for name in ("storage", "driver")}


def check(run: dict[str, Any]) -> dict[str, float]:
    """The same arithmetic on the machine that was measured: cores are shared by workers, decoders and the engine.

    A core-second budget per image follows from one worker and what it leaves idle; two workers have all cores.
    """
    one, two = run["images_per_second"]["ray, 1 worker"], run["images_per_second"]["ray, 2 workers"]
    driver = run["driver_cpu_seconds_per_parcel"] / run["parcel"]
    busy = 1 / one + run["decode_seconds_per_image"] + driver
    predicted = min(2 * one, run["cores"] / busy)
    return {"predicted": round(predicted, 3), "measured": two, "error": round(predicted / two - 1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--attacked", type=float, default=0.01, help="share of images whose gate opens (%(default)s)")
    parser.add_argument("--parcel", type=int, default=4096)
    parser.add_argument("--cores-per-gpu", type=float, default=16)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--node-gbit", type=float, default=100, help="network of a node, Gbit/s (%(default)s)")
    parser.add_argument("--storage-gbyte", type=float, default=20, help="of all storage together, GB/s (%(default)s)")
    parser.add_argument("--dollars", type=float, default=4.0, help="a GPU with its cores, an hour (%(default)s)")
    args = parser.parse_args()
    run = json.loads((RESULTS / "scale-overhead.json").read_text())
    speed = {
        name: next(row["images_per_second"] for row in bench["contenders"] if row["label"] == _REACT)
        for name in ("clean", "attacked")
        for bench in [json.loads((RESULTS / "bench" / f"rivals-{name}.json").read_text())]
    }
    measured = Measured(
        clean_per_second=speed["clean"],
        attacked_per_second=speed["attacked"],
        overhead=max(1.0, run["overhead"]),
        decode_seconds=run["decode_seconds_per_image"],
        stored_bytes=run["object_store_bytes_per_image"],
        read_bytes=run["read_bytes_per_image"],
        written_bytes=run["written_bytes_per_image"],
        driver_seconds=run["driver_cpu_seconds_per_parcel"],
    )
    cluster = Cluster(
        cores_per_gpu=args.cores_per_gpu,
        gpus_per_node=args.gpus_per_node,
        node_bytes_per_second=args.node_gbit * 1e9 / 8,
        storage_bytes_per_second=args.storage_gbyte * 1e9,
        parcel=args.parcel,
        attacked=args.attacked,
        dollars_per_gpu_hour=args.dollars,
    )
    result = {
        **where(),
        "images": int(args.images),
        "measured": vars(measured),
        "assumed": vars(cluster),
        "check": check(run),
        "forecast": [forecast(measured, cluster, gpus, int(args.images)) for gpus in CLUSTERS],
        "saturates_at_gpus": saturation(measured, cluster),
    }
    write("scale-model.json", result)


if __name__ == "__main__":
    main()
