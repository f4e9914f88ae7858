"""Triton kernels that make views of images on a GPU: several operations in one pass over the memory.

Every kernel stands beside plain PyTorch, which runs elsewhere: on a CPU, with gradients, inside ``torch.compile``, and
where Triton or a C compiler is missing. Kernels of a tower are in :mod:`react_clip.encoders.layers`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 512
"""Pairs of pixels that one program of the noise kernel computes, and pixels of that of moved copies."""


def runs_without_gradients(*tensors: Tensor) -> bool:
    """True for tensors on a GPU, below double precision, that need no gradients."""
    return tensors[0].is_cuda and tensors[0].dtype != torch.float64 and not needs_gradients(*tensors)


def needs_gradients(*tensors: Tensor) -> bool:
    """True if gradients of one of these tensors may be asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@cache
def kernels_work(device: torch.device) -> bool:
    """Compile the noise kernel for a device, once per process; false without a GPU, Triton or a C compiler."""
    if device.type != "cuda":
        return False
    try:
        noisy_view(torch.zeros(1, 3, 4, 4, device=device), *torch.zeros(2, 1, device=device).long())
    except Exception:  # a missing compiler shows itself in a dozen ways
        return False
    return True


def suit_kernels(*tensors: Tensor) -> bool:
    """True on a GPU that runs our kernels, without gradients and outside torch.compile, if rows follow each other."""
    suits = runs_without_gradients(*tensors) and not torch.compiler.is_compiling()
    return suits and all(tensor.is_contiguous() for tensor in tensors) and kernels_work(tensors[0].device)


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes the GPU of a tensor the current one, on which Triton starts kernels."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def noisy_view(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    """:func:`react_clip.noise.noisy_view` of fp32 pixels on a GPU, in one pass over the memory."""
    pixels = pixels.contiguous()
    views, numbers = torch.empty_like(pixels), pixels[:1].numel()
    pairs = (numbers + 1) // 2
    if numbers:
        grid = (len(pixels), -(-pairs // _BLOCK))
        # Copies start at aligned addresses, for which the kernel is compiled. Without fused multiply-add every
        # operation rounds as PyTorch's does.
        tensors = pixels, keys.clone(), sigma.float().clone(), views
        with device_of(pixels):
            _noise_kernel()[grid](*tensors, numbers, pairs, BLOCK=_BLOCK, enable_fp_fusion=False)
    return views


@cache
def _noise_kernel() -> Any:
    """The kernel for image ``program_id(0)`` and a block of its pairs of numbers."""
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

    @triton.jit(do_not_specialize=["numbers", "pairs"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(pixels, keys, sigmas, views, numbers, pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        # SplitMix64 as a counter.
        bits = tl.load(keys + row).to(tl.uint64) + (pair + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
        bits = bits ^ (bits >> 31)
        # Box-Muller: cosines are the first half of an image's numbers, sines the second.
        radius = tl.sqrt_rn(tl.log(((bits >> 40) + 1).to(tl.float32) * 5.9604644775390625e-08) * -2.0)
        angle = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 3.7450702829239286e-07
        sigma, start = tl.load(sigmas + row), row * numbers
        here, inside = start + pair, pair < pairs
        view = tl.load(pixels + here, mask=inside) + sigma * (tl.cos(angle) * radius)
        tl.store(views + here, view, mask=inside)
        here, inside = start + pairs + pair, pairs + pair < numbers
        view = tl.load(pixels + here, mask=inside) + sigma * (tl.sin(angle) * radius)
        tl.store(views + here, view, mask=inside)

    return kernel


def normalised(pixels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """``((pixels - mean) / std).to(dtype)`` of fp32 pixels ``[B, C, S, S]`` on a GPU, with the same bits."""
    pixels = pixels.contiguous()
    result, numbers = torch.empty_like(pixels, dtype=dtype), pixels[:1, :1].numel()
    grid = (len(pixels) * pixels.shape[1], -(-numbers // (4 * _BLOCK)))
    tensors = pixels, mean.flatten().contiguous(), std.flatten().contiguous(), result
    with device_of(pixels):
        _normalisation_kernel()[grid](*tensors, pixels.shape[1], numbers, BLOCK=4 * _BLOCK, enable_fp_fusion=False)
    return result


@cache
def _normalisation_kernel() -> Any:
    """The kernel for channel ``program_id(0)`` of all images and a block of its pixels."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(pixels, means, stds, result, channels, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        plane = tl.program_id(0)
        mean = tl.load(means + plane % channels).to(tl.float32)
        std = tl.load(stds + plane % channels).to(tl.float32)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, start = here < numbers, plane.to(tl.int64) * numbers
        value = tl.div_rn(tl.load(pixels + start + here, mask=inside) - mean, std)
        tl.store(result + start + here, value.to(result.dtype.element_ty), mask=inside)

    return kernel


