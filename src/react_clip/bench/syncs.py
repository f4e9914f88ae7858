"""How often the host waits for the device: counted from the calls alone, so that a machine without a GPU can count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from react_clip.fusing import unfused

# What cannot be answered before the device has finished: the size or the value of its result is read by the host.
_READING_OPS = {
    *("nonzero", "_local_scalar_dense", "masked_select", "equal"),
    *("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"),
}
_INDEXING_OPS = {"index", "index_put", "index_put_", "_index_put_impl_"}
# What moves memory between host and device and waits for it; on a CPU the operators below never see these calls.
_READING_CALLS = {"cpu", "tolist"}
_SENDING_CALLS = {"tensor", "as_tensor", "new_tensor"}


def host_syncs(call: Callable[[], object]) -> list[str]:
    """The operations of ``call`` at which the host would wait for a CUDA device, in their order.

    Three kinds: values read back (``item``, ``nonzero``, masks as indices, ``cpu`` ...), tensors made on the device
    from Python numbers, and constants of our modules moved there: such copies come from pageable memory, and wait too.
    Tensors are taken to live on the device unless they are such constants, so the count is the same without one.
    Inputs that the call itself moves there are not counted: nobody can tell where they came from. A copy that is not
    waited for counts where its values are read.

    >>> host_syncs(lambda: torch.arange(4).nonzero().flatten().sum().item())
    ['nonzero', '_local_scalar_dense']
    >>> x = torch.arange(4)
    >>> host_syncs(lambda: (x[x > 1], torch.where(x > 1, x, 0), x.tolist(), x.new_tensor([1, 2])))
    ['index', 'tolist', 'new_tensor']
    """
    seen: list[str] = []
    # A kernel would be compiled anew to be looked at.
    with unfused(), _Operators(seen), _Calls(seen):
        call()
    return seen


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that read; autograd and Python conveniences are behind us here."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXING_OPS and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # Repeats given as a tensor have a sum that the host must know.
        by_repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READING_OPS or by_mask or (by_repeats and func._overloadname == "Tensor"):
            self._seen.append(name)
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Calls that move memory, which on a CPU move nothing and reach no operator."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen
        self._constants = _module_constants()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        made = name in _SENDING_CALLS and (name == "new_tensor" or kwargs.get("device") is not None)
        if name in _READING_CALLS or made or (name == "to" and (self._sends(args) or _leaves(args, kwargs))):
            self._seen.append(name)
        return func(*args, **kwargs)

    def _sends(self, args: Any) -> bool:
        return bool(args) and id(args[0]) in self._constants


def _leaves(args: Any, kwargs: Any) -> bool:
    """``x.to("cpu")``: the device is named, not taken from another tensor, and the copy is waited for here."""
    if kwargs.get("non_blocking"):
        return False
    return any(isinstance(target, str) and target == "cpu" for target in (*args[1:2], kwargs.get("device")))


def _module_constants() -> set[int]:
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "react_clip"]
    return {id(value) for module in modules for value in vars(module).values() if isinstance(value, Tensor)}
