"""T(x) of a few images by a CUDA graph instead of operation by operation, picked from a large batch either way."""

from __future__ import annotations

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, turns
from torch import Tensor

from react_clip import augment, fusing, noise

LARGE = 256
"""Images in the whole batch."""


def main() -> None:
    args = read_options("augmentation_recorded", batch=16)
    spent: dict[str, float | None] = {"before": None, "after": None}
    difference = None
    if args.device.type == "cuda":
        large = random_pixels(args, LARGE)
        choices = augment.WeakAugmentation().choose(noise.stream_keys(large, 0), large.dtype)
        rows = torch.arange(0, LARGE, LARGE // args.batch, device=args.device)[: args.batch]

        def view(recorded: bool) -> Tensor:
            return choices(large, rows, recorded=recorded)

        with fusing.part_of(large):
            difference = (view(recorded=True) - view(recorded=False)).abs().max().item()
            spent |= turns(args, {"before": lambda: view(recorded=False), "after": lambda: view(recorded=True)})
    finish(
        args,
        idea="T(x) by CUDA graphs",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={"max_difference": difference},
        kept=True,
        why="where `encoder.use_graphs()` holds: two dozen operations on a few images keep the host busy, not the GPU",
    )


if __name__ == "__main__":
    main()