def smaller_copy(pixels: Tensor, size: int) -> Tensor:
    """:func:`react_clip.augment.smaller_copy` of fp32 pixels ``[B, C, S, S]`` on a GPU; equal up to rounding."""
    pixels = pixels.contiguous()
    images, channels, side, _ = pixels.shape
    copies = pixels.new_empty(images, channels, size, size)
    starts, weights = _sources(side, size, pixels.device)
    # Measured on an H200: small blocks of many threads keep more reads on their way.
    block = _BLOCK // 2
    with device_of(pixels):
        _resize_kernel()[(images, -(-size * size // block))](
            *(pixels, starts, weights, copies, side, size),
            **{"CHANNELS": channels, "TAPS": weights.shape[1], "BLOCK": block, "num_warps": block // 32},
        )
    return copies


@cache
def _sources(side: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Along a side, the first pixel that each of the ``size`` new ones is made from, and weights ``[size, taps]``.

    They are read off a resized identity matrix, so they are PyTorch's. Kept for the life of the process: CUDA graphs
    hold their addresses.
    """
    with torch.inference_mode(False), torch.no_grad():
        matrix = F.interpolate(torch.eye(side)[None, None], size=(size, side), mode="bilinear", antialias=True)[0, 0]
        used = matrix != 0
        taps = int(used.sum(1).max())
        starts = used.int().argmax(1).clamp(max=side - taps)
        weights = matrix.gather(1, starts[:, None] + torch.arange(taps))
        return starts.int().to(device), weights.to(device)


@cache
def _resize_kernel() -> Any:
    """The kernel for image ``program_id(0)`` and a block of its new pixels."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        pixels, starts, weights, copies, side, size, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
    ):
        image = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = here < size * size
        row, column = here // size, here % size
        top = tl.load(starts + row, mask=inside, other=0)
        left = tl.load(starts + column, mask=inside, other=0)
        for channel in tl.static_range(CHANNELS):
            plane = image * CHANNELS + channel
            corner = pixels + plane * side * side + top * side + left
            copy = tl.zeros((BLOCK,), tl.float32)
            for down in tl.static_range(TAPS):
                line = tl.zeros((BLOCK,), tl.float32)
                for right in tl.static_range(TAPS):
                    weight = tl.load(weights + column * TAPS + right, mask=inside)
                    line += weight * tl.load(corner + down * side + right, mask=inside)
                copy += tl.load(weights + row * TAPS + down, mask=inside) * line
            tl.store(copies + plane * size * size + here, copy, mask=inside)

    return kernel


def hash_sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """Sums ``[B]`` of the bit patterns of fp32 pixels times weights: the first step of a key, with the same bits."""
    pixels = pixels.contiguous()
    sums, numbers = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device), pixels[:1].numel()
    with device_of(pixels):
        grid = (len(pixels), -(-numbers // (8 * _BLOCK)))
        _hash_kernel()[grid](pixels, weights, sums, numbers, BLOCK=8 * _BLOCK)
    return sums


@cache
def _hash_kernel() -> Any:
    """The kernel for image ``program_id(0)`` and a block of its numbers."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(pixels, weights, sums, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        image = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = here < numbers
        # Adding zero turns -0.0 into 0.0.
        value = tl.load(pixels + image * numbers + here, mask=inside, other=0.0) + 0.0
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_add(sums + image, tl.sum(bits * tl.load(weights + here, mask=inside, other=0), 0))

    return kernel


def moved(
    pixels: Tensor,
    streams: Tensor,
    sums: Tensor | None,
    *,
    branch: int,
    rotation: float,
    translation: float,
    scale: tuple[float, float],
) -> Tensor:
    """:class:`react_clip.augment.Motion` of fp32 pixels by a branch of their streams ``[B]``; equal up to rounding.

    ``rotation`` is in radians. With ``sums`` from :func:`hash_sums` streams are seeds, hashed with the pixels.
    """
    pixels = pixels.contiguous()
    views, (images, channels, height, width) = torch.empty_like(pixels), pixels.shape
    tensors = pixels, streams.contiguous(), streams if sums is None else sums, views
    ranges = rotation, 2.0 * translation, scale[0], scale[1] - scale[0]
    with device_of(pixels):
        _motion_kernel()[(images, -(-height * width // _BLOCK))](
            *(*tensors, height, width, *ranges),
            **{"HASHED": sums is not None, "STEP": (branch + 1) * 0x9E3779B97F4A7C15 % 2**64},
            **{"CHANNELS": channels, "BLOCK": _BLOCK, "enable_fp_fusion": False},
        )
    return views


@cache
def _motion_kernel() -> Any:
    """The kernel for image ``program_id(0)`` and a block of its pixels."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rotation", "shift", "least", "span"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        pixels, streams, sums, views, height, width, rotation, shift, least, span,
        HASHED: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        image = tl.program_id(0).to(tl.int64)
        stream = tl.load(streams + image).to(tl.uint64)
        # SplitMix64: the sum is mixed, joined with the seed and mixed; a stream's branch is mixed twice.
        bits = stream
        if HASHED:
            bits = tl.load(sums + image).to(tl.uint64) + (height * width * CHANNELS).to(tl.uint64)
        for step in tl.static_range(4):
            if HASHED or step >= 2:
                if step == 1:
                    bits = bits ^ stream
                if step == 3:
                    bits = bits + STEP
                bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
                bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
                bits = bits ^ (bits >> 31)
        # Four uniform numbers.
        number = tl.arange(0, 4)
        bits = bits + (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
        bits = bits ^ (bits >> 31)
        uniform = (bits >> 40).to(tl.float32) * 5.9604644775390625e-08
        angle = rotation * (2.0 * tl.sum(tl.where(number == 0, uniform, 0.0), 0) - 1.0)
        right = shift * (2.0 * tl.sum(tl.where(number == 1, uniform, 0.0), 0) - 1.0)
        down = shift * (2.0 * tl.sum(tl.where(number == 2, uniform, 0.0), 0) - 1.0)
        zoom = least + span * tl.sum(tl.where(number == 3, uniform, 0.0), 0)
        cos, sin = tl.cos(angle) / zoom, tl.sin(angle) / zoom

        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = here < height * width
        x = (2.0 * (here % width) + 1.0) / width - 1.0
        y = (2.0 * (here // width) + 1.0) / height - 1.0
        # Column and row of the image, in pixels, that a pixel of the view shows; outside the image it is black.
        across = ((cos * x + (right - sin * y) + 1.0) * width - 1.0) / 2.0
        along = ((sin * x + (cos * y + down) + 1.0) * height - 1.0) / 2.0
        left, top = tl.floor(across), tl.floor(along)
        to_right, to_bottom = across - left, along - top
        column, row = left.to(tl.int32), top.to(tl.int32)
        for channel in tl.static_range(CHANNELS):
            plane = (image * CHANNELS + channel) * height * width
            value = tl.zeros((BLOCK,), tl.float32)
            for below in tl.static_range(2):
                for beside in tl.static_range(2):
                    r, c = row + below, column + beside
                    known = inside & (r >= 0) & (r < height) & (c >= 0) & (c < width)
                    weight = (to_bottom if below else 1.0 - to_bottom) * (to_right if beside else 1.0 - to_right)
                    value += weight * tl.load(pixels + plane + r * width + c, mask=known, other=0.0)
            tl.store(views + plane + here, tl.minimum(tl.maximum(value, 0.0), 1.0), mask=inside)

    return kernel
