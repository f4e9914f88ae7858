"""Triton kernels for GPUs: several operations in one pass over the memory.

Every kernel stands beside plain PyTorch, which runs elsewhere: on a CPU, with gradients, inside ``torch.compile``, and
where Triton or a C compiler is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = 512
"""Pairs of pixels that one program of the noise kernel computes, and pixels of that of smaller copies."""


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


def _device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Makes the GPU of a tensor the current one, on which Triton starts kernels."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


# ---------------------------------------------------------------------- views of images


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
        with _device_of(pixels):
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
    with _device_of(pixels):
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
    grid = (images * channels, -(-size * size // _BLOCK))
    with _device_of(pixels):
        tensors = pixels, starts, weights, copies
        _resize_kernel()[grid](*tensors, side, size, TAPS=weights.shape[1], BLOCK=_BLOCK)
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
        return starts.to(device), weights.to(device)


@cache
def _resize_kernel() -> Any:
    """The kernel for channel ``program_id(0)`` of all images and a block of its new pixels."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(pixels, starts, weights, copies, side, size, TAPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        channel = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = here < size * size
        row, column = here // size, here % size
        top = tl.load(starts + row, mask=inside, other=0)
        left = tl.load(starts + column, mask=inside, other=0)
        corner = pixels + channel * side * side + top * side + left
        copy = tl.zeros((BLOCK,), tl.float32)
        for down in tl.static_range(TAPS):
            line = tl.zeros((BLOCK,), tl.float32)
            for right in tl.static_range(TAPS):
                weight = tl.load(weights + column * TAPS + right, mask=inside)
                line += weight * tl.load(corner + down * side + right, mask=inside)
            copy += tl.load(weights + row * TAPS + down, mask=inside) * line
        tl.store(copies + channel * size * size + here, copy, mask=inside)

    return kernel


def hash_sums(pixels: Tensor, weights: Tensor) -> Tensor:
    """Sums ``[B]`` of the bit patterns of fp32 pixels times weights: the first step of a key, with the same bits."""
    pixels = pixels.contiguous()
    sums, numbers = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device), pixels[:1].numel()
    with _device_of(pixels):
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
    with _device_of(pixels):
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
        # Where the pixel comes from, in pixels; black outside.
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


# ---------------------------------------------------------------------- parts of a tower


def fuse_operations(tower: nn.Module) -> None:
    """Let QuickGELUs (ours, transformers' and open_clip's), :class:`AddNorm` and :class:`Projections` run faster."""
    for parent in [module for module in tower.modules() if not isinstance(module, FusedQuickGELU)]:
        if isinstance(parent, AddNorm):
            parent.fused = True
        if isinstance(parent, Projections):
            parent.join()
        children = dict(parent.named_children())
        first = "fc1" if "fc1" in children else "c_fc"
        for name, child in children.items():
            layer = children.get(first)
            if isinstance(layer, nn.Linear) and type(child).__name__ in ("QuickGELU", "QuickGELUActivation"):
                setattr(parent, first, FusedQuickGELU(layer, child))
                setattr(parent, name, nn.Identity())


