r"""Cost of SecondLook for clean photos of many data sets, each with its own classes, relative to plain CLIP.

    python benchmarks/clean_traffic.py --data photos --heads heads --device cuda --dtype bf16
    python benchmarks/clean_traffic.py --data photos --heads heads --device cpu --photos 16 --batch 8 --rounds 4 \
        --out bench/cpu-clean-traffic.json

How many photos take the third view depends on the photos and on the classes. All sets are measured by turns in one run,
as ``react-clip bench`` does it: photos are ready on the device and arrive in batches; plain CLIP does not wait for its
answers. The result is benchmarks/results/bench/clean-traffic.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from _common import where, write

import react_clip as rc
from react_clip import data
from react_clip.bench import BARE, Comparison, measure
from react_clip.bench.workload import contenders
from react_clip.evaluation.sets import class_source
from react_clip.preprocess import from_8bit

SETS = (
    *("caltech101", "cifar10", "cifar100", "dtd10", "eurosat"),
    *("flowers102", "food26", "imagenet", "oxford_pets", "stl10"),
)
OURS = "SecondLook"


def comparison(clip: rc.Encoder, name: str, args: argparse.Namespace) -> tuple[int, int, Comparison]:
    """Numbers of classes and of photos of a set, and plain CLIP beside SecondLook on its photos."""
    photos = data.load(name, root=args.data).take(args.photos)
    clf, photos = class_source(clip, photos, args.heads, args.data).classifier(clip)
    pixels = photos.pixels(clip.preprocessing)
    repeated = from_8bit(pixels[torch.arange(2 * args.batch) % len(pixels)].to(clip.device))
    guard = rc.SecondLook.for_encoder(clip).replace(max_batch=args.batch)
    both = contenders(clf, rc.ReACT(), batch=args.batch, defenses={OURS: guard})
    return len(clf.names), len(photos), Comparison({k: both[k] for k in (BARE, OURS)}, repeated, batch=args.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=SETS)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--photos", type=int, default=128, help="of each set; they are repeated to fill a batch")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default="bench/clean-traffic.json")
    args = parser.parse_args()
    clip = rc.load("clip-vit-b-16", device=args.device, dtype=args.dtype, compile=True)
    sets = {name: comparison(clip, name, args) for name in args.datasets}
    for _ in measure([each for _, _, each in sets.values()], rounds=args.rounds, singles=1):
        print("round", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for name, (classes, photos, each) in sets.items():
        plain, ours = each.timings()
        rows.append(
            {
                "dataset": name,
                "classes": classes,
                "photos": photos,
                "passes": round(ours.passes, 4),
                "plain_ms": round(plain.milliseconds, 5),
                "second_look_ms": round(ours.milliseconds, 5),
                "overhead": round(ours.overhead, 4),
            }
        )
    total = {key: sum(row[key] for row in rows) / len(rows) for key in ("passes", "plain_ms", "second_look_ms")}
    result = where() | {
        "model": clip.name,
        "dtype": args.dtype,
        "batch": args.batch,
        "rounds": args.rounds,
        "seed": 0,
        "sets": rows,
        "mean": {key: round(value, 5) for key, value in total.items()}
        | {"ratio": round(total["second_look_ms"] / total["plain_ms"], 4)},
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
