"""A clean pass and keys behind it, the hash of the pixels as one compiled kernel instead of four operations."""

from __future__ import annotations

from unittest.mock import patch

import torch
from benchmarks.tried.common import finish, first_call, random_pixels, read_options, tower, turns
from torch import Tensor

from react_clip import fusing, noise


def main() -> None:
    args = read_options("keys_fused", batch=64)
    pixels, encoder = random_pixels(args), tower(args)

    def answer() -> Tensor:
        """As the defence begins: the host asks for keys while the device is at work on the clean views."""
        encoder.encode_views(pixels)
        return noise.stream_keys(pixels, 0)

    def plainly() -> Tensor:
        with fusing.unfused():
            return answer()

    # Whatever the device and the number of images.
    with patch.multiple(fusing, _ON={args.device.type}, _FROM=1):
        _, compiling = first_call(args, lambda: noise.stream_keys(pixels, 0))
        same = torch.equal(answer(), plainly())
        spent = turns(args, {"before": plainly, "after": answer})
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
