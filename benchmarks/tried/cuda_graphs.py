"""Small batches by CUDA graphs: one image alone, defended, with the tower's kernels recorded instead of asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from benchmarks.tried.common import attacked, classifier, finish, photos, read_options, tower, turns

import react_clip as rc

SIZES = (1, 3, 10, 64)
"""Batches whose features are compared: an image, its first stage, its anchor views, the largest one."""


def main() -> None:
    args = read_options("cuda_graphs", batch=1, rounds=50, photos=2)
    args.batch = 1
    plain = tower(args)
    spent: dict[str, dict[str, float]] = {"clean": {}}
    difference = None
    if args.device.type == "cuda":
        recorded = tower(args).use_graphs()
        sides = {"before": classifier(plain), "after": classifier(recorded)}
        pixels = photos(args)
        clean, views = pixels[:1], pixels.repeat(32, 1, 1, 1)
        guard = rc.ReACT.for_encoder(plain)
        spent = {
            "clean": _turns(args, sides, lambda clf: guard(clf, clean, seed=0)),
            "one_pass": _turns(args, sides, lambda clf: clf.encoder.encode_views(clean)),
        }
        broken = attacked(sides["before"], clean)
        spent["attacked"] = _turns(args, sides, lambda clf: guard(clf, broken, seed=0))
        gaps = [(plain.encode_views(views[:n]) - recorded.encode_views(views[:n])).abs().max() for n in SIZES]
        difference = torch.stack(gaps).max().item()
    finish(
        args,
        idea="CUDA graphs",
        what=" ".join((__doc__ or "").split()),
        before=spent["clean"].get("before"),
        after=spent["clean"].get("after"),
        one_pass=spent.get("one_pass"),
        attacked=spent.get("attacked"),
        agreement={"max_difference": difference},
        kept=True,
        why="as `encoder.use_graphs()`, for batches of at most 64 views, and in the service; larger ones keep a GPU "
        "busy by themselves, and a CPU has nothing to record",
    )


def _turns(
    args: argparse.Namespace,
    sides: dict[str, rc.ZeroShotClassifier],
    way: Callable[[rc.ZeroShotClassifier], object],
) -> dict[str, float]:
    return turns(args, {name: lambda clf=clf: way(clf) for name, clf in sides.items()})


if __name__ == "__main__":
    main()
