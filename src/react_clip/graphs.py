"""CUDA graphs for small batches: a GPU is done with a few images before Python has asked it for the next kernel.

A tower has a few hundred kernels, an augmented view a few dozen, and asking for each of them takes the host longer than
one image takes the GPU. A graph records them once and asks once. Graphs have fixed shapes, so there is one for every
batch size, recorded when it is first met; sizes are not padded, so that results keep the bits they have without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

LARGEST = 64
"""Images in the largest batch that is worth a graph; much larger ones keep a GPU busy by themselves."""

_WARM_UPS = 3
"""Libraries choose their kernels in the first calls, which must not be recorded."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    graph: Any
    given: tuple[Tensor, ...]
    found: tuple[Tensor, ...]


class Graphs:
    """``run`` as it is, but recorded: one graph for every number of rows up to ``largest``.

    ``run`` makes tensors of tensors, whose rows are images, and waits for nothing. Nobody else may move or replace what
    it reads beside them: a graph holds addresses. Threads take turns on the device's default stream, so all graphs work
    in the same memory; whoever works on a stream of his own gets ``run`` as it is.
    """

    def __init__(self, run: Callable[..., tuple[Tensor, ...]], largest: int = LARGEST) -> None:
        self._run, self._largest = run, largest
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._memory: Any = None
        self._lock = Lock()

    def suit(self, *tensors: Tensor, count: int | None = None) -> bool:
        """Whether so many rows (all, by default) may be answered by a graph: few, on a GPU, without gradients."""
        first = tensors[0]
        return (
            first.is_cuda
            and 0 < (len(first) if count is None else count) <= self._largest
            and first.dtype != torch.float64  # for whoever needs that, every operation counts
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
            and torch.cuda.current_stream(first.device) == torch.cuda.default_stream(first.device)
        )

    @torch.no_grad()
    def __call__(self, *tensors: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """What ``run`` would return for these tensors, or for these rows of them."""
        first = tensors[0]
        count = len(first) if rows is None else len(rows)
        with self._lock, torch.cuda.device(first.device):
            key = (count, first.device, *((tensor.shape[1:], tensor.dtype) for tensor in tensors))
            if key not in self._recorded:
                self._recorded[key] = self._record(tuple(t[:count] if rows is None else t[rows] for t in tensors), key)
            kept = self._recorded[key]
            for given, tensor in zip(kept.given, tensors, strict=True):
                if rows is None:
                    given.copy_(tensor)
                else:
                    torch.index_select(tensor, 0, rows, out=given)
            kept.graph.replay()
            return tuple(found.clone() for found in kept.found)

    def forget(self) -> None:
        """Record anew from now on; for whoever has moved the weights."""
        with self._lock:
            self._recorded.clear()
            self._buffers.clear()
            self._memory = None

    def _record(self, tensors: tuple[Tensor, ...], key: tuple[Any, ...]) -> _Recorded:
        given = tuple(self._buffer(("given", place, *key[1:]), tensor, key[0]) for place, tensor in enumerate(tensors))
        for mine, tensor in zip(given, tensors, strict=True):
            mine.copy_(tensor)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                result = self._run(*given)
        torch.cuda.current_stream().wait_stream(aside)
        found = tuple(self._buffer(("found", place, *key[1:]), tensor, key[0]) for place, tensor in enumerate(result))
        del result
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may work on the GPU meanwhile: only what this one does must be fit for a graph.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            for kept, tensor in zip(found, self._run(*given), strict=True):
                kept.copy_(tensor)
        self._memory = graph.pool()
        return _Recorded(graph, given, found)

    def _buffer(self, key: tuple[Any, ...], like: Tensor, count: int) -> Tensor:
        """Where a tensor of so many images lies: one place for all numbers of them, because one graph is at work."""
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(like.numel() // count * self._largest)
        return self._buffers[key][: like.numel()].view(like.shape)
