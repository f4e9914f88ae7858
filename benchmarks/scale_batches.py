"""How full the encoder's batches are where a parcel is defended: real calls of the defence, counted.

    python benchmarks/scale_batches.py

An encoder batch never spans two parcels, and each stage of the defence (plain and probing views, augmented views,
anchor views) ends with a batch that is partly empty. How much that wastes depends on the parcel's size and on how many
gates open in it. The tower here is tiny and has random weights, and tau is put where the wanted share of gates opens:
which views are encoded, and in which batches, is the defence's own doing. The result is
benchmarks/results/scale-batches.json.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scale_driver import make_tower, pictures
from serve_fuzz import where, write
from torch import Tensor

import react_clip as rc

PARCELS = (256, 1024, 4096)


def fill(clf: rc.ZeroShotClassifier, images: int, share: float, seed: int) -> dict[str, Any]:
    """Encoder calls and views of one parcel in which a share of the gates opens."""
    pixels = torch.rand(images, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    guard = rc.ReACT()
    opened = max(1, round(share * images))
    scores = replace(guard, lazy=False)(clf, pixels, seed).score.sort(descending=True).values
    guard = replace(guard, tau=float((scores[opened - 1] + scores[opened]) / 2))
    calls: list[int] = []
    encode = clf.encoder.encode_views

    def counted(views: Tensor) -> Tensor:
        calls.append(len(views))
        return encode(views)

    clf.encoder.encode_views = counted  # type: ignore[method-assign]
    try:
        defended = guard(clf, pixels, seed)
    finally:
        del clf.encoder.encode_views
    assert sum(calls) == int(defended.passes.sum())
    return {
        "parcel": images,
        "opened": int(defended.gated.sum()),
        "augmented": int((~defended.instability.isnan()).sum()),
        "views": sum(calls),
        "calls": len(calls),
        "batch": guard.max_batch,
        "fill": round(sum(calls) / len(calls) / guard.max_batch, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacked", type=float, default=0.01, help="share of gates that open (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-batches-") as name:
        make_tower(Path(name), pictures(args.seed), args.seed)
        clf = rc.ZeroShotClassifier.from_folder(rc.load(name, device="cpu"), Path(name) / "classes")
        found = [fill(clf, images, args.attacked, args.seed) for images in PARCELS]
    write("scale-batches.json", {**where(), "seed": args.seed, "attacked": args.attacked, "parcels": found})


if __name__ == "__main__":
    main()
