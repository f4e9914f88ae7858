"""What a cluster costs and brings: one collection, defended by the local engine and by Ray with one and two workers.

    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 10000 --small
    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 320 --parcel 16 \\
        --out scale-overhead-tower.json -- --model clip-vit-b-16 --dtype bf16

Everything after ``--`` goes to ``react-clip embed``; ``--small`` stands for an image tower with random weights that
is some sixty times cheaper than ViT-B/16, so that the engine weighs more than it ever will. The collection is
``--images`` small JPEGs, random cuts of the photos given, in tar shards. Every side is ``react-clip embed`` in
processes of its own; sides take turns. On CPUs the local engine is given one thread for the comparison, as much as a
worker has, and once all of them. Speed is that of the steady state: from the end of the first parts to the end of the
last one, so start-up and loading are left out (they are in ``seconds``). Memory is the peak of every process, for a
quarter of the images and for all: it must not grow. Sides must agree on every gate and every pass. The result is
benchmarks/results/scale-overhead.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pyarrow import parquet
from serve_fuzz import where, write

import react_clip as rc
from react_clip.cli.common import expand_inputs
from react_clip.preprocess import read_image
from react_clip.scale.files import find
from react_clip.scale.parcels import Parcel, cut_shard
from react_clip.scale.work import decode

SIDE, PER_SHARD = 256, 2500
SIDES = {"local": (1, []), "local, all cores": (0, [])}
SIDES |= {f"ray, {n} worker{'s' * (n > 1)}": (1, ["--engine", "ray", "--workers", str(n)]) for n in (1, 2)}


def make_collection(photos: list[Path], folder: Path, count: int, seed: int) -> None:
    """JPEGs of 256 pixels, random cuts of photos, in tar shards: a quarter in one folder, the rest in another."""
    rng = np.random.default_rng(seed)
    opened = [read_image(path) for path in photos[:200]]
    quarter = count // 4
    for name, start, stop in (("quarter", 0, quarter), ("rest", quarter, count)):
        (folder / name).mkdir(parents=True)
        for shard, first in enumerate(range(start, stop, PER_SHARD)):
            with tarfile.open(folder / name / f"{shard:04d}.tar", "w") as archive:
                for i in range(first, min(first + PER_SHARD, stop)):
                    content = cut(opened[int(rng.integers(len(opened)))], rng)
                    info = tarfile.TarInfo(f"{i:07d}.jpg")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))


def small_tower(folder: Path, photos: Path) -> list[str]:
    """Flags for an image tower of ViT-Ti/32 shapes, whose gate stays shut: three passes an image."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 3}
    config = CLIPVisionConfig(**shape, projection_dim=512, image_size=224, patch_size=32, hidden_act="quick_gelu")
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    rc.ReACT(tau=1000.0).save(folder / "guard.json")
    return ["--model", str(folder), "--config", str(folder / "guard.json"), "--photos", str(photos)]


def cut(image: Image.Image, rng: np.random.Generator) -> bytes:
    side = int(min(image.size) * rng.uniform(0.6, 1.0))
    left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
    stream = io.BytesIO()
    image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


@dataclass(frozen=True)
class Run:
    """One call of ``react-clip embed`` and what it took."""

    images_per_second: float
    seconds: float
    summary: dict[str, Any]
    memory: dict[str, int]
    driver_seconds: float
    """CPU time of the driver."""
    written_bytes: int


def run(side: str, sources: list[Path], out: Path, flags: list[str], parcel: int) -> Run:
    threads, engine = SIDES[side]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else dict(os.environ)
    if engine:
        environment.pop("OMP_NUM_THREADS", None)  # Ray gives each worker what its share of cores is
    command = [sys.executable, "-m", "react_clip", "embed", *map(str, sources), "--out", str(out), "--json", "--quiet"]
    began = time.time()
    process = subprocess.Popen(
        [*command, "--parcel", str(parcel), *engine, *flags], stdout=subprocess.PIPE, text=True, env=environment
    )
    peaks: defaultdict[str, int] = defaultdict(int)
    busy = 0.0
    while process.poll() is None:
        busy = max(busy, cpu_seconds(process.pid))
        for kind, peak in memory_below(process.pid).items():
            peaks[kind] = max(peaks[kind], peak)
        time.sleep(0.2)
    seconds = time.time() - began
    assert process.returncode == 0, f"{side} ended with {process.returncode}"
    assert process.stdout is not None
    workers = int(engine[-1]) if engine else 1
    summary = json.loads(process.stdout.read())
    written = sum(path.stat().st_size for path in out.glob("part-*.parquet"))
    return Run(speed(out, workers), seconds, summary, dict(peaks), busy, written)


