"""The tower through torch.compile; on a GPU also with CUDA graphs for one image alone (mode "reduce-overhead")."""

from __future__ import annotations

import torch
from benchmarks.tried.common import finish, first_call, random_pixels, read_options, tower, turns


def main() -> None:
    args = read_options("compile_tower", batch=2, rounds=3)
    encoder, pixels = tower(args), random_pixels(args)
    compiled = torch.compile(encoder.encode_views, dynamic=False)
    features, compiling = first_call(args, lambda: compiled(pixels))
    difference = (features - encoder.encode_views(pixels)).abs().max().item()
    spent = turns(args, {"before": lambda: encoder.encode_views(pixels), "after": lambda: compiled(pixels)})
    alone: dict[str, float] = {}
    if args.device.type == "cuda":
        graphs = torch.compile(encoder.encode_views, mode="reduce-overhead", dynamic=False)
        one = pixels[:1].contiguous()
        ways = {"before": lambda: encoder.encode_views(one), "after": lambda: graphs(one).clone()}
        alone = turns(args, ways, images=1)
    finish(
        args,
        idea="compiled tower",
        what=" ".join((__doc__ or "").split()),
        **spent,
        one_image_alone=alone or None,
        compile_seconds=compiling,
        agreement={"max_difference": difference},
        kept=False,
        why="faster where the shape stays, but every batch size that gates leave is another shape to compile; who "
        "serves fixed shapes can compile `encoder.encode_views`, as this script does",
    )


if __name__ == "__main__":
    main()
