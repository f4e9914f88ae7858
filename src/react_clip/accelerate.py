"""Acceleration for those who ask for it: CUDA graphs of small batches, Triton kernels, torch.compile.

An encoder computes through a :class:`Backend`. The plain one runs PyTorch operation by operation and compiles nothing.
``load(..., compile=True)`` and :meth:`Encoder.accelerate` put an :class:`AcceleratedBackend` in its place, and
``compile="tower"`` compiles the whole tower too, as a :class:`CompiledFunction`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from react_clip import noise

MAX_ROWS = 128
"""Images in the largest batch that gets a CUDA graph; larger ones keep a GPU busy by themselves."""

_WARM_UPS = 3
"""Calls before a graph is recorded: libraries choose their kernels in the first ones."""
_BLOCK = 512
"""Pairs of pixels that one program of the noise kernel computes."""


class Backend:
    """Plain PyTorch."""

    def __call__(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """``function(*tensors)``; rows of the tensors and of the result are images."""
        return function(*tensors)

    def records(self, rows: int, *tensors: Tensor) -> bool:
        """True if a call with ``rows`` rows of these tensors runs as a CUDA graph."""
        return False

    def noisy_view(self, pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
        """See :func:`react_clip.noise.noisy_view`."""
        return noise.noisy_view(pixels, keys, sigma)

    def reset(self) -> None:
        """Drop what was recorded; the encoder calls it when its weights move."""


class AcceleratedBackend(Backend):
    """CUDA graphs for batches of at most ``max_rows`` images, and one Triton kernel for noisy views.

    A tower has a few hundred kernels, and launching them takes the host longer than a GPU takes for one image. A graph
    launches all of them at once. Graphs have fixed shapes, so each batch size is recorded when it is first met; sizes
    are not padded, so results have the bits that they have without graphs.

    Elsewhere than on a GPU, with gradients, in double precision and without Triton everything runs as in
    :class:`Backend`.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._pool: Any = None
        self._lock = Lock()
        self._recording = False

    def __call__(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """``function(*tensors)`` by a CUDA graph where the batch is small.

        ``function`` must be pure, hashable and free of host synchronisation, and what it reads beside its arguments
        (weights) must stay where it is: a graph holds addresses. Callers on a stream of their own get no graph, since
        all graphs share one set of buffers in the order of the default stream.
        """
        first = tensors[0]
        if self._recording or not self.records(len(first), *tensors):
            return function(*tensors)
        key = (function, first.device, *((tensor.shape, tensor.dtype) for tensor in tensors))
        with self._lock, torch.cuda.device(first.device), torch.no_grad():
            if key not in self._recordings:
                self._recording = True
                try:
                    self._recordings[key] = self._record(function, tensors)
                finally:
                    self._recording = False
            recording = self._recordings[key]
            for buffer, tensor in zip(recording.inputs, tensors, strict=True):
                buffer.copy_(tensor)
            recording.graph.replay()
            return recording.output.clone()

    def records(self, rows: int, *tensors: Tensor) -> bool:
        """True for at most ``max_rows`` rows on the default stream of a GPU, without gradients.

        Functions that call each other become one graph: calls from one that is being recorded are part of it.
        """
        device = tensors[0].device
        suits = _runs_without_gradients(*tensors) and 0 < rows <= self._max_rows
        return suits and (self._recording or torch.cuda.current_stream(device) == torch.cuda.default_stream(device))

    def noisy_view(self, pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
        """Noisy views by one kernel; they equal those of :func:`react_clip.noise.noisy_view` up to rounding."""
        suits = pixels.dtype == torch.float32 and _runs_without_gradients(pixels, sigma)
        if not suits or not kernels_work(pixels.device):
            return noise.noisy_view(pixels, keys, sigma)
        return kernel_noisy_view(pixels, keys, sigma)

    def reset(self) -> None:
        """Drop all graphs."""
        with self._lock:
            self._recordings.clear()
            self._buffers.clear()
            self._pool = None

    def _record(self, function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> _Recording:
        inputs = tuple(self._buffer(("input", position), tensor) for position, tensor in enumerate(tensors))
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer.copy_(tensor)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                result = function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        output = self._buffer(("output",), result)
        del result
        graph: Any = torch.cuda.CUDAGraph()
        # Thread-local, because other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output.copy_(function(*inputs))
        self._pool = graph.pool()
        return _Recording(graph, inputs, output)

    def _buffer(self, role: tuple[Any, ...], like: Tensor) -> Tensor:
        """A buffer shaped like a tensor; all batch sizes share its memory, because graphs run one after the other."""
        key = (*role, like.device, like.dtype, like.shape[1:])
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(self._max_rows, *like.shape[1:])
        return self._buffers[key][: len(like)]


@dataclass(frozen=True, eq=False)
class _Recording:
    graph: Any
    inputs: tuple[Tensor, ...]
    output: Tensor


def _runs_without_gradients(*tensors: Tensor) -> bool:
    return tensors[0].is_cuda and tensors[0].dtype != torch.float64 and not _needs_gradients(*tensors)


def _needs_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class CompiledFunction:
    """A function of pixels ``[B, 3, S, S]`` through ``torch.compile``: one compilation per image size, for every B.

    Everything else that torch.compile would compile again for is the same in every call: dtype, memory layout, offset
    in memory, grad mode and inference mode. It treats a batch of one as a constant, so a single image is computed
    twice, which takes a GPU no longer; on a CPU it runs uncompiled. So do gradients and double precision.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._compiled: dict[tuple[Any, ...], Callable[[Tensor], Tensor]] = {}

    def __call__(self, pixels: Tensor) -> Tensor:
        """``function(pixels)``, compiled."""
        single = pixels.shape[0] == 1
        if _needs_gradients(pixels) or pixels.dtype == torch.float64 or (single and not pixels.is_cuda):
            return self._function(pixels)
        with torch.inference_mode(False), torch.no_grad():
            rows = pixels.expand(2, -1, -1, -1) if single else pixels
            rows = rows.detach().float().contiguous()
            rows = rows.clone() if rows.is_inference() or rows.storage_offset() else rows
            torch._dynamo.mark_dynamic(rows, 0)
            features = self._of(rows)(rows)
            return features[:1] if single else features

    def reset(self) -> None:
        """Drop what was compiled."""
        self._compiled.clear()

    def _of(self, rows: Tensor) -> Callable[[Tensor], Tensor]:
        key = (rows.device, rows.shape[1:])
        if key not in self._compiled:
            function = self._function

            def compute(pixels: Tensor) -> Tensor:
                return function(pixels)

            # torch.compile allows a code object a few compilations, so every size gets one of its own.
            code = compute.__code__.replace()
            own = FunctionType(code, compute.__globals__, closure=compute.__closure__)
            self._compiled[key] = torch.compile(own)
        return self._compiled[key]


# ---------------------------------------------------------------------- Triton kernels


@cache
def kernels_work(device: torch.device) -> bool:
    """Compile the noise kernel for a device, once per process; false without a GPU, Triton or a C compiler."""
    if device.type != "cuda":
        return False
    try:
        kernel_noisy_view(torch.zeros(1, 3, 4, 4, device=device), *torch.zeros(2, 1, device=device).long())
    except Exception:  # a missing compiler shows itself in a dozen ways
        return False
    return True


def kernel_noisy_view(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    """:func:`react_clip.noise.noisy_view` of fp32 pixels on a GPU, in one pass over the memory."""
    pixels = pixels.contiguous()
    views, numbers = torch.empty_like(pixels), pixels[:1].numel()
    pairs = (numbers + 1) // 2
    if numbers:
        grid = (len(pixels), -(-pairs // _BLOCK))
        # Copies start at aligned addresses, for which the kernel is compiled. Without fused multiply-add every
        # operation rounds as PyTorch's does.
        tensors = pixels, keys.clone(), sigma.float().clone(), views
        with torch.cuda.device(pixels.device):
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


def _suit_kernels(*tensors: Tensor) -> bool:
    """True on a GPU that runs our kernels, without gradients and outside torch.compile, if rows follow each other."""
    suits = _runs_without_gradients(*tensors) and not torch.compiler.is_compiling()
    return suits and all(tensor.is_contiguous() for tensor in tensors) and kernels_work(tensors[0].device)


def fuse_operations(tower: nn.Module) -> None:
    """Replace the QuickGELUs of a tower (ours, transformers' or open_clip's), and let our :class:`AddNorm` be fused."""
    for parent in [module for module in tower.modules() if not isinstance(module, FusedQuickGELU)]:
        if isinstance(parent, AddNorm):
            parent.fused = True
        for name, child in list(parent.named_children()):
            if type(child).__name__ in ("QuickGELU", "QuickGELUActivation"):
                setattr(parent, name, FusedQuickGELU(child))


class FusedQuickGELU(nn.Module):
    """x sigmoid(1.702 x), on a GPU by one kernel instead of three, with the same roundings; elsewhere by ``plain``."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, hidden: Tensor) -> Tensor:
        """The activation of a tensor of any shape."""
        if not _suit_kernels(hidden):
            activated: Tensor = self.plain(hidden)
            return activated
        result, numbers = torch.empty_like(hidden), hidden.numel()
        with torch.cuda.device(hidden.device):
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
        return self.fused and half and alike and _suit_kernels(*tensors)

    def _fused(self, tokens: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        total, normalised, width = torch.empty_like(tokens), torch.empty_like(tokens), len(self.weight)
        tensors = tokens, update, self.weight, self.bias, total, normalised
        with torch.cuda.device(tokens.device):
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
