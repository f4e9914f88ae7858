"""Speed of ``react-clip embed`` on one collection: the local engine, and Ray with one and two workers.

    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 2000
    python benchmarks/scale_overhead.py --photos photos/oxford_pets/test --images 192 -- --model clip-vit-b-16

Everything after ``--`` goes to ``react-clip embed``. The collection is ``--images`` JPEGs in tar shards, a quarter of
them in a folder of its own. Each engine embeds the quarter and then everything; the difference is the steady state,
without start-up and loading. Engines must agree on every gate and every pass.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import where, write

from react_clip.cli.photos import expand_inputs
from react_clip.preprocess import read_image

PER_SHARD = 250
ENGINES = {"local": [], **{f"ray, {n} workers": ["--engine", "ray", "--workers", str(n)] for n in (1, 2)}}


def make_collection(photos: list[Path], folder: Path, count: int) -> None:
    """Random cuts of photos in tar shards: the first quarter in one folder, the rest in another."""
    rng = np.random.default_rng(0)
    opened = [read_image(path).resize((320, 320)) for path in photos[:200]]
    for first in range(0, count, PER_SHARD):
        path = folder / ("quarter" if first < count // 4 else "rest") / f"{first:07d}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as archive:
            for number in range(first, min(first + PER_SHARD, count)):
                left, top = rng.integers(0, 64, 2).tolist()
                stream = io.BytesIO()
                opened[number % len(opened)].crop((left, top, left + 256, top + 256)).save(stream, "JPEG")
                info = tarfile.TarInfo(f"{number:07d}.jpg")
                info.size = stream.tell()
                archive.addfile(info, io.BytesIO(stream.getvalue()))


def embed(source: Path, out: Path, flags: list[str]) -> tuple[float, dict[str, Any]]:
    """Seconds of one call of ``react-clip embed``, and what it prints."""
    command = [sys.executable, "-m", "react_clip", "embed", str(source), "--out", str(out), "--json", "--quiet", *flags]
    began = time.perf_counter()
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - began, json.loads(finished.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of real photos")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--out", default="scale-overhead.json")
    parser.add_argument("flags", nargs="*", default=["--model", "clip-vit-b-16"], help="for react-clip embed, after --")
    args = parser.parse_args()
    rates, answers = {}, set()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        make_collection(expand_inputs([args.photos]), work / "in", args.images)
        for number, (engine, options) in enumerate(ENGINES.items()):
            short, few = embed(work / "in" / "quarter", work / f"few{number}", [*options, *args.flags])
            long, all_images = embed(work / "in", work / f"all{number}", [*options, *args.flags])
            rates[engine] = round((all_images["images"] - few["images"]) / (long - short), 3)
            answers.add((all_images["gated"], all_images["passes"]))
    assert len(answers) == 1, f"the engines disagree: {answers}"
    write(args.out, {**where("ray", "pyarrow"), "images": args.images, "images_per_second": rates})


if __name__ == "__main__":
    main()
