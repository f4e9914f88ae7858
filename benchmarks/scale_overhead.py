"""Speed of ``react-clip embed`` on one collection: the local engine, and Ray with one and two workers.

    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 10000 --small
    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 192 --chunk 12 \\
        --out scale-overhead-tower.json -- --model clip-vit-b-16 --dtype bf16

Everything after ``--`` goes to ``react-clip embed``; ``--small`` stands for an image tower with random weights that
is some sixty times cheaper than ViT-B/16, so that the engine's share is larger than in practice. The collection is
``--images`` small JPEGs, random cuts of the photos given, in tar shards. Every engine is ``react-clip embed`` in
processes of its own. On CPUs the local engine is measured with one thread, as many as a worker has, and with all. Speed
is that of the steady state: from the end of the first parts to the end of the last, without start-up and loading (they
are in ``seconds``). Memory is the peak of every process, for a quarter of the images and for all: it must not grow.
Engines must agree on every gate and every pass. The result is benchmarks/results/scale-overhead.json.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import where, write
from PIL import Image
from pyarrow import parquet

import react_clip as rc
from react_clip.cli.photos import expand_inputs
from react_clip.preprocess import read_image
from react_clip.scale import collection
from react_clip.scale.embedding import decode

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
    written_bytes: int


def run(side: str, sources: list[Path], out: Path, flags: list[str], chunk: int) -> Run:
    threads, engine = SIDES[side]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else dict(os.environ)
    if engine:
        environment.pop("OMP_NUM_THREADS", None)  # Ray gives each worker what its share of cores is
    command = [sys.executable, "-m", "react_clip", "embed", *map(str, sources), "--out", str(out), "--json", "--quiet"]
    began = time.time()
    process = subprocess.Popen(
        [*command, "--chunk", str(chunk), *engine, *flags], stdout=subprocess.PIPE, text=True, env=environment
    )
    peaks: defaultdict[str, int] = defaultdict(int)
    while process.poll() is None:
        for kind, peak in memory_below(process.pid).items():
            peaks[kind] = max(peaks[kind], peak)
        time.sleep(0.2)
    seconds = time.time() - began
    assert process.returncode == 0, f"{side} ended with {process.returncode}"
    assert process.stdout is not None
    workers = int(engine[-1]) if engine else 1
    summary = json.loads(process.stdout.read())
    written = sum(path.stat().st_size for path in out.glob("part-*.parquet"))
    return Run(speed(out, workers), seconds, summary, dict(peaks), written)


def speed(out: Path, workers: int) -> float:
    """Images per second after every worker has finished its first chunk."""
    parts = sorted((path.stat().st_mtime, parquet.read_metadata(path).num_rows) for path in out.glob("part-*.parquet"))
    assert len(parts) > workers, "too few chunks to see a steady state; give more --images or a smaller --chunk"
    first = parts[workers - 1][0]
    return sum(rows for _, rows in parts[workers:]) / (parts[-1][0] - first)


def memory_below(root: int) -> dict[str, int]:
    """Peak resident bytes of the driver, and of the largest worker."""
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
        kind = "driver" if pid == root else "worker" if "_Actor" in title else ""
        if above == root and kind and "VmHWM:" in status:
            peaks[kind] = max(peaks[kind], 1024 * int(status.split("VmHWM:")[1].split()[0]))
    return peaks


def decode_seconds(folder: Path, size: int) -> float:
    """Seconds to read and decode an image on one core."""
    [chunk, *_], _ = collection.cut(collection.find_files([str(folder)]), 256, "image")
    began = time.perf_counter()
    decode(chunk, size, "image")
    return (time.perf_counter() - began) / chunk.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of real photos")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--chunk", type=int, default=256)
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
        costs = {"decode_seconds_per_image": decode_seconds(work / "in" / "quarter", args.size)}
        costs["read_bytes_per_image"] = sum(path.stat().st_size for path in work.rglob("*.tar")) / args.images
        for turn in range(args.rounds):
            for side in SIDES:
                out = work / f"out-{turn}-{side.replace(', ', '-').replace(' ', '-')}"
                runs[side].append(run(side, [work / "in"], out, flags, args.chunk))
        few = {
            side: run(side, [work / "in" / "quarter"], work / f"few-{i}", flags, args.chunk)
            for i, side in enumerate(SIDES)
        }
    one = runs["ray, 1 worker"][0]
    costs["written_bytes_per_image"] = one.written_bytes / args.images
    answers = {(one.summary["gated"], one.summary["passes"]) for side in runs.values() for one in side}
    rate = {side: statistics.median(one.images_per_second for one in these) for side, these in runs.items()}
    result = {
        **where("ray", "pyarrow"),
        "images": args.images,
        "chunk": args.chunk,
        "rounds": args.rounds,
        "seed": args.seed,
        "images_per_second": {side: round(value, 3) for side, value in rate.items()},
        "seconds": {side: [round(one.seconds, 1) for one in these] for side, these in runs.items()},
        "overhead": round(rate["local"] / rate["ray, 1 worker"], 3),
        "efficiency_two_workers": round(rate["ray, 2 workers"] / (2 * rate["ray, 1 worker"]), 3),
        "same_gates_and_passes": len(answers) == 1,
        "gated": runs["local"][0].summary["gated"],
        "passes": runs["local"][0].summary["passes"],
        **{name: round(value, 6) for name, value in costs.items()},
        "peak_bytes_all": {side: these[0].memory for side, these in runs.items()},
        "peak_bytes_quarter": {side: one.memory for side, one in few.items()},
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
