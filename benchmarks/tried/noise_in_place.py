"""The same stream with fewer temporaries: SplitMix64 and Box-Muller in place."""

from __future__ import annotations

import math

import torch
from benchmarks.tried.common import finish, random_pixels, read_options, turns
from torch import Tensor

from react_clip import noise

_MIX = (noise._MIX_1, noise._MIX_2)


def every_step_a_tensor(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers as they were drawn before: each operation writes a tensor of its own."""

    def right(value: Tensor, bits: int) -> Tensor:
        return (value >> bits) & ((1 << (64 - bits)) - 1)

    count = math.prod(shape)
    bits = keys[:, None] + torch.arange(1, (count + 1) // 2 + 1, device=keys.device) * noise._GOLDEN
    bits = (bits ^ right(bits, 30)) * _MIX[0]
    bits = (bits ^ right(bits, 27)) * _MIX[1]
    bits = bits ^ right(bits, 31)
    radius = ((right(bits, 40) + 1).float() * 2.0**-24).log().mul(-2.0).sqrt()
    angle = (right(bits, 8) & 0xFFFFFF).float() * (2.0 * math.pi * 2.0**-24)
    pairs = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return pairs[:, :count].reshape(len(keys), *shape)


def main() -> None:
    args = read_options("noise_in_place", batch=64)
    keys, shape = noise.stream_keys(random_pixels(args), 0), (3, 224, 224)
    spent = turns(
        args, {"before": lambda: every_step_a_tensor(keys, shape), "after": lambda: noise.normal(keys, shape)}
    )
    finish(
        args,
        idea="noise in place",
        what=" ".join((__doc__ or "").split()),
        **spent,
        agreement={"equal_bits": torch.equal(every_step_a_tensor(keys, shape), noise.normal(keys, shape))},
        kept=True,
        why="the same bits in less time and memory",
    )


if __name__ == "__main__":
    main()
