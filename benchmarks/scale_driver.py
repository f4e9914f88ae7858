"""What the driver of a Ray job costs: CPU time a parcel and a second, and what happens before the first parcel.

    python benchmarks/scale_driver.py

Every run is ``react-clip embed --engine ray`` in processes of its own, with a tower so small that parcels end many
times a second. A driver works for two reasons: parcels end and others are sent (so much a parcel), and Ray Data's
scheduling loop looks around ten times a second whether or not anything happened (so much a second). Runs of different
speed tell them apart: thousands of images a parcel, of which few end a second, and two images a parcel. Each run gives
one equation, ``CPU seconds = a * seconds + b * parcels``, between the end of its first part and that of its last one,
so loading and start-up are not in it; a and b have the least squared relative error over all runs. CPU time is that of
the driver with all its threads; Ray's own two processes beside it (``gcs_server``, ``raylet``) are counted apart.

That loop visits every actor, and a machine has room for few that hold a model. So a second measurement has actors that
hold nothing and sleep, always letting four parcels through a second: how a grows with their number. Where they do not
sleep, the driver is all there is to wait for, and one look around serves several parcels: ``rush``. A third one is of
what a driver does before the first parcel: cutting a tar or a Parquet shard by its headers, and making the plan and the
blocks of ``--planned`` parcels. The result is benchmarks/results/scale-driver.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet
from scale_overhead import cpu_seconds
from serve_fuzz import where, write

import react_clip as rc
from react_clip.scale.cluster import connected
from react_clip.scale.files import File
from react_clip.scale.parcels import cut_shard
from react_clip.scale.plan import Plan, Shard

SIDE, KINDS = 36, 64
RUNS = {  # parcels, images in each, workers
    "slow parcels": (10, 4096, 1),
    "250 parcels": (250, 2, 1),
    "1,000 parcels": (1000, 2, 1),
    "1,000 parcels, 2 workers": (1000, 2, 2),
}
POOLS = (2, 32)
"""Actors in all, half of them in either stage."""
PACE = 4
"""Parcels a second that they let through, however many they are."""
RUSH = 8
"""Actors that let through what they are given."""
OURS, GCS, RAYLET = "driver", "gcs_server", "raylet"


# ---------------------------------------------------------------------- runs


def pictures(seed: int) -> list[bytes]:
    """Some tiny JPEGs; every image of a collection is one of them."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(KINDS):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(stream, "JPEG")
        found.append(stream.getvalue())
    return found


def make_shard(path: Path, images: int, contents: list[bytes]) -> None:
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w") as archive:
        for i in range(images):
            info = tarfile.TarInfo(f"{i:07d}.jpg")
            info.size = len(contents[i % KINDS])
            archive.addfile(info, io.BytesIO(contents[i % KINDS]))