def cpu_seconds(pid: int) -> float:
    """Time that a process has spent on a core; 0 once it is gone."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def speed(out: Path, workers: int) -> float:
    """Images a second after every worker has had its first parcel."""
    parts = sorted((path.stat().st_mtime, parquet.read_metadata(path).num_rows) for path in out.glob("part-*.parquet"))
    assert len(parts) > workers, "too few parcels to see a steady state; give more --images or a smaller --parcel"
    first = parts[workers - 1][0]
    return sum(rows for _, rows in parts[workers:]) / (parts[-1][0] - first)


def memory_below(root: int) -> dict[str, int]:
    """Peak resident bytes of the driver, and the largest among decoders and among workers."""
    parents, found = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            status = (entry / "status").read_text()
            found[pid] = ((entry / "cmdline").read_bytes().decode(errors="replace"), status)
    peaks: defaultdict[str, int] = defaultdict(int)
    for pid, (title, status) in found.items():
        above = pid
        while above in parents and above != root:
            above = parents[above]
        kind = "driver" if pid == root else "decoder" if "_Decoder" in title else "worker" if "_Worker" in title else ""
        if above == root and kind and "VmHWM:" in status:
            peaks[kind] = max(peaks[kind], 1024 * int(status.split("VmHWM:")[1].split()[0]))
    return peaks


def decode_costs(folder: Path, size: int) -> dict[str, float]:
    """Seconds to decode an image on one core, and bytes that it then puts into the object store."""
    file = find([str(folder)], "/")[0]
    start, stop, count = cut_shard(file, "/", 256, "image")[0]
    began = time.perf_counter()
    decoded = decode(Parcel(0, count, (file.url,), start, stop), size, "/", "image")
    seconds = (time.perf_counter() - began) / count
    return {"decode_seconds_per_image": seconds, "object_store_bytes_per_image": decoded.pixels.nbytes / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of real photos")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--parcel", type=int, default=256)
    parser.add_argument("--small", action="store_true", help="a small tower with random weights, made on the spot")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=224, help="of the model's images, for the cost of decoding")
    parser.add_argument("--out", default="scale-overhead.json")
    parser.add_argument("flags", nargs="*", help="for react-clip embed, after --")
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="scale-overhead-") as name:
        work = Path(name)
        make_collection(expand_inputs([args.photos]), work / "in", args.images, args.seed)
        flags = [*small_tower(work / "tower", args.photos), *args.flags] if args.small else args.flags
        costs = decode_costs(work / "in" / "quarter", args.size)
        costs["read_bytes_per_image"] = sum(path.stat().st_size for path in work.rglob("*.tar")) / args.images
        for turn in range(args.rounds):
            for side in SIDES:
                out = work / f"out-{turn}-{side.replace(', ', '-').replace(' ', '-')}"
                runs[side].append(run(side, [work / "in"], out, flags, args.parcel))
        few = {
            side: run(side, [work / "in" / "quarter"], work / f"few-{i}", flags, args.parcel)
            for i, side in enumerate(SIDES)
        }
    one = runs["ray, 1 worker"][0]
    costs["written_bytes_per_image"] = one.written_bytes / args.images
    # What the driver does once, such as loading the model, cancels out between all images and a quarter of them. Most
    # of the rest is Ray Data's loop, which turns while a parcel takes its time; scale_driver.py tells the two apart.
    more = one.driver_seconds - few["ray, 1 worker"].driver_seconds
    costs["driver_cpu_seconds_per_parcel"] = more / (one.summary["parts"] - few["ray, 1 worker"].summary["parts"])
    answers = {(one.summary["opened"], one.summary["passes"]) for side in runs.values() for one in side}
    rate = {side: statistics.median(one.images_per_second for one in these) for side, these in runs.items()}
    about = where()
    about["versions"] |= {name: version(name) for name in ("ray", "pyarrow")}
    result = {
        **about,
        "images": args.images,
        "parcel": args.parcel,
        "rounds": args.rounds,
        "seed": args.seed,
        "images_per_second": {side: round(value, 3) for side, value in rate.items()},
        "seconds": {side: [round(one.seconds, 1) for one in these] for side, these in runs.items()},
        "overhead": round(rate["local"] / rate["ray, 1 worker"], 3),
        "efficiency_two_workers": round(rate["ray, 2 workers"] / (2 * rate["ray, 1 worker"]), 3),
        "same_gates_and_passes": len(answers) == 1,
        "opened": runs["local"][0].summary["opened"],
        "passes": runs["local"][0].summary["passes"],
        **{name: round(value, 6) for name, value in costs.items()},
        "peak_bytes_all": {side: these[0].memory for side, these in runs.items()},
        "peak_bytes_quarter": {side: one.memory for side, one in few.items()},
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
