"""The hash of the pixels behind an image's key as one compiled kernel instead of four operations."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, turns, wait
from torch import Tensor

from react_clip import fusing, noise


def main() -> None:
    args = read_options("keys_fused", batch=64)
    pixels = random_pixels(args)

    def plainly() -> Tensor:
        with fusing.unfused():
            return noise.stream_keys(pixels, 0)

    # Whatever the device and the number of images.
    with patch.multiple(fusing, _ON={args.device.type}, _FROM=1):
        begin = time.perf_counter()
        noise.stream_keys(pixels, 0)
        wait(args.device)
        compiling = time.perf_counter() - begin
        same = torch.equal(noise.stream_keys(pixels, 0), plainly())
        spent = turns(args, {"before": plainly, "after": lambda: noise.stream_keys(pixels, 0)})
    finish(
        args,
        idea="keys as one kernel",
        what=" ".join((__doc__ or "").split()),
        **spent,
        compile_seconds=compiling,
        agreement={"same_keys": same},
        kept=True,
        why="as the noise: on a GPU, for large batches first; integers, so the same keys to the last bit",
    )


if __name__ == "__main__":
    main()
