"""The whole noisy view, from key to pixel, as one compiled kernel instead of two dozen."""

from __future__ import annotations

import torch
from benchmarks.tried.common import finish, first_call, random_pixels, read_options, turns

from react_clip import fusing, noise


def main() -> None:
    args = read_options("noise_fused", batch=64)
    pixels = random_pixels(args)
    keys = noise.stream_keys(pixels, 0)
    sigma = torch.full((args.batch,), 0.05, device=args.device)
    steps = noise._steps(pixels[0].numel() // 2, args.device)
    eager, compiled = noise._noisy_view.__wrapped__, torch.compile(noise._noisy_pairs, fullgraph=True)
    given = fusing.any_number_of_images((pixels, keys, sigma, steps))
    views, compiling = first_call(args, lambda: compiled(*given))
    compiled(pixels[: args.batch // 2], keys[: args.batch // 2], sigma[: args.batch // 2], steps)
    difference = (views - eager(pixels, keys, sigma, steps)).abs()
    spent = turns(
        args,
        {
            "before": lambda: eager(pixels, keys, sigma, steps),
            "after": lambda: compiled(pixels, keys, sigma, steps),
        },
    )
    finish(
        args,
        idea="noise as one kernel",
        what=" ".join((__doc__ or "").split()),
        **spent,
        compile_seconds=compiling,
        agreement={"max_difference": difference.max().item(), "changed": (difference > 0).float().mean().item()},
        kept=True,
        why="on a GPU, for batches of 2**23 numbers and more, where it is compared with the plain function first, and "
        "for parts of such batches; on a CPU the noise of a view is a hundredth or two of a pass, which a short job "
        "cannot pay the compiler with",
    )


if __name__ == "__main__":
    main()
