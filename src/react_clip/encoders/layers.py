"""Layers of CLIP's image tower. Tokens are the rows of one matrix, so that images of several sizes share a pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from react_clip.errors import first_line

QUICK_GELU = "quick_gelu"
APPROXIMATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
"""How PyTorch calls the GELUs of transformers."""
ACTIVATIONS = (QUICK_GELU, *APPROXIMATIONS)

Shapes = Sequence[tuple[int, int]]
"""For each size of image the number of images and the tokens of one."""


def unpack(rows: Tensor, shapes: Shapes) -> list[Tensor]:
    """Rows ``[tokens, width]`` as one tensor ``[images, tokens of an image, width]`` for each size."""
    parts = [rows] if len(shapes) == 1 else torch.split(rows, [images * length for images, length in shapes])
    return [part.reshape(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


def pack(images: Sequence[Tensor]) -> Tensor:
    """The opposite of :func:`unpack`: ``[images, tokens of an image, width]`` of each size as rows."""
    rows = [each.flatten(0, 1) for each in images]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


class Attention(nn.Module):
    """Multi-head attention inside each image."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, rows: Tensor, shapes: Shapes, *, first_only: bool = False) -> Tensor:
        """Updates of all tokens; with ``first_only`` of the first token of each image alone."""
        weight, bias, width = self.in_proj_weight, self.in_proj_bias, rows.shape[1]
        if first_only:
            first = F.linear(first_tokens(rows, shapes), weight[:width], bias[:width])
            keys, values = F.linear(rows, weight[width:], bias[width:]).chunk(2, 1)
            queries = unpack(first, [(images, 1) for images, _ in shapes])
        else:
            joint, keys, values = F.linear(rows, weight, bias).chunk(3, 1)
            queries = unpack(joint, shapes)
        parts = zip(queries, unpack(keys, shapes), unpack(values, shapes), strict=True)
        return self.out_proj(pack([self._attend(*part) for part in parts]))  # type: ignore[no-any-return]

    def _attend(self, *qkv: Tensor) -> Tensor:
        q, k, v = (torch.unflatten(each, 2, (self.heads, -1)).transpose(1, 2) for each in qkv)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def first_tokens(rows: Tensor, shapes: Shapes) -> Tensor:
    """The first token of each image, ``[images, width]``: in CLIP the class token."""
    firsts = [part[:, 0] for part in unpack(rows, shapes)]
    return firsts[0].contiguous() if len(firsts) == 1 else torch.cat(firsts)


class Perceptron(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        """Rows ``[tokens, width]`` to rows of the same shape."""
        first, second = self.c_fc, self.c_proj
        if self.activation != QUICK_GELU:
            return second(F.gelu(first(rows), approximate=APPROXIMATIONS[self.activation]))  # type: ignore[no-any-return]
        # x sigmoid(1.702 x) = silu(1.702 x) / 1.702: one operation instead of three, as the products do the scaling.
        hidden = torch.addmm(1.702 * first.bias, rows, first.weight.T, alpha=1.702)
        hidden = F.silu(hidden, inplace=not hidden.requires_grad)
        return torch.addmm(second.bias, hidden, second.weight.T, alpha=1 / 1.702)


class AddNorm(nn.Module):
    """Adds an update to tokens and normalises the sum (LayerNorm); returns both."""

    compiled = False
    """Compute both by one compiled kernel, where no gradients are needed."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, rows: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum and its normalisation; without an update the rows and theirs."""
        if update is None:
            return rows, F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)
        arguments = rows, update, self.weight, self.bias, self.eps
        if not (self.compiled and rows.is_cuda) or rows.requires_grad or self.weight.requires_grad:
            return add_norm(*arguments)
        with torch.no_grad():
            result: tuple[Tensor, Tensor] = compiled_add_norm()(*arguments)
        return result


def add_norm(rows: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :class:`AddNorm`."""
    rows = rows + update
    return rows, F.layer_norm(rows, weight.shape, weight, bias, eps)


@cache
def compiled_add_norm() -> Any:
    """:func:`add_norm`, compiled for a type of numbers when it is first met."""
    return torch.compile(add_norm)


@cache
def can_compile() -> bool:
    """Compile a small layer for the GPU, once per process; a machine without a C compiler says what it lacks."""
    if not torch.cuda.is_available():
        return False
    rows = torch.zeros(2, 8, device="cuda")
    try:
        compiled_add_norm()(rows, rows, rows[0], rows[0], 1e-5)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of PyTorch's compilers
        warnings.warn(f"layers are not compiled, which costs a tenth of the speed: {first_line(error)}", stacklevel=3)
        return False
    return True
