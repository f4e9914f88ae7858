"""The blur and the colours of T(x) as one compiled kernel each; its noise is one already."""

from __future__ import annotations

from unittest.mock import patch

from benchmarks.tried.common import finish, first_call, photos, read_options, turns
from torch import Tensor

from react_clip import augment, fusing, noise

PARTS = ("_blurred", "_jittered")


def main() -> None:
    args = read_options("augmentation", rounds=5)
    args.photos = args.batch
    pixels = photos(args)
    keys, view = noise.stream_keys(pixels, 0), augment.WeakAugmentation()

    def plainly() -> Tensor:
        with patch.multiple(augment, **{part: getattr(augment, part).__wrapped__ for part in PARTS}):
            return view(pixels, keys)

    # Whatever the device and the number of photos.
    with patch.multiple(fusing, _ON={args.device.type}, _FROM=1):
        _, compiling = first_call(args, lambda: view(pixels, keys))
        difference = (view(pixels, keys) - plainly()).abs().max().item()
        spent = turns(args, {"before": plainly, "after": lambda: view(pixels, keys)})
    finish(
        args,
        idea="augmentation in fewer kernels",
        what=" ".join((__doc__ or "").split()),
        **spent,
        compile_seconds=compiling,
        agreement={"max_difference": difference},
        kept=True,
        why="on a GPU, for as large batches as the noise; the whole of T(x) as one graph would also compile its "
        "resampling, which then moves pixels by more than rounding",
    )


if __name__ == "__main__":
    main()
