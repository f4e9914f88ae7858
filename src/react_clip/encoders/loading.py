"""Helpers that load models: device and precision by name, quiet libraries, errors, and a check of activations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from react_clip.encoders.layers import ACTIVATIONS, QUICK_GELU
from react_clip.errors import MissingFileError, ReactClipError, first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"fp32" | "bf16" | "fp16"`` or a torch dtype.

    >>> resolve_dtype("bf16")
    torch.bfloat16
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ReactClipError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}, auto")
    return DTYPES[dtype]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ReactClipError(f"device {device!r} is unknown; use cpu, cuda, cuda:0 or mps") from None
    here = {"mps": torch.backends.mps.is_available(), "cuda": torch.cuda.is_available()}
    if not here.get(resolved.type, True):
        raise ReactClipError(f"device {device!r} was asked for, but this machine has none; use cpu")
    return resolved


@contextmanager
def load_quietly(*, from_hub: bool = False) -> Iterator[None]:
    """Silence the log messages of loading libraries (retries, download notices); errors still raise.

    Where the model hub cannot be reached, libraries look in their caches only: they would try for a minute. One thread
    at a time, because all of this is global state of theirs; other loggers of the process stay as they are.
    """
    from huggingface_hub import constants

    with _loading, ExitStack() as undo:
        for logger in map(logging.getLogger, _CHATTY):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL + 1)
        undo.callback(logging.root.removeFilter, _not_from_open_clip)
        logging.root.addFilter(_not_from_open_clip)
        undo.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
        constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE or (from_hub and not _hub_answers())
        yield


def _hub_answers() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined, unused-ignore]

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # its errors are those of an HTTP library that changes with its version
        return False
    return True


_loading = threading.RLock()
_CHATTY = ("transformers", "huggingface_hub", "httpx", "urllib3", "filelock", "onnxscript", "onnx_ir", "torch.onnx")
"""Loggers of the libraries that load and convert models."""


def _not_from_open_clip(record: logging.LogRecord) -> bool:
    """False for what open_clip writes to the root logger."""
    return "open_clip" not in Path(record.pathname).parent.name


@contextmanager
def loading(name: str, *, from_hub: bool) -> Iterator[None]:
    """:func:`load_quietly`; what a library raises becomes one line. ``name`` is a folder or a model of a hub."""
    try:
        with load_quietly(from_hub=from_hub):
            yield
    except ReactClipError:
        raise
    except Exception as error:
        reason = first_line(error)
        if Path(name).is_dir():
            raise ReactClipError(f"{name} cannot be loaded ({reason}); the folder is incomplete or damaged") from None
        if "/" in name and Path(name).parent.is_dir():
            line = f"{name} does not exist, and is no model that can be loaded ({reason}); check the path"
            raise MissingFileError(line) from None
        raise ReactClipError(
            f"{name!r} is no folder here, and as a model of the hub neither cached nor reachable ({reason}); check the "
            f"path, with a network run `react-clip pull {name}`, without one use the offline tower: run "
            "`react-clip pull clip-vit-b-16`"
        ) from None


def check_activation(name: str, image: str, text: str | None, expected: str | None) -> None:
    """Raise if weights would run with another activation than in training, which changes features without an error."""
    if unknown := [each for each in (image, text) if each not in (None, *ACTIVATIONS)]:
        raise ReactClipError(
            f"{name!r} asks for activation {unknown[0]!r}; CLIP towers use one of {', '.join(ACTIVATIONS)}"
        )
    if text not in (None, image):
        raise ReactClipError(
            f"{name!r} has activation {image!r} in the image tower but {text!r} in the text tower; correct its "
            "config.json"
        )
    if expected not in (None, image):
        raise ReactClipError(
            f"{name!r} holds weights trained with {expected!r} but its configuration says {image!r}; set hidden_act to "
            f"{expected!r} (open_clip: choose the {'-quickgelu' if expected == QUICK_GELU else 'plain'} model)"
        )
