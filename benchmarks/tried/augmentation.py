"""T(x) as one compiled graph."""

from __future__ import annotations

import time

import torch
from benchmarks.tried.common import finish, photos, read_options, turns, wait

from react_clip import noise
from react_clip.augment import WeakAugmentation


def main() -> None:
    args = read_options("augmentation", rounds=5)
    args.photos = args.batch
    pixels = photos(args)
    keys, augment = noise.stream_keys(pixels, 0), WeakAugmentation()
    graph = torch.compile(lambda images, streams: augment(images, streams), dynamic=True)
    begin = time.perf_counter()
    views = graph(pixels, keys)
    wait(args.device)
    compiling = time.perf_counter() - begin
    difference = (views - augment(pixels, keys)).abs().max().item()
    spent = turns(args, {"before": lambda: augment(pixels, keys), "after": lambda: graph(pixels, keys)})
    finish(
        args,
        idea="augmentation as one graph",
        what=" ".join((__doc__ or "").split()),
        **spent,
        compile_seconds=compiling,
        agreement={"max_difference": difference},
        kept=False,
        why="it is run once per image at most, its largest part (the noise) is fused already, and the compiled "
        "resampling moves pixels by more than rounding",
    )


if __name__ == "__main__":
    main()
