"""Memory and host synchronisations of a call, and the limits of the machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from react_clip.encoders.base import Encoder

# ------------------------------------------------------------------ memory


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors alive at once during ``call``, beyond those that were alive before it.

    Exact on every machine: CUDA's allocator keeps a peak, and on a CPU the profiler reports every allocation of torch.
    Resident pages of the process would depend on the C allocator and on when they are looked at.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints a line for every start otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))


# ------------------------------------------------------------------ host synchronisations

# Operators whose result the host must read before it can go on.
_READING_OPS = {
    *("nonzero", "_local_scalar_dense", "masked_select", "equal"),
    *("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"),
}
_INDEXING_OPS = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Calls that copy between host and device and wait for it; on a CPU they reach no operator.
_READING_CALLS = {"cpu", "tolist"}
_SENDING_CALLS = {"tensor", "as_tensor", "new_tensor"}


def host_syncs(call: Callable[[], object]) -> list[str]:
    """The operations of ``call`` at which the host would wait for a CUDA device, in order.

    Counted from the calls alone, so the result is the same on a machine without a GPU. Three kinds: values read back
    (``item``, ``nonzero``, masks as indices, ``cpu``), tensors made on the device from Python numbers, and tensor
    constants of our modules moved there. Not counted: inputs that the call itself moves, and non-blocking copies (but
    reading their values is).

    >>> host_syncs(lambda: torch.arange(4).nonzero().flatten().sum().item())
    ['nonzero', '_local_scalar_dense']
    >>> x = torch.arange(4)
    >>> host_syncs(lambda: (x[x > 1], torch.where(x > 1, x, 0), x.tolist(), x.new_tensor([1, 2])))
    ['index', 'tolist', 'new_tensor']
    """
    seen: list[str] = []
    with _Operators(seen), _Calls(seen):
        call()
    return seen


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators that read a value back."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING_OPS and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # With a tensor of repeats the size of the result is their sum.
        by_repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READING_OPS or by_mask or (by_repeats and func._overloadname == "Tensor"):
            self._seen.append(name)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Records calls that copy between host and device."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen
        modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "react_clip"]
        self._constants = {
            id(value) for module in modules for value in vars(module).values() if isinstance(value, Tensor)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        sent = name in _SENDING_CALLS and (name == "new_tensor" or kwargs.get("device") is not None)
        if name == "to":
            to_host = "cpu" in (*(arg for arg in args[1:2] if isinstance(arg, str)), kwargs.get("device"))
            sent = (bool(args) and id(args[0]) in self._constants) or (to_host and not kwargs.get("non_blocking"))
        if name in _READING_CALLS or sent:
            self._seen.append(name)
        return func(*args, **kwargs)


# ------------------------------------------------------------------ limits of the machine

_TRIES = 5
MATRIX_SIDE = {"cuda": 8192, "cpu": 2048}
"""Sides of the square matrices whose product is timed."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""More than any cache holds."""


@dataclass(frozen=True)
class Roofline:
    """A pass takes at least ``pass_flops / matmul_flops`` seconds, a call at least ``weight_bytes / memory_bytes``."""

    pass_flops: float
    """Floating-point operations of one pass, a multiply-add counted as two."""
    weight_bytes: int
    """Size of the image tower, which every encoder call reads once."""
    matmul_flops: float
    """Operations per second in the best of a few large matrix products of the encoder's dtype."""
    memory_bytes: float
    """Bytes per second, read and written, in the best of a few large copies."""


def roofline(encoder: Encoder) -> Roofline:
    """Count the encoder's work and measure the limits of its device."""
    device, dtype = encoder.device, encoder.dtype
    kind = "cuda" if device.type == "cuda" else "cpu"
    side, size = MATRIX_SIDE[kind], COPIED_BYTES[kind]
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Roofline(
        pass_flops=pass_flops(encoder),
        weight_bytes=_image_tower_bytes(encoder),
        matmul_flops=2.0 * side**3 / _best_seconds(lambda: matrix @ matrix, device),
        memory_bytes=2.0 * size / _best_seconds(lambda: target.copy_(source), device),
    )


def pass_flops(encoder: Encoder) -> float:
    """Floating-point operations of the matrix products, convolutions and attention of one pass."""
    size = encoder.image_size
    # CUDA graphs do not take float64, and recording one would count the tower several times.
    image = torch.full((1, 3, size, size), 0.5, device=encoder.device, dtype=torch.float64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder.encode_views(image)
    return float(counter.get_total_flops())


def _image_tower_bytes(encoder: Encoder) -> int:
    named = list(encoder.tower.named_parameters())
    # transformers and open_clip call image towers so; other towers are image towers as a whole.
    image = [weight for name, weight in named if name.startswith(("vision", "visual"))]
    return sum(weight.numel() * weight.element_size() for weight in image or [weight for _, weight in named])


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of a call, including the work that it leaves to a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    return min(seconds_of(call, device) for _ in range(_TRIES))
