"""Seconds until the first defended answer: loading, first and second call, and twenty batch sizes for the first time.

    python benchmarks/first_call.py PHOTOS --device cuda --dtype bf16

Each case runs in a process of its own, with and without ``compile=True``. The result is
benchmarks/results/bench/gpu-first-call.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 60, 70, 80, 89, 100, 120, 144, 150, 200, 233, 256)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One case, from the import of the package on."""
    begin = time.perf_counter()
    import torch

    import react_clip as rc
    from react_clip.preprocess import to_pixels

    clip = rc.load("clip-vit-b-16", device=args.device, dtype=args.dtype, compile=args.compile)
    clf = rc.ZeroShotClassifier(clip, list(rc.LabelBank.load().vocabulary()))
    guard = rc.SecondLook.for_encoder(clip)
    photos = sorted(path for path in args.photos.rglob("*") if path.is_file())[: max(SIZES)]
    images = torch.stack([to_pixels(path, clip.image_size) for path in photos]).to(clip.device)
    with torch.no_grad():
        clf(images[:2]).argmax(-1).cpu()  # the first plain answer belongs to loading
    loading = time.perf_counter() - begin

    def call(count: int) -> float:
        begin = time.perf_counter()
        guard(clf, images[:count], seed=0).labels.cpu()
        return time.perf_counter() - begin

    first, second = call(max(SIZES)), call(max(SIZES))
    sizes, again = (sum(map(call, SIZES)) for _ in range(2))
    return {
        "compile": args.compile,
        "loading": loading,
        "first_call": first,
        "second_call": second,
        "twenty_sizes": sizes,
        "twenty_sizes_again": again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--out", default="bench/gpu-first-call.json")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args)))
        return
    command = [sys.executable, __file__, str(args.photos), "--device", args.device, "--dtype", args.dtype, "--case"]
    cases = []
    for option in ([], ["--compile"]):
        finished = subprocess.run([*command, *option], capture_output=True, text=True, check=True)
        warnings = [line for line in finished.stderr.splitlines() if "recompile" in line]
        cases.append({**json.loads(finished.stdout.splitlines()[-1]), "recompile_warnings": len(warnings)})
    from _common import where, write

    write(args.out, {**where(), "dtype": args.dtype, "seed": 0, "batch_sizes": SIZES, "seconds": cases})


if __name__ == "__main__":
    main()
