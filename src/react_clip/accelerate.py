"""Acceleration for those who ask for it: CUDA graphs of small batches, streams and Triton kernels.

An encoder computes through a :class:`Backend`. The plain one runs PyTorch operation by operation and compiles nothing.
``load(..., compile=True)`` and :meth:`Encoder.accelerate` put an :class:`AcceleratedBackend` in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from react_clip import augment, kernels, noise
from react_clip.kernels import needs_gradients, runs_without_gradients, suit_kernels

MAX_ROWS = 144
"""Images in the largest batch that gets a CUDA graph; larger ones keep a GPU busy by themselves."""

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])


class HostCopy:
    """A copy of a tensor on the CPU. A GPU makes it behind its other work while the host goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)
        self._made = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def is_done(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self._made is None or bool(self._made.query())

    def wait(self) -> Tensor:
        """The copy; waits for the GPU, and raises what its work has raised."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy


class Backend:
    """Plain PyTorch."""

    max_rows = 0
    """Images in the largest batch that runs as a CUDA graph. Of views that are smaller than images (``share`` of the
    work) a batch may have as many more."""

    def __call__(
        self,
        function: Callable[..., Result],
        *tensors: Tensor,
        constants: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        share: float = 1.0,
    ) -> Result:
        """``function(*tensors, *constants)``; rows of the tensors and of the result are images.

        ``constants`` are whole tensors, such as the features of all classes. ``rows`` are the indices of the images to
        compute, all by default. ``share`` is the work for a row, as a share of that for a whole image.
        """
        parts = tensors if rows is None else tuple(tensor.index_select(0, rows) for tensor in tensors)
        return function(*parts, *constants)

    def records(self, rows: int, *tensors: Tensor, share: float = 1.0) -> bool:
        """True if a call with ``rows`` rows of these tensors runs as a CUDA graph."""
        return False

    def side_by_side(self, functions: Sequence[Callable[[], Tensor]], like: Tensor) -> list[Tensor]:
        """Results of functions that do not depend on each other; ``like`` is one of the tensors that they read."""
        return [function() for function in functions]

    def noisy_view(self, pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
        """See :func:`react_clip.noise.noisy_view`."""
        return noise.noisy_view(pixels, keys, sigma)

    def normalise(self, pixels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
        """``(pixels - mean) / std`` in a tower's precision."""
        return ((pixels - mean) / std).to(dtype)

    def smaller_copy(self, pixels: Tensor, size: int) -> Tensor:
        """See :func:`react_clip.augment.smaller_copy`."""
        return augment.smaller_copy(pixels, size)

    def moved(self, motion: augment.Motion, pixels: Tensor, streams: Tensor, branch: int, *, hashes: bool) -> Tensor:
        """Images moved by a branch of their streams ``[B]``; with ``hashes`` by seeds, hashed with the pixels."""
        streams = noise.keys_of_seeds(pixels, streams) if hashes else streams
        return motion(pixels, noise.fork(streams, branch))

    def reset(self) -> None:
        """Drop what was recorded; the encoder calls it when its weights move."""


class AcceleratedBackend(Backend):
    """CUDA graphs for batches of at most ``max_rows`` images, and Triton kernels for views.

    A tower has a few hundred kernels, and launching them takes the host longer than a GPU takes for one image. A graph
    launches all of them at once. Graphs have fixed shapes, so each batch size is recorded when it is first met; sizes
    are not padded, so results have the bits that they have without graphs.

    Elsewhere than on a GPU, with gradients, in double precision and without Triton everything runs as in
    :class:`Backend`.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._pool: Any = None
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._lock = Lock()
        self._recording = False

    def __call__(
        self,
        function: Callable[..., Result],
        *tensors: Tensor,
        constants: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        share: float = 1.0,
    ) -> Result:
        """The same by a CUDA graph where the batch is small.

        ``function`` must be pure, hashable and free of host synchronisation, and what it reads beside its arguments
        (weights) must stay where it is: a graph holds addresses. Callers on a stream of their own get no graph, since
        all graphs share one set of buffers in the order of the default stream.
        """
        count, device = len(tensors[0] if rows is None else rows), tensors[0].device
        if self._recording or not self.records(count, *tensors, *constants, share=share):
            return super().__call__(function, *tensors, constants=constants, rows=rows)
        inputs = (*tensors, *constants)
        shapes = [*((count, *each.shape[1:]) for each in tensors), *(tuple(each.shape) for each in constants)]
        key = (function, device, *shapes, *(each.dtype for each in inputs))
        with self._lock, torch.cuda.device(device), torch.no_grad():
            recording = self._recordings.get(key)
            buffers = self._buffers_of("input", inputs, shapes) if recording is None else recording.inputs
            for number, (buffer, tensor) in enumerate(zip(buffers, inputs, strict=True)):
                if rows is not None and number < len(tensors):
                    torch.index_select(tensor, 0, rows, out=buffer)
                else:
                    buffer.copy_(tensor)
            if recording is None:
                self._recording = True
                try:
                    recording = self._recordings[key] = self._record(function, buffers)
                finally:
                    self._recording = False
            recording.graph.replay()
            copies: Any = tuple(output.clone() for output in recording.outputs)
            result: Result = copies if recording.several else copies[0]
            return result

    def records(self, rows: int, *tensors: Tensor, share: float = 1.0) -> bool:
        """True for the work of at most ``max_rows`` images on the default stream of a GPU, without gradients.

        Functions that call each other become one graph: calls from one that is being recorded are part of it.
        """
        device = tensors[0].device
        suits = runs_without_gradients(*tensors) and 0 < rows * share <= self.max_rows
        return suits and (self._recording or torch.cuda.current_stream(device) == torch.cuda.default_stream(device))

    def side_by_side(self, functions: Sequence[Callable[[], Tensor]], like: Tensor) -> list[Tensor]:
        """The same; a GPU computes all but the first on streams of their own, which a graph records as branches.

        Kernels of one stream fill the multiprocessors that the last blocks of another stream's kernel leave idle.
        """
        if not runs_without_gradients(like):
            return super().side_by_side(functions, like)
        main = torch.cuda.current_stream(like.device)
        first, *others = functions
        streams = [self._stream(like.device, number) for number in range(len(others))]
        results = []
        for function, stream in zip(others, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(function())
        result_of_first = first()
        for result, stream in zip(results, streams, strict=True):
            main.wait_stream(stream)
            result.record_stream(main)
        return [result_of_first, *results]

    def noisy_view(self, pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
        """Noisy views by one kernel; they equal those of :func:`react_clip.noise.noisy_view` up to rounding."""
        if not _suits(pixels, sigma):
            return super().noisy_view(pixels, keys, sigma)
        return kernels.noisy_view(pixels, keys, sigma)

    def normalise(self, pixels: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
        """The same numbers by one kernel."""
        if not _suits(pixels):
            return super().normalise(pixels, mean, std, dtype)
        return kernels.normalised(pixels, mean, std, dtype)

    def smaller_copy(self, pixels: Tensor, size: int) -> Tensor:
        """Smaller copies by one kernel; they equal those of :func:`react_clip.augment.smaller_copy` up to rounding."""
        if size >= pixels.shape[-1] or not _suits(pixels):
            return super().smaller_copy(pixels, size)
        return kernels.smaller_copy(pixels, size)

    def moved(self, motion: augment.Motion, pixels: Tensor, streams: Tensor, branch: int, *, hashes: bool) -> Tensor:
        """The same by two kernels, up to rounding."""
        if type(motion) is not augment.Motion or not _suits(pixels):
            return super().moved(motion, pixels, streams, branch, hashes=hashes)
        weights = noise.hash_weights(pixels[0].numel(), pixels.device)
        return kernels.moved(
            *(pixels, streams, kernels.hash_sums(pixels, weights) if hashes else None),
            branch=branch,
            rotation=math.radians(motion.rotation),
            translation=motion.translation,
            scale=motion.scale,
        )

    def reset(self) -> None:
        """Drop all graphs."""
        with self._lock:
            self._recordings.clear()
            self._buffers.clear()
            self._pool = None

    def _record(self, function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor]) -> _Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = function(*inputs)  # libraries choose and compile their kernels in the first call
        torch.cuda.current_stream().wait_stream(stream)
        several = not isinstance(result, Tensor)
        results = _tensors(result)
        outputs = self._buffers_of("output", results, [tuple(each.shape) for each in results])
        del result, results
        graph: Any = torch.cuda.CUDAGraph()
        # Thread-local, because other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            for output, each in zip(outputs, _tensors(function(*inputs)), strict=True):
                output.copy_(each)
        self._pool = graph.pool()
        return _Recording(graph, inputs, outputs, several)

    def _stream(self, device: torch.device, number: int) -> torch.cuda.Stream:
        if (device, number) not in self._streams:
            self._streams[device, number] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device, number]

    def _buffers_of(self, role: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Memory of these shapes, of the dtypes of the tensors. Batches of all sizes share it: graphs run in turn."""
        buffers = []
        for number, (like, (count, *others)) in enumerate(zip(tensors, shapes, strict=True)):
            rows = -(-count // self.max_rows) * self.max_rows
            key = (role, number, like.device, like.dtype, rows, *others)
            if key not in self._buffers:
                self._buffers[key] = like.new_empty(rows, *others)
            buffers.append(self._buffers[key][:count])
        return buffers


@dataclass(frozen=True, eq=False)
class _Recording:
    graph: Any
    inputs: list[Tensor]
    outputs: list[Tensor]
    several: bool
    """True if the function returns a tuple."""


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def _suits(pixels: Tensor, *others: Tensor) -> bool:
    """True if the kernels for views take these pixels."""
    return pixels.dtype == torch.float32 and suit_kernels(pixels) and not needs_gradients(*others)
