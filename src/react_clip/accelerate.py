"""CUDA graphs of small batches: launching the kernels of a tower one by one takes a CPU longer than a GPU computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph, and the memory that it writes."""

    graph: Any
    outputs: Sequence[Tensor]


class Graphs:
    """CUDA graphs of functions, one for each shape of the tensors; threads may share them.

    A shape is computed plainly when it is first met and recorded when it is met again, as long as it is among the last
    ``most`` shapes: shapes that keep changing cost no recordings. The least recently used one goes.

    A function must be pure, hashable and free of host synchronisation. What it reads beside its arguments (weights)
    must stay where it is: pass its addresses as ``state``, so that a graph of other weights is not used.
    """

    input_bytes = 96 * 2**20
    """Bytes of the largest tensors that are recorded: 167 images of 224 pixels. Larger batches keep a GPU busy."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()
        self._buffer: Tensor | None = None
        self._pool: Any = None
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same bound and no graphs."""
        return type(self), (self.most,)

    def take(self, tensors: Sequence[Tensor]) -> bool:
        """True for small tensors on a GPU's default stream, on which the graphs follow each other.

        False inside a function that is being recorded, on a stream of its own: what it calls is part of its graph.
        """
        device = tensors[0].device
        small = device.type == "cuda" and 0 < sum(map(_space, tensors)) <= self.input_bytes
        return small and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)

    def record(self, function: Function, tensors: Sequence[Tensor], state: Hashable = None) -> Sequence[Tensor]:
        """``function(*tensors)`` without gradients: plainly, or by a graph."""
        key = (function, state, *((each.shape, each.dtype, each.device) for each in tensors))
        with self._lock:
            is_new = key not in self._recordings
            if is_new:
                self._remember(key, None)
        if is_new:
            return function(*tensors)
        with self._lock, torch.cuda.device(tensors[0].device), torch.inference_mode(False), torch.no_grad():
            inputs = self._inputs(tensors)
            recording = self._recordings.get(key) or self._record(function, inputs)
            self._remember(key, recording)
            recording.graph.replay()
            return [output.clone() for output in recording.outputs]

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        with self._lock:
            self._recordings.clear()
            self._buffer = self._pool = None

    def _remember(self, key: Hashable, recording: Recording | None) -> None:
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        if len(self._recordings) > self.most:
            _, oldest = self._recordings.popitem(last=False)
            if oldest is not None:
                torch.cuda.synchronize()  # it may still run

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the tensors in the memory that all graphs read: they run one after the other."""
        if self._buffer is None or self._buffer.device != tensors[0].device:
            self._recordings.clear()
            self._buffer = torch.empty(self.input_bytes, dtype=torch.uint8, device=tensors[0].device)
        copies, start = [], 0
        for tensor in tensors:
            place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor))
            start += _space(tensor)
        return copies

    def _record(self, function: Function, inputs: Sequence[Tensor]) -> Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*inputs)  # libraries choose and compile their kernels in the first call
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = function(*inputs)
        self._pool = graph.pool()
        return Recording(graph, outputs)


def _space(tensor: Tensor) -> int:
    """Bytes of a tensor in the buffer, whose parts start at whole 512."""
    return -(-tensor.nbytes // 512) * 512
