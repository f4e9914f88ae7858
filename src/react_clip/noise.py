"""One random stream per image: what an image gets never depends on the batch it sits in.

A stream is a 64-bit key. Keys come from the pixels and a seed (or a secret), child streams from :func:`fork`, and
numbers are a pure function of the key and their position. So any subset of images, views or positions can be drawn in
any order, on any device, with the same bits. The generator is SplitMix64 run as a counter; normal numbers are looked up
in a table of quantiles. Global random state is neither read nor changed.

Bits are the same because everything here is integer arithmetic, or one operation at a time that IEEE 754 rounds in one
way (+, -, *, /, sqrt). Logarithms, exponentials and sines differ between devices, so they come from tables
(:func:`tabulated`). So does a division by a plain number, for which a GPU multiplies by the reciprocal: divide by a
tensor, or multiply.

PyTorch's own generators cannot do this: they draw for a whole batch, in an order that depends on its size.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from react_clip.secret import Seed as Seed
from react_clip.secret import check_seed


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
    """SplitMix64's finaliser: a bijection of 64-bit integers in which every input bit affects every output bit."""
    # The first step copies; the others work in place, because large draws are bound by memory.
    value = (value ^ _shift_right(value, 30)).mul_(_MIX_1)
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_MIX_2)
    return value.bitwise_xor_(_shift_right(value, 31))


def _bits(keys: Tensor, count: int) -> Tensor:
    """``[N, count]`` random 64-bit integers, the first ``count`` of each key's stream."""
    return _mix(keys[:, None] + torch.arange(1, count + 1, device=keys.device) * _GOLDEN)


def fork(keys: Tensor, branch: int | Tensor) -> Tensor:
    """Independent child streams: the same key and branch always give the same child; the two broadcast.

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
    """``[N, *shape]`` standard normal numbers (fp32): 2^16 different ones, of absolute values up to 4.3.

    >>> noise = normal(torch.tensor([7]), (3, 64, 64))
    >>> bool(noise.mean().abs() < 0.03), bool((noise.std() - 1).abs() < 0.03)
    (True, True)
    """
    count = math.prod(shape)
    # Each integer has four pieces of 16 bits, from -2^15 to 2^15 - 1.
    pieces = _bits(keys, -(-count // 4)).view(torch.int16).int().add_(2**15)
    quantiles = _table(_normal_quantiles, (), 2**16, keys.device, torch.float32)
    return quantiles.index_select(0, pieces.flatten()).view(len(keys), -1)[:, :count].reshape(len(keys), *shape)


def _normal_quantiles(shares: Tensor) -> Tensor:
    """Standard normal quantiles, scaled to a variance of exactly 1: the middle of an outer part is nearer to zero."""
    quantiles: Tensor = torch.special.ndtri(shares)
    return quantiles / quantiles.square().mean().sqrt()


def tabulated(function: Callable[..., Tensor], draws: Tensor, *constants: float) -> Tensor:
    """``function(draws, *constants)`` of uniform draws, each rounded to the middle of one of 4096 equal parts.

    The function maps fp64 numbers ``[P]`` to ``[P, ...]``. It is called once, on the CPU, so that the results have the
    same bits on every device, whatever it computes.

    >>> tabulated(torch.exp, torch.tensor([0.0, 0.5]))
    tensor([1.0001, 1.6489])
    """
    table = _table(function, constants, 2**12, draws.device, draws.dtype)
    return table[(draws * len(table)).long()]


@cache
def _table(
    function: Callable[..., Tensor], constants: tuple[float, ...], parts: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Values of a function in the middles of equal parts of [0, 1], kept for the life of the process."""
    middles = (torch.arange(parts, dtype=torch.float64, device="cpu") + 0.5) / parts
    return function(middles, *constants).to(device, dtype)


def noisy_view(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    r"""Views :math:`x + \sigma\,\eta` of images ``[N, ...]``, with one key and one ``sigma`` each; not clamped.

    >>> pixels, keys = torch.rand(2, 3, 8, 8), torch.tensor([1, 2])
    >>> views = noisy_view(pixels, keys, torch.tensor([0.0, 0.1]))
    >>> torch.equal(views[0], pixels[0]), torch.allclose(views[1], pixels[1] + 0.1 * normal(keys[1:], (3, 8, 8)))
    (True, True)
    """
    grain = normal(keys, pixels.shape[1:]).to(pixels.dtype)
    return pixels + sigma.reshape(-1, *[1] * (pixels.ndim - 1)) * grain


def stream_keys(images: Tensor, seed: Seed) -> Tensor:
    """One key per image ``[N]``, from its pixels and the seed: the same alone, in any batch and in any order.

    With a number as seed the pixels are hashed on their own device, by a multilinear hash of their fp32 bit patterns:
    exact integer arithmetic, hence equal on every device. With ``bytes`` the key is the HMAC-SHA256 of the pixels:
    without the secret nobody can predict the noise or find two images that share it. Then images may also be uint8;
    they have the keys of the same pixels in [0, 1].
    """
    check_seed(seed)
    if isinstance(seed, bytes):
        return torch.tensor([secret_key(image, seed) for image in _numbers_to_hash(images)], device=images.device)
    rows = _fp32_rows(images)
    hashes = (rows.view(torch.int32) * _hash_weights(rows.shape[1], rows.device)).sum(dim=1)
    # The seed stays on the CPU: one number there joins the operation on any device.
    return _mix(_mix(hashes + rows.shape[1]) ^ _mix(torch.tensor(_signed(int(seed)))))


def _fp32_rows(images: Tensor) -> Tensor:
    """Images as rows ``[N, numbers]``. Adding zero turns -0.0 into 0.0: equal pixels must have equal keys."""
    return images.detach().float().flatten(1).contiguous() + 0.0


def _numbers_to_hash(images: Tensor) -> Iterator[Tensor]:
    """Each image on the CPU: bytes, a quarter of the work, if all of its values are k / 255, else fp32."""
    if images.dtype == torch.uint8:
        yield from images.cpu()
        return
    rows = _fp32_rows(images)
    levels = rows.mul(255.0).round_().to(torch.uint8)
    # By a tensor: a GPU multiplies by the reciprocal of a plain number, which rounds differently.
    is_8bit = (levels.float().div_(rows.new_tensor(255.0)) == rows).all(dim=1)
    exact, others = (iter(part.cpu()) for part in (levels[is_8bit], rows[~is_8bit]))
    yield from (next(exact if flag else others) for flag in is_8bit.tolist())


def secret_key(image: Tensor, secret: bytes) -> int:
    """Key of one image on the CPU: the HMAC-SHA256 of its pixels, which for uint8 is what :func:`stream_keys` gives.

    >>> image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    >>> secret = bytes(32)
    >>> secret_key(image, secret) == int(stream_keys(image[None], secret))
    True
    """
    kind = b"8 bit" if image.dtype == torch.uint8 else b""
    code = hmac.new(secret, kind, "sha256")
    code.update(image.contiguous().numpy().data)
    return int.from_bytes(code.digest()[:8], "little", signed=True)


@cache
def _hash_weights(count: int, device: torch.device) -> Tensor:
    """Weights ``[1, count]`` of :func:`stream_keys`, kept for the life of the process."""
    return _bits(torch.zeros(1, dtype=torch.long, device=device), count)
