"""Linear layers in int8 on a GPU, for the idea `int8-gpu` of `tried.py`.

    x_q = round(x / s),  s = max |x| / 127 of each token;   W_q likewise, one scale for each output channel
    y = s (x_q W_q^T) s_W + b

A kernel rounds the tokens, another one multiplies in int8, sums in int32 and scales.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from react_clip.encoders.layers import FusedQuickGELU, Projections


def multiply_in_int8(tower: nn.Module) -> None:
    """Let an accelerated tower's attention and perceptrons multiply in int8."""
    for parent in list(tower.modules()):
        if isinstance(parent, Projections):
            joint = [parent[name] for name in ("q_proj", "k_proj", "v_proj")]
            parent.forward = _Int8Projections(joint).forward  # type: ignore[method-assign]
        for name, child in list(parent.named_children()):
            if name in ("out_proj", "fc1", "fc2"):
                assert isinstance(child, nn.Linear)
                setattr(parent, name, Int8Linear(child.weight, child.bias, isinstance(child, FusedQuickGELU)))


class Int8Linear(nn.Module):
    """A linear layer, followed by QuickGELU if ``activate``; tokens are in 16 bits."""

    def __init__(self, weight: Tensor, bias: Tensor, activate: bool = False) -> None:
        super().__init__()
        self.scale = weight.float().abs().amax(1) / 127
        self.weight = (weight.float() / self.scale[:, None]).round().to(torch.int8)
        self.bias, self.activate = bias.float(), activate

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[..., in]`` to ``[..., out]``."""
        from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped, unused-ignore]

        rows = tokens.flatten(0, -2).contiguous()
        count, width = rows.shape
        rounded, scales = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(count, dtype=torch.float32)
        _rounding_kernel()[(count,)](rows, rounded, scales, width, BLOCK=1 << (width - 1).bit_length(), num_warps=4)
        result = rows.new_empty(count, len(self.weight))
        height, across, depth = (128, 256, 128) if count > 4096 else (128, 128, 128)
        blocks = (rounded, (height, depth)), (self.weight, (across, depth)), (result, (height, across))
        source, weight, target = (TensorDescriptor.from_tensor(tensor, list(block)) for tensor, block in blocks)
        tiles = -(-count // height) * -(-len(self.weight) // across)
        programs = torch.cuda.get_device_properties(rows.device).multi_processor_count if rows.is_cuda else 1
        _product_kernel()[(min(tiles, programs),)](
            *(source, weight, scales, self.scale, self.bias, target, count, width, len(self.weight)),
            **{"HEIGHT": height, "ACROSS": across, "DEPTH": depth, "PROGRAMS": programs, "ACTIVATE": self.activate},
            **{"num_warps": 8 if across == 256 else 4, "num_stages": 3},
        )
        return result.reshape(*tokens.shape[:-1], -1)


class _Int8Projections:
    """Queries of some tokens, keys and values of all of them, as in :class:`Projections`."""

    def __init__(self, layers: list[Any]) -> None:
        weights, biases = ([getattr(layer, name) for layer in layers] for name in ("weight", "bias"))
        self.all, self.queries = Int8Linear(torch.cat(weights), torch.cat(biases)), Int8Linear(weights[0], biases[0])
        self.others = Int8Linear(torch.cat(weights[1:]), torch.cat(biases[1:]))

    def forward(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        if queries is tokens:
            return self.all(tokens).chunk(3, -1)  # type: ignore[no-any-return]
        return self.queries(queries), *self.others(tokens).chunk(2, -1)


@cache
def _rounding_kernel() -> Any:
    """The kernel that rounds row ``program_id(0)``."""
    import triton  # type: ignore[import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(rows, rounded, scales, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values), 0) / 127, 1e-12)
        shifted = values / scale + 0.5  # floor(x + 1/2) rounds to the nearest integer
        tl.store(rounded + row * width + column, tl.floor(shifted).to(tl.int8), mask=inside)
        tl.store(scales + row, scale)

    return kernel


@cache
def _product_kernel() -> Any:
    """The kernel that computes tiles ``program_id(0)``, ``program_id(0) + PROGRAMS`` and so on of the result."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def]
        source, weight, scales, channel_scales, bias, target, count, numbers: tl.constexpr, columns: tl.constexpr,
        HEIGHT: tl.constexpr, ACROSS: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr,
        ACTIVATE: tl.constexpr,
    ):  # fmt: skip
        down, across = tl.cdiv(count, HEIGHT), tl.cdiv(columns, ACROSS)
        for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
            first = tile // (8 * across) * 8
            beside = tile % (8 * across)
            height = tl.minimum(down - first, 8)
            top, left = (first + beside % height) * HEIGHT, beside // height * ACROSS
            total = tl.zeros((HEIGHT, ACROSS), tl.int32)
            for number in range(0, numbers, DEPTH):
                total = tl.dot(source.load([top, number]), weight.load([left, number]).T, total, out_dtype=tl.int32)
            row, column = top + tl.arange(0, HEIGHT), left + tl.arange(0, ACROSS)
            scale = tl.load(scales + row, mask=row < count, other=0.0)
            channel_scale = tl.load(channel_scales + column, mask=column < columns, other=0.0)
            shift = tl.load(bias + column, mask=column < columns, other=0.0)
            hidden = total.to(tl.float32) * scale[:, None] * channel_scale[None, :] + shift[None, :]
            if ACTIVATE:
                hidden = hidden / (1.0 + tl.exp2(hidden * -2.455466969))  # 1.702 / ln 2
            target.store([top, left], hidden.to(target.dtype))

    return kernel
