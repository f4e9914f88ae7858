"""One random stream per image: what an image gets never depends on the batch it sits in.

A stream is a 64-bit key. Keys come from the pixels and a seed (or a secret), children come from :func:`fork`, and
numbers are a pure function of the key and their position, so that any subset of images, views or positions can be drawn
in any order, on any device, with the same outcome. The generator is SplitMix64 run as a counter; normals are
Box-Muller pairs. Global random state is neither read nor changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from react_clip.errors import ReactClipError
from react_clip.fusing import fused

Seed = int | bytes
"""A public number for research, or a secret key for a service that must not be predictable."""


def _signed(value: int) -> int:
    """Two's-complement int64 of an unsigned 64-bit constant."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_UNIT_24 = 2.0**-24


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign bit."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every input bit moves every output bit."""
    # The first step copies; from then on in place, because large draws are bound by memory.
    value = (value ^ _shift_right(value, 30)).mul_(_MIX_1)
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_MIX_2)
    return value.bitwise_xor_(_shift_right(value, 31))


def _mix_number(value: int) -> int:
    """:func:`_mix` of one number, without asking a device.

    >>> _mix_number(-7) == _mix(torch.tensor([-7])).item()
    True
    """
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        value &= (1 << 64) - 1
        value = (value ^ (value >> shift)) * factor
    return _signed(value)


def _steps(count: int, device: torch.device) -> Tensor:
    """How far a stream's counter has come with each of its first ``count`` numbers."""
    return torch.arange(1, count + 1, device=device) * _GOLDEN


def _bits(keys: Tensor, count: int) -> Tensor:
    """``[N, count]`` random 64-bit integers, the first ``count`` of each key's stream."""
    return _mix(keys[:, None] + _steps(count, keys.device))


def fork(keys: Tensor, branch: int | Tensor) -> Tensor:
    """Independent child streams: the same key and branch always give the same child.

    >>> keys = torch.tensor([1, 2])
    >>> bool((fork(keys, 0) == fork(keys, 1)).any())
    False
    """
    step = (branch + 1) * _GOLDEN
    return _mix(_mix(keys) + (step if isinstance(step, Tensor) else _signed(step)))


def uniform(keys: Tensor, count: int) -> Tensor:
    """``[N, count]`` numbers uniform in [0, 1)."""
    return _shift_right(_bits(keys, count), 40).float() * _UNIT_24


def normal(keys: Tensor, shape: Sequence[int]) -> Tensor:
    """``[N, *shape]`` standard normal numbers (fp32).

    >>> noise = normal(torch.tensor([7]), (3, 64, 64))
    >>> bool(noise.mean().abs() < 0.03), bool((noise.std() - 1).abs() < 0.03)
    (True, True)
    """
    return _normal(keys, shape, _steps(_pairs(shape), keys.device))


def _pairs(shape: Sequence[int]) -> int:
    return (math.prod(shape) + 1) // 2


def _normal(keys: Tensor, shape: Sequence[int], steps: Tensor) -> Tensor:
    radius, angle = _polar(_mix(keys[:, None] + steps))
    # The first half of a draw are the cosines of the pairs, the second half their sines.
    pairs = torch.stack([angle.cos(), angle.sin()], dim=1).mul_(radius[:, None])
    return pairs.flatten(1)[:, : math.prod(shape)].reshape(len(keys), *shape)


def _polar(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Radius and angle of Box-Muller pairs: two 24-bit uniforms from each integer.

    The first uniform is in (0, 1], so that its logarithm is finite.
    """
    radius = _shift_right(bits, 40).add_(1).float().mul_(_UNIT_24).log_().mul_(-2.0).sqrt_()
    return radius, (bits >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0 * math.pi * _UNIT_24)


def noisy_view(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    r"""Views :math:`x + \sigma\,\eta` of images ``[N, ...]``, one stream and one ``sigma`` each; not clamped.

    On a GPU large batches are drawn by one kernel, whose last bit may differ from that of the same view in a small one.

    >>> pixels, keys = torch.rand(2, 3, 8, 8), torch.tensor([1, 2])
    >>> views = noisy_view(pixels, keys, torch.tensor([0.0, 0.1]))
    >>> torch.equal(views[0], pixels[0]), torch.allclose(views[1], pixels[1] + 0.1 * normal(keys[1:], (3, 8, 8)))
    (True, True)
    """
    return _noisy_view(pixels, keys, sigma, _steps(_pairs(pixels.shape[1:]), pixels.device))


def _noisy_pairs(pixels: Tensor, keys: Tensor, sigma: Tensor, steps: Tensor) -> Tensor:
    """:func:`_noisy_view` pair by pair: each is drawn once and goes to both of its places.

    The steps are read rather than counted here: a compiler counts in 32 bits where it can, and these need 64.
    """
    flat, half = pixels.flatten(1), len(steps)
    radius, angle = _polar(_mix(keys[:, None] + steps))
    grain = angle.cos() * radius, (angle.sin() * radius)[:, : flat.shape[1] - half]
    halves = zip(torch.split(flat, half, dim=1), grain, strict=True)
    return torch.cat([part + sigma[:, None] * part_grain for part, part_grain in halves], 1).reshape(pixels.shape)


@fused(_noisy_pairs)
def _noisy_view(pixels: Tensor, keys: Tensor, sigma: Tensor, steps: Tensor) -> Tensor:
    grain = _normal(keys, pixels.shape[1:], steps).to(pixels.dtype)
    return pixels + sigma.reshape(-1, *[1] * (pixels.ndim - 1)) * grain


def stream_keys(images: Tensor, seed: Seed) -> Tensor:
    """One key per image, from its pixels and the seed: an image keeps its key alone, in any batch, in any order.

    With an integer seed the pixels are fingerprinted on their own device. With ``bytes`` the key is the keyed BLAKE2b
    digest of the pixels: who does not hold the secret can neither predict the noise nor find two images that share it.
    """
    pixels = images.detach().float().flatten(1).contiguous()
    if isinstance(seed, bytes):
        if not seed:
            raise ReactClipError("the secret key is empty; give at least one byte, better 32 random ones")
        secret = seed if len(seed) <= 64 else hashlib.blake2b(seed).digest()
        rows = _without_signed_zero(pixels).cpu()
        digests = [hashlib.blake2b(row.numpy(), key=secret, digest_size=8).digest() for row in rows]
        return torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests], device=images.device)
    return _mix(_fingerprints(pixels) ^ _mix_number(int(seed)))


def _without_signed_zero(pixels: Tensor) -> Tensor:
    """Equal pixels must have equal keys, and -0.0 equals 0.0."""
    return pixels + 0.0


def _fingerprints(pixels: Tensor) -> Tensor:
    """Multilinear hash of the fp32 bit patterns: exact integer arithmetic, hence equal on every device."""
    return _mix(_multilinear(pixels, _weights(pixels.shape[1], pixels.device)) + pixels.shape[1])


def _multilinear_number(pixels: Tensor, weights: Tensor) -> Tensor:
    """:func:`_multilinear` in a form in which no compiler can take the zero for nothing."""
    return (torch.where(pixels == 0, 0.0, pixels).view(torch.int32) * weights).sum(dim=1)


@fused(_multilinear_number)
def _multilinear(pixels: Tensor, weights: Tensor) -> Tensor:
    return (_without_signed_zero(pixels).view(torch.int32) * weights).sum(dim=1)


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    """Of the hash; the same for all images of a size."""
    return _bits(torch.zeros(1, dtype=torch.long, device=device), count)