class FusedQuickGELU(nn.Linear):
    """A linear layer and its activation: h = Wx + b, then h sigmoid(1.702 h).

    On GPUs from Hopper on, in 16 bits, one kernel computes both and rounds once. On other GPUs, and in fp32, the
    activation is one kernel instead of three, with the same roundings. Elsewhere both run as they are.
    """

    def __init__(self, layer: nn.Linear, activation: nn.Module) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.activation = activation

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[..., in]`` to activated ``[..., out]``."""
        if self._suits(tokens):
            return self._fused(tokens)
        hidden = super().forward(tokens)
        if suit_kernels(hidden):
            return _quick_gelu(hidden)
        activated: Tensor = self.activation(hidden)
        return activated

    def _suits(self, tokens: Tensor) -> bool:
        """True if the kernel for both takes these tokens: it copies tiles by TMA, whose rows are whole 16 bytes."""
        half = self.weight.dtype in (torch.float16, torch.bfloat16) and tokens.dtype == self.weight.dtype
        whole = self.in_features % 8 == 0 and self.out_features % 8 == 0 and tokens.data_ptr() % 16 == 0
        return half and whole and self.bias is not None and suit_kernels(tokens) and _has_tma(tokens.device)

    def _fused(self, tokens: Tensor) -> Tensor:
        from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped, unused-ignore]

        rows = tokens.flatten(0, -2)
        result = rows.new_empty(len(rows), self.out_features)
        # Measured on an H200: many rows fill it with wide tiles, few do not.
        height, width, depth = (128, 256, 64) if len(rows) > 4096 else (128, 128, 64)
        tiles = -(-len(rows) // height) * -(-self.out_features // width)
        blocks = (rows, (height, depth)), (self.weight, (width, depth)), (result, (height, width))
        source, weight, target = (TensorDescriptor.from_tensor(tensor, list(block)) for tensor, block in blocks)
        most = _multiprocessors(rows.device)
        with _device_of(rows):
            _linear_quick_gelu_kernel()[(min(tiles, most),)](
                *(source, weight, self.bias, target, len(rows), self.in_features, self.out_features),
                **{"HEIGHT": height, "WIDTH": width, "DEPTH": depth, "PROGRAMS": most},
                **{"num_warps": width // 32, "num_stages": 4 if width == 128 else 3},
            )
        return result.reshape(*tokens.shape[:-1], -1)


@cache
def _has_tma(device: torch.device) -> bool:
    """True on GPUs from Hopper on whose Triton has tensor descriptors."""
    try:
        import triton.tools.tensor_descriptor  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _linear_quick_gelu_kernel() -> Any:
    """The kernel that computes tiles ``program_id(0)``, ``program_id(0) + PROGRAMS`` and so on of the result."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        source, weight, bias, target, rows, numbers: tl.constexpr, columns: tl.constexpr,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
    ):  # fmt: skip
        down, across = tl.cdiv(rows, HEIGHT), tl.cdiv(columns, WIDTH)
        for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
            # Eight tiles below each other, then their neighbours: programs that run together share what they read.
            first = tile // (8 * across) * 8
            beside = tile % (8 * across)
            height = tl.minimum(down - first, 8)
            top, left = (first + beside % height) * HEIGHT, beside // height * WIDTH
            hidden = tl.zeros((HEIGHT, WIDTH), tl.float32)
            for number in range(0, numbers, DEPTH):
                hidden = tl.dot(source.load([top, number]), weight.load([left, number]).T, hidden)
            column = left + tl.arange(0, WIDTH)
            hidden += tl.load(bias + column, mask=column < columns).to(tl.float32)[None, :]
            activated = hidden / (1.0 + tl.exp2(hidden * -2.455466969))  # 1.702 / ln 2
            target.store([top, left], activated.to(target.dtype))

    return kernel