def make_tower(folder: Path, contents: list[bytes], seed: int) -> list[str]:
    """Flags for a tower of a few thousand weights with two classes, whose gate stays shut."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPVisionConfig(**shape, projection_dim=16, image_size=32, patch_size=16, hidden_act="quick_gelu")
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    rc.ReACT(tau=1000.0).save(folder / "guard.json")
    for i in range(2):
        (folder / "classes" / f"class {i}").mkdir(parents=True)
        (folder / "classes" / f"class {i}" / "0.jpg").write_bytes(contents[i])
    return ["--model", str(folder), "--config", str(folder / "guard.json"), "--photos", str(folder / "classes")]


@dataclass(frozen=True)
class Run:
    """A job between the end of its first part and the end of its last one."""

    parcels: int
    seconds: float
    cpu: dict[str, float]
    """CPU seconds of the driver, of gcs_server and of the raylet in that time."""


def run(shard: Path, out: Path, parcel: int, workers: int, flags: list[str]) -> Run:
    command = [sys.executable, "-m", "react_clip", "embed", str(shard), "--out", str(out), "--json", "--quiet"]
    command += ["--parcel", str(parcel), "--engine", "ray", "--workers", str(workers), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    times: list[float] = []
    used: dict[str, list[float]] = {OURS: [], GCS: [], RAYLET: []}
    beside: dict[str, int] = {}
    while process.poll() is None:
        beside = beside if len(beside) == 2 else _beside(process.pid)
        times.append(time.time())
        for name, pid in ({OURS: process.pid} | beside).items():
            used[name].append(cpu_seconds(pid))
        for series in used.values():
            series += [0.0] * (len(times) - len(series))
        time.sleep(0.1)
    assert process.returncode == 0, f"the run with parcels of {parcel} ended with {process.returncode}"
    ends = sorted(path.stat().st_mtime for path in out.glob("part-*.parquet"))
    # A process that ends reads as 0 for a moment; its clock never ran backwards.
    clocks = {name: np.maximum.accumulate(series) for name, series in used.items()}
    cpu = {name: float(np.diff(np.interp([ends[0], ends[-1]], times, clock))[0]) for name, clock in clocks.items()}
    return Run(len(ends) - 1, ends[-1] - ends[0], cpu)


def _beside(root: int) -> dict[str, int]:
    """Ray's own processes below ours."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            parents[pid], names[pid] = int(rest.split()[1]), name
    return {name: pid for pid, name in names.items() if name in (GCS, RAYLET) and root in (pid, *_above(pid, parents))}


def _above(pid: int, parents: dict[int, int]) -> list[int]:
    line = []
    while pid in parents:
        pid = parents[pid]
        line.append(pid)
    return line


def fit(runs: list[Run], name: str) -> tuple[float, float]:
    """``a`` and ``b`` of ``cpu = a * seconds + b * parcels`` with the least squared relative error.

    Relative, because the run with slow parcels costs little and is the one that knows ``a``.
    """
    known = np.array([[one.seconds / one.cpu[name], one.parcels / one.cpu[name]] for one in runs])
    (a, b), *_ = np.linalg.lstsq(known, np.ones(len(runs)), rcond=None)
    return float(a), float(b)


# ---------------------------------------------------------------------- many actors


