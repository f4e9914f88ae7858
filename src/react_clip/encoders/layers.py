"""Layers of towers that run faster: on a GPU by Triton kernels and joined matrices, on a CPU by packed weights.

:func:`fuse_operations` and :func:`pack_weights` switch them on. Plain PyTorch runs elsewhere, as for the kernels of
:mod:`react_clip.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from react_clip.kernels import device_of, needs_gradients, suit_kernels


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


def pack_weights(tower: nn.Module) -> None:
    """Replace the linear layers of a tower by :class:`PackedLinear`."""
    for parent in list(tower.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))


class PackedLinear(nn.Linear):
    """A linear layer that keeps its weights a second time, in the layout of oneDNN's kernels.

    In bf16 on an x86 CPU PyTorch's linear layer rearranges all weights in every call. Elsewhere, and with gradients,
    this is that layer.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.pack()

    def pack(self) -> None:
        """Rearrange the weights, where that is of use."""
        on_x86 = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        suits = self.weight.is_cpu and self.weight.dtype == torch.bfloat16 and on_x86
        suits = suits and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None) if suits else None
        self._packed_version = self._weight_version()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[..., in]`` to ``[..., out]``."""
        if self._packed is None or needs_gradients(tokens, self.weight) or torch.compiler.is_compiling():
            return super().forward(tokens)
        if self._packed_version != self._weight_version():
            self.pack()
        result: Tensor = torch.ops.mkldnn._linear_pointwise(tokens, self._packed, self.bias, "none", [], "")
        return result

    def _weight_version(self) -> int:
        """A number that changes when the weights are changed in place."""
        return 0 if self.weight.is_inference() else self.weight._version

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pack()
        return self


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
        with device_of(rows):
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
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

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
    with device_of(hidden):
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
        joint = self._joint_for(tokens)
        if joint is None:
            return self["q_proj"](queries), self["k_proj"](tokens), self["v_proj"](tokens)
        weight, bias = joint
        width = weight.shape[1]
        if queries is tokens:
            q, k, v = F.linear(tokens, weight, bias).chunk(3, -1)
        else:
            q = F.linear(queries, weight[:width], bias[:width])
            k, v = F.linear(tokens, weight[width:], bias[width:]).chunk(2, -1)
        return q, k, v

    def _joint_for(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Joint weight and bias on a GPU without gradients; None elsewhere, or if a layer has got another weight."""
        if self._joint is None or not suit_kernels(tokens):
            return None
        first: Any = self["q_proj"]
        return self._joint if first.weight.data_ptr() == self._joint[0].data_ptr() else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._joint is not None:
            self.join()
        return self


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention of queries ``[B, Q, width]`` to keys and values ``[B, T, width]``."""
    q, k, v = (torch.unflatten(each, -1, (heads, -1)).transpose(1, 2) for each in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@dataclass(frozen=True, eq=False)
class Packing:
    """Images of several sizes whose tokens are the rows of one matrix ``[tokens, width]``."""

    shapes: Sequence[tuple[int, int]]
    """For each size the number of images and the tokens of one."""
    starts: Tensor | None
    """First row of each image, then the number of rows, ``[images + 1]``; ``None`` if attention is not one kernel."""

    @classmethod
    def of(cls, tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> Self:
        """The packing of these tokens."""
        half = tokens.dtype in (torch.float16, torch.bfloat16)
        if not (half and suit_kernels(tokens) and _varlen_attention(tokens.device)):
            return cls(shapes, None)
        return cls(shapes, _starts(tuple(shapes), tokens.device))

    def first_tokens(self, tokens: Tensor) -> Tensor:
        """The first token of each image, ``[images, width]``."""
        if self.starts is not None:
            return tokens.index_select(0, self.starts[:-1])
        return torch.cat([part[:, 0] for part in _unpack(tokens, self.shapes)])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
        """Attention inside each image; queries are all tokens, or the first one of each image."""
        first_only = len(queries) < len(keys)
        if self.starts is not None:
            longest = max(length for _, length in self.shapes)
            rows = torch.arange(len(self.starts), dtype=torch.int32, device=keys.device) if first_only else self.starts
            q, k, v = (torch.unflatten(each, -1, (heads, -1)) for each in (queries, keys, values))
            attention = _varlen_attention(keys.device)
            mixed: Tensor = attention(q, k, v, rows, self.starts, 1 if first_only else longest, longest)
            return mixed.flatten(1)
        of_queries = [(images, 1) for images, _ in self.shapes] if first_only else self.shapes
        parts = zip(_unpack(queries, of_queries), _unpack(keys, self.shapes), _unpack(values, self.shapes), strict=True)
        return torch.cat([attend(q, k, v, heads).flatten(0, 1) for q, k, v in parts])


@cache
def _starts(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """:attr:`Packing.starts`, made once and kept: CUDA graphs hold its address."""
    lengths = [0] + [length for images, length in shapes for _ in range(images)]
    with torch.inference_mode(False):
        return torch.tensor(list(accumulate(lengths)), dtype=torch.int32, device=device)


def _unpack(tokens: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Rows ``[tokens, width]`` as one tensor ``[images, tokens of an image, width]`` per size."""
    parts = torch.split(tokens, [images * length for images, length in shapes])
    return [part.reshape(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


@cache
def _varlen_attention(device: torch.device) -> Any:
    """PyTorch's attention for sequences of different lengths; None before PyTorch 2.10 and on GPUs before Ampere."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if torch.cuda.get_device_capability(device) >= (8, 0) else None


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
        """The sum and its normalisation; without an update the tokens and theirs.

        The update has the shape of the tokens, or is the same for all images: ``[T, width]``.
        """
        if self._suits(tokens) and (update is None or self._suits(update)):
            return self._fused(tokens, update)
        tokens = tokens if update is None else tokens + update
        return tokens, nn.functional.layer_norm(tokens, self.weight.shape, self.weight, self.bias, self.EPS)

    def _suits(self, tensor: Tensor) -> bool:
        """True if the kernel takes this tensor."""
        half = self.weight.dtype in (torch.float16, torch.bfloat16)
        return self.fused and half and tensor.dtype == self.weight.dtype and suit_kernels(tensor)

    def _fused(self, tokens: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        width, normalised = len(self.weight), torch.empty_like(tokens)
        total, rows = (tokens, 1) if update is None else (torch.empty_like(tokens), update.numel() // width)
        tensors = tokens, update, self.weight, self.bias, total, normalised
        with device_of(tokens):
            block = 1 << (width - 1).bit_length()
            _add_norm_kernel()[(tokens.numel() // width,)](*tensors, width, rows, self.EPS, BLOCK=block)
        return total, normalised


@cache
def _add_norm_kernel() -> Any:
    """The kernel for row ``program_id(0)``; an update has ``rows`` rows, which are added again and again."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(tokens, update, weight, bias, total, normalised, width, rows, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        start = row * width
        column = tl.arange(0, BLOCK)
        inside = column < width
        stored = tl.load(tokens + start + column, mask=inside, other=0.0)
        if update is not None:
            new = tl.load(update + row % rows * width + column, mask=inside, other=0.0)
            stored = (stored.to(tl.float32) + new.to(tl.float32)).to(stored.dtype)
            tl.store(total + start + column, stored, mask=inside)
        values = stored.to(tl.float32)
        centred = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        result = centred * scale * gain + shift
        tl.store(normalised + start + column, result.to(stored.dtype), mask=inside)

    return kernel