def _quick_gelu(hidden: Tensor) -> Tensor:
    """x sigmoid(1.702 x) by one kernel instead of three, with the same roundings."""
    result, numbers = torch.empty_like(hidden), hidden.numel()
    with _device_of(hidden):
        _quick_gelu_kernel()[(-(-numbers // 1024),)](hidden, result, numbers, BLOCK=1024, enable_fp_fusion=False)
    return result


@cache
def _quick_gelu_kernel() -> Any:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice  # type: ignore[import-untyped, unused-ignore]

    @triton.jit(do_not_specialize=["numbers"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(source, result, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        start = tl.program_id(0).to(tl.int64) * BLOCK
        here = tl.arange(0, BLOCK)
        inside = here < numbers - start
        stored = tl.load(source + start + here, mask=inside)
        hidden = stored.to(tl.float32)
        # PyTorch rounds after each of its three operations.
        scaled = (hidden * 1.702).to(stored.dtype).to(tl.float32)
        gate = tl.div_rn(1.0, 1.0 + libdevice.exp(-scaled)).to(stored.dtype).to(tl.float32)
        tl.store(result + start + here, (hidden * gate).to(stored.dtype), mask=inside)

    return kernel


class Projections(nn.ModuleDict):
    """The linear layers of attention, with the names that transformers gives them.

    After :func:`fuse_operations` the weights of queries, keys and values are parts of one matrix, and a GPU computes
    all three by one product.
    """

    def __init__(self, width: int) -> None:
        # Same order as transformers, so that a fingerprint over the parameters is the same for both.
        super().__init__({name: nn.Linear(width, width) for name in ("k_proj", "v_proj", "q_proj", "out_proj")})
        self._joint: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Copy the weights into one matrix and the biases into one vector, of which the layers keep parts."""
        layers: list[Any] = [self[name] for name in ("q_proj", "k_proj", "v_proj")]
        weight, bias = (torch.cat([getattr(each, name).detach() for each in layers]) for name in ("weight", "bias"))
        for layer, rows, numbers in zip(layers, weight.chunk(3), bias.chunk(3), strict=True):
            layer.weight.data, layer.bias.data = rows, numbers
        self._joint = weight, bias

    def forward(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of some tokens, keys and values of all of them."""
        if self._joint is None or not self._suits(tokens):
            return self["q_proj"](queries), self["k_proj"](tokens), self["v_proj"](tokens)
        weight, bias = self._joint
        width = weight.shape[1]
        if queries is tokens:
            q, k, v = F.linear(tokens, weight, bias).chunk(3, -1)
        else:
            q = F.linear(queries, weight[:width], bias[:width])
            k, v = F.linear(tokens, weight[width:], bias[width:]).chunk(2, -1)
        return q, k, v

    def _suits(self, tokens: Tensor) -> bool:
        """True on a GPU without gradients, if the layers still have the weights that were joined."""
        if self._joint is None or not suit_kernels(tokens):
            return False
        first: Any = self["q_proj"]
        return bool(first.weight.data_ptr() == self._joint[0].data_ptr())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._joint is not None:
            self.join()
        return self


class AddNorm(nn.Module):
    """Adds an update to tokens ``[..., width]`` and normalises the sum (LayerNorm): returns both.

    After :func:`fuse_operations` one kernel does it on a GPU in half precision. The sum has the bits of PyTorch's; the
    normalised tokens are equal up to rounding.
    """

    EPS = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.fused = False

    def forward(self, tokens: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum and its normalisation; without an update the tokens and theirs."""
        if update is not None and self._suits(tokens, update):
            return self._fused(tokens, update)
        tokens = tokens if update is None else tokens + update
        return tokens, nn.functional.layer_norm(tokens, self.weight.shape, self.weight, self.bias, self.EPS)

    def _suits(self, *tensors: Tensor) -> bool:
        """True if the kernel takes these tensors."""
        half = self.weight.dtype in (torch.float16, torch.bfloat16)
        alike = all(tensor.dtype == self.weight.dtype for tensor in tensors)
        return self.fused and half and alike and suit_kernels(*tensors)

    def _fused(self, tokens: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        total, normalised, width = torch.empty_like(tokens), torch.empty_like(tokens), len(self.weight)
        tensors = tokens, update, self.weight, self.bias, total, normalised
        with _device_of(tokens):
            block = 1 << (width - 1).bit_length()
            _add_norm_kernel()[(tokens.numel() // width,)](*tensors, width, self.EPS, BLOCK=block)
        return total, normalised


@cache
def _add_norm_kernel() -> Any:
    """The kernel for row ``program_id(0)``."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(tokens, update, weight, bias, total, normalised, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        start = tl.program_id(0).to(tl.int64) * width
        column = tl.arange(0, BLOCK)
        inside = column < width
        old = tl.load(tokens + start + column, mask=inside, other=0.0)
        new = tl.load(update + start + column, mask=inside, other=0.0)
        rounded = (old.to(tl.float32) + new.to(tl.float32)).to(old.dtype)
        tl.store(total + start + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
        centred = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = centred * scale * gain + shift
        tl.store(normalised + start + column, result.to(old.dtype), mask=inside)

    return kernel
