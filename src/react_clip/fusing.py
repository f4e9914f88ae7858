"""Pure functions of tensors as one kernel: compiled where that pays, compared with the function, then trusted."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_ON = {"cuda"}
_FROM = 2**23
"""Elements (55 images of 224 pixels) from which a kernel pays for the seconds that the compiler takes once."""
_ERROR = 1e-6
"""Most that a kernel may differ: a multiply-add rounds once where two operations round twice."""

TensorFunction = Callable[..., Tensor]

_allowed: ContextVar[bool] = ContextVar("fusing allowed", default=True)
_at_hand: ContextVar[int] = ContextVar("elements at hand", default=0)


@contextmanager
def part_of(batch: Tensor) -> Iterator[None]:
    """Within this block a few images of a large batch count as large too.

    A GPU is done with a few images before the host has asked for two dozen operations. What decides is the batch, not
    whether a kernel happens to be there, so that a call gives the same bits whatever came before it.
    """
    token = _at_hand.set(batch.numel())
    try:
        yield
    finally:
        _at_hand.reset(token)


@contextmanager
def unfused() -> Iterator[None]:
    """Within this block every function runs as it is written, for those who count or compare its operations."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def fused(by_number: TensorFunction) -> Callable[[TensorFunction], TensorFunction]:
    """A pure function of tensors, one row an image, that runs as one kernel where that pays: on a GPU's large batches.

    ``by_number`` is the same function in a form that a compiler makes one kernel of, every number of the result on its
    own. The first such call compiles it and compares the two; without a compiler, or if they differ, the function stays
    as it is for the rest of the process. Images on their own, which would have to be compiled for anew, and calls that
    need gradients are never fused.

    >>> double = fused(lambda x: 2.0 * x)(lambda x: x + x)
    >>> double(torch.tensor([1.0]))
    tensor([2.])
    """

    def decorate(function: TensorFunction) -> TensorFunction:
        kernels: dict[torch.Size, TensorFunction] = {}
        trusted = True

        @functools.wraps(function)
        def call(*tensors: Tensor) -> Tensor:
            nonlocal trusted
            if not trusted or not pays(tensors):
                return function(*tensors)
            shape = tensors[0].shape[1:]
            try:
                if shape in kernels:
                    return kernels[shape](*tensors)
                kernel: TensorFunction = torch.compile(by_number, fullgraph=True)
                result = kernel(*any_number_of_images(tensors))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a missing compiler shows itself in a dozen ways
                trusted = False
                return function(*tensors)
            expected = function(*tensors)
            trusted, kernels[shape] = _agree(result, expected), kernel
            return result if trusted else expected

        return call

    return decorate


def any_number_of_images(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tell the compiler that nothing but the number of images varies: kernels are slow at dividing by unknown sizes."""
    import torch._dynamo

    for tensor in tensors:
        if len(tensor) == len(tensors[0]):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def pays(tensors: tuple[Tensor, ...], count: int | None = None) -> bool:
    """Whether a function of so many rows of these tensors (all, by default) runs as one kernel here."""
    first = tensors[0]
    rows = len(first) if count is None else count
    if not _allowed.get() or first.device.type not in _ON or first.dtype != torch.float32 or rows < 2:
        return False
    if max(rows * math.prod(first.shape[1:]), _at_hand.get()) < _FROM:
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def _agree(result: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(result, expected)
    return torch.allclose(result, expected, rtol=_ERROR, atol=_ERROR)