class _Sleeper:
    """An actor without a model."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, table: Any) -> Any:
        time.sleep(self._seconds)
        return table


def stream(actors: int, seconds: float, count: int) -> tuple[float, float]:
    """Parcels a second and the driver's share of a core, for actors that take so long for each of so many parcels."""
    import ray.data

    strategy = ray.data.ActorPoolStrategy(size=actors // 2, max_tasks_in_flight_per_actor=2)
    options = {"batch_size": None, "compute": strategy, "num_cpus": 0.01, "fn_constructor_args": (seconds,)}
    data = ray.data.from_items([{"n": n} for n in range(count)], override_num_blocks=count)
    data = data.map_batches(_Sleeper, **options).map_batches(_Sleeper, **options)
    marks = [(time.time(), time.process_time()) for _ in data.iter_batches(batch_size=None, prefetch_batches=0)]
    middle = marks[actors:-actors]  # while all of them had something to do
    took, used = (last - first for first, last in zip(middle[0], middle[-1], strict=True))
    return (len(middle) - 1) / took, used / took


def pools() -> tuple[dict[int, float], dict[str, float]]:
    """The driver's share of a core for few and many actors at one pace, and what it does when actors cost no time."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        ray.data.DataContext.get_current().enable_progress_bars = False
        pace, share = stream(RUSH, 0.0, 1500)
        rush = {"actors": RUSH, "parcels_per_second": pace, "cpu_share": share, "cpu_seconds_per_parcel": share / pace}
        shares = {actors: stream(actors, actors / 2 / PACE, 15 * PACE + 2 * actors)[1] for actors in POOLS}
    finally:
        ray.shutdown()
    return shares, rush


# ---------------------------------------------------------------------- before the first parcel


def planning(folder: Path, count: int, contents: list[bytes]) -> dict[str, float]:
    """Seconds and bytes that a driver needs for the plan of ``count`` parcels of 4,096 images."""
    images = 20_000
    make_shard(folder / "tar" / "0.tar", images, [content.ljust(13_000, b"\0") for content in contents])
    (folder / "rows").mkdir()
    parquet.write_table(pa.table({"image": [contents[0]] * images}), folder / "rows" / "0.parquet", row_group_size=1024)
    seconds = {}
    for kind in ("tar/0.tar", "rows/0.parquet"):
        file = File(str(folder / kind), (folder / kind).stat().st_size)
        cut_shard(file, "/", 4096, "image")  # the first time imports what it needs
        began = time.process_time()
        cut_shard(file, "/", 4096, "image")
        seconds[file.suffix] = time.process_time() - began
    each = 8
    cuts = tuple((i * 50_000_000, (i + 1) * 50_000_000, 4096) for i in range(each))
    shards = [Shard(File(f"s3://bucket/shards/{i:08d}.tar", each * 50_000_000), cuts) for i in range(count // each)]
    began = time.process_time()
    plan = Plan({"parcel": 4096}, (), tuple(shards), {})
    text = json.dumps(plan.to_dict(), indent=1)
    parcels = list(plan.parcels())
    planned = time.process_time() - began
    with connected() as ray:
        from react_clip.scale.ray_data import blocks

        gc.collect()  # what plan and shards left behind would be given back meanwhile
        memory, began = _resident(), time.process_time()
        kept = blocks(ray, parcels)
        result = {
            "tar_seconds_per_image": seconds[".tar"] / images,
            "parquet_seconds_per_shard": seconds[".parquet"],
            "parcels": len(parcels),
            "plan_seconds_per_parcel": planned / len(parcels),
            "plan_bytes_per_parcel": len(text) / len(parcels),
            "block_seconds_per_parcel": (time.process_time() - began) / len(parcels),
            "block_memory_bytes_per_parcel": (_resident() - memory) / len(parcels),
        }
        del kept
    return result


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planned", type=int, default=50_000, help="parcels of the plan that is made (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    contents, runs = pictures(args.seed), {}
    shares, rush = pools()
    print(shares, rush, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="scale-driver-") as name:
        work = Path(name)
        flags = make_tower(work / "tower", contents, args.seed)
        for i, (what, (parcels, size, workers)) in enumerate(RUNS.items()):
            make_shard(work / f"in-{i}" / "0.tar", parcels * size, contents)
            runs[what] = run(work / f"in-{i}" / "0.tar", work / f"out-{i}", size, workers, flags)
            print(what, runs[what], file=sys.stderr)
        before = planning(work / "plan", args.planned, contents)
    (fewest, low), *_, (most, high) = shares.items()
    fits = {name: fit(list(runs.values()), name) for name in (OURS, GCS, RAYLET)}
    a, b = fits[OURS]
    about = where()
    about["versions"] |= {name: version(name) for name in ("ray", "pyarrow")}
    result = {
        **about,
        "seed": args.seed,
        "runs": {
            what: {
                "parcels": one.parcels,
                "seconds": round(one.seconds, 2),
                "cpu_seconds": {name: round(value, 2) for name, value in one.cpu.items()},
                "driver_fitted": round(a * one.seconds + b * one.parcels, 2),
            }
            for what, one in runs.items()
        },
        "cpu_share": {name: round(a, 5) for name, (a, _) in fits.items()},
        "cpu_seconds_per_parcel": {name: round(b, 6) for name, (_, b) in fits.items()},
        "cpu_share_by_actors": {str(actors): round(share, 4) for actors, share in shares.items()},
        "cpu_share_per_actor": round(max(0.0, high - low) / (most - fewest), 6),
        "rush": {name: round(value, 6) for name, value in rush.items()},
        "before": {name: round(value, 9) for name, value in before.items()},
    }
    write("scale-driver.json", result)


if __name__ == "__main__":
    main()
