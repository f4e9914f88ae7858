"""T(x) of a few images of a large batch through the kernels of large batches, instead of operation by operation."""

from __future__ import annotations

from unittest.mock import patch

from benchmarks.tried.common import finish, random_pixels, read_options, turns
from torch import Tensor

from react_clip import augment, fusing, noise

LARGE = 64
"""Images in the whole batch."""


def main() -> None:
    args = read_options("small_batches", batch=16)
    large, view = random_pixels(args, LARGE), augment.WeakAugmentation()
    keys = noise.stream_keys(large, 0)
    few, few_keys = large[: args.batch], keys[: args.batch]

    def plainly() -> Tensor:
        with fusing.unfused():
            return view(few, few_keys)

    # Whatever the device.
    with patch.multiple(fusing, _ON={args.device.type}), fusing.part_of(large):
        view(large, keys)
        difference = (view(few, few_keys) - plainly()).abs().max().item()
        spent = turns(args, {"before": plainly, "after": lambda: view(few, few_keys)})
    finish(
        args,
        idea="kernels for small batches too",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={"max_difference": difference},
        kept=True,
        why="few images are undecided or corrected, and a GPU waits for the host to ask for their operations; one "
        "image alone would have to be compiled anew and stays as it is",
    )


if __name__ == "__main__":
    main()
