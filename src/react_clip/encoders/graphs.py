"""CUDA graphs for small batches: a GPU is done with a few images before Python has asked it for the next kernel.

A tower has a few hundred kernels, and asking for each of them takes the host longer than one image takes the GPU. A
graph records them once and asks once. Graphs have fixed shapes, so there is one for every batch size, recorded when it
is first met; sizes are not padded, so that features keep the bits they have without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

LARGEST = 32
"""Images in the largest batch that is worth a graph; larger ones keep a GPU busy by themselves."""

_WARM_UPS = 3
"""Libraries choose their kernels in the first calls, which must not be recorded."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    graph: Any
    given: Tensor
    found: Tensor


class Graphs:
    """``run`` as it is, but recorded: one graph for every batch size up to ``largest``.

    Nobody else may move or replace what ``run`` reads: a graph holds addresses. Threads take turns on the device's
    default stream, so all graphs work in the same memory; whoever works on a stream of his own gets ``run`` as it is.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], largest: int = LARGEST) -> None:
        self._run, self._largest = run, largest
        self._recorded: dict[tuple[int, torch.device], _Recorded] = {}
        self._memory: Any = None
        self._lock = Lock()

    def suit(self, batch: Tensor) -> bool:
        """Whether this batch may be answered by a graph: few images on a GPU, in fp32, and no gradient wanted."""
        return (
            batch.is_cuda
            and len(batch) <= self._largest
            and batch.dtype == torch.float32
            and not (batch.requires_grad and torch.is_grad_enabled())
            and torch.cuda.current_stream(batch.device) == torch.cuda.default_stream(batch.device)
        )

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> Tensor:
        """What ``run`` would return."""
        with self._lock, torch.cuda.device(batch.device):
            key = (len(batch), batch.device)
            if key not in self._recorded:
                self._recorded[key] = self._record(batch)
            kept = self._recorded[key]
            kept.given.copy_(batch)
            kept.graph.replay()
            return kept.found.clone()

    def forget(self) -> None:
        """Record anew from now on; for whoever has moved the weights."""
        with self._lock:
            self._recorded.clear()
            self._memory = None

    def _record(self, batch: Tensor) -> _Recorded:
        given = batch.detach().clone(memory_format=torch.contiguous_format)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._run(given)
        torch.cuda.current_stream().wait_stream(aside)
        graph: Any = torch.cuda.CUDAGraph()
        # Other threads may work on the GPU meanwhile: only what this one does must be fit for a graph.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            found = self._run(given)
        self._memory = graph.pool()
        return _Recorded(graph, given, found)
