"""The noise drawn and added in the tower's bf16 instead of fp32: half the bytes."""

from __future__ import annotations

import math

import torch
from benchmarks.tried.common import finish, photos, random_pixels, read_options, tower, turns
from torch import Tensor

from react_clip import functional, noise


def low_precision_view(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    """The same bits of the same stream, everything behind them in bf16."""
    half = math.prod(pixels.shape[1:]) // 2
    bits = noise._bits(keys, half)
    radius = noise._shift_right(bits, 40).add_(1).float().mul_(noise._UNIT_24).bfloat16().log_().mul_(-2.0).sqrt_()
    angle = (bits >> 8).bitwise_and_(0xFFFFFF).bfloat16().mul_(2.0 * math.pi * noise._UNIT_24)
    grain = torch.stack([angle.cos(), angle.sin()], dim=1).mul_(radius[:, None]).view(pixels.shape)
    return pixels.bfloat16() + sigma.bfloat16()[:, None, None, None] * grain


def main() -> None:
    args = read_options("noise_dtype", photos=4, batch=32)
    pixels = random_pixels(args)
    keys, sigma = noise.stream_keys(pixels, 0), torch.full((args.batch,), 0.05, device=args.device)
    spent = turns(
        args,
        {
            "before": lambda: noise.noisy_view(pixels, keys, sigma),
            "after": lambda: low_precision_view(pixels, keys, sigma),
        },
    )
    encoder, real = tower(args), photos(args)
    keys = noise.stream_keys(real, 0)
    plain = encoder.encode_views(real)
    drifts = {}
    for scale in (0.02, 0.05):
        sigma = torch.full((len(real),), scale, device=args.device)
        exact = encoder.encode_views(noise.noisy_view(real, keys, sigma))
        rough = encoder.encode_views(low_precision_view(real, keys, sigma).float())
        drifts[scale] = functional.drift(plain, exact), functional.drift(plain, rough)
    exact, rough = (functional.relative_drift(drifts[0.02][i], drifts[0.05][i]) for i in (0, 1))
    finish(
        args,
        idea="noise in bf16",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={
            "photos": len(real),
            "mean_change_of_r": (rough - exact).mean().item(),
            "largest_change_of_r": (rough - exact).abs().max().item(),
        },
        kept=False,
        why="bf16 keeps 8 bits: near 0.5 its step is 0.002-0.004, a good part of sigma = 0.02, so r itself changes; "
        "and the fused kernel keeps the grain in registers, where fp32 costs nothing",
    )


if __name__ == "__main__":
    main()
