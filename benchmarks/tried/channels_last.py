"""Pixels and the patch embedding in channels-last order."""

from __future__ import annotations

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, tower, turns


def main() -> None:
    args = read_options("channels_last", batch=4, rounds=5)
    encoder, other, pixels = tower(args), tower(args), random_pixels(args)
    other.tower.to(memory_format=torch.channels_last)
    turned = pixels.to(memory_format=torch.channels_last)
    difference = (encoder.encode_views(pixels) - other.encode_views(turned)).abs().max().item()
    spent = turns(args, {"before": lambda: encoder.encode_views(pixels), "after": lambda: other.encode_views(turned)})
    finish(
        args,
        idea="channels-last",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={"max_difference": difference},
        kept=False,
        why="one convolution in the whole tower; everything behind it is matrices",
    )


if __name__ == "__main__":
    main()
