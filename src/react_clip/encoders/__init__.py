"""Encoders by name: hub ids, ``open_clip:MODEL/PRETRAINED``, folders, the offline ``clip-vit-b-16``, ``BASE+FILE``.

An exported tower is ``onnx:FOLDER``. Other packages add names by entry points of the group ``react_clip.encoders``: a
function of a device and a precision that returns an :class:`Encoder`; ``module:function`` works without an entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from react_clip.config import find_offered
from react_clip.encoders import checkpoints, exported, offline, openclip
from react_clip.encoders.base import Encoder
from react_clip.encoders.hf import load_hf
from react_clip.encoders.loading import resolve_device, resolve_dtype
from react_clip.errors import MissingFileError, ReactClipError

__all__ = ["OPENAI_VIT_B_16", "Encoder", "fastest_dtype", "load", "pull"]

OPENAI_VIT_B_16 = frozenset(
    {
        *(offline.NAME, "openai/clip-vit-base-patch16"),
        *(f"{openclip.PREFIX}ViT-B-16/openai", f"{openclip.PREFIX}ViT-B-16-quickgelu/openai"),
    }
)
"""All names of these weights. On a GPU gates in fp16 agree with those of fp32 for 99.85 % of 2,000 attacked photos and
for 99.95 % of the same photos clean (benchmarks/results/bench/tried.json); in bf16 for 99.05 %: too few."""

GROUP = "react_clip.encoders"
"""Entry points of other packages."""

_WHAT_EXISTS = (
    f"{offline.NAME} (offline), a Hugging Face id such as openai/clip-vit-base-patch32 (optionally @revision), "
    f"{openclip.PREFIX}MODEL/PRETRAINED such as {openclip.PREFIX}ViT-B-32/openai, {openclip.HUB}OWNER/NAME in "
    "open_clip's layout, a folder (in either layout, or written by `react-clip finetune`), BASE+FILE for one of these "
    f"with the image tower of a checkpoint, {exported.PREFIX}FOLDER as `react-clip export` writes it, or "
    "module:function of your own"
)


def load(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "fp32",
    compile: bool = False,
) -> Encoder:
    """Load a CLIP encoder by name.

    Args:
        name: ``"clip-vit-b-16"`` (offline), a hub id (``"openai/clip-vit-base-patch32"``, optionally ``@revision``),
            ``"open_clip:ViT-B-32/openai"``, ``"hf-hub:owner/model"`` in open_clip's layout, a folder in either layout
            or written by ``react-clip finetune``, or any of these with the image tower of a checkpoint:
            ``"clip-vit-b-16+path/to/tecoa.safetensors"``. What ``react-clip export`` wrote is ``"onnx:FOLDER"``; it
            runs on the CPU. An entry point of another package, or ``"module:function"``, is called with the device and
            the precision.
        device: where to run; CUDA if there is one by default.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for the towers, or ``"auto"``: fp16 on a GPU for weights whose gate
            is known to decide there as in fp32, else fp32. Features are fp32 in every case.
        compile: on a GPU, compile layers and record CUDA graphs as they are needed (:meth:`Encoder.accelerate`).
    """
    encoder = _load(name, device, dtype)
    return encoder.accelerate() if compile else encoder


def _load(name: str | Path, device: str | torch.device | None, dtype: str | torch.dtype) -> Encoder:
    text = str(name)
    if text.startswith(exported.PREFIX):
        return exported.load_exported(text, device=device, dtype=dtype)
    chosen_device = resolve_device(device)
    chosen_dtype = fastest_dtype(text, chosen_device) if dtype == "auto" else resolve_dtype(dtype)
    if (parts := checkpoints.split_name(text)) is not None:
        base, checkpoint = parts
        encoder = load(base, device=chosen_device, dtype=chosen_dtype)
        checkpoints.load_tower(encoder, checkpoint)
        encoder.name, encoder.weights = text, f"{encoder.weights}+{checkpoint}"
        return encoder
    if text == offline.NAME:
        return offline.load_offline(device=chosen_device, dtype=chosen_dtype)
    if text.startswith(openclip.PREFIX):
        return openclip.load_open_clip(text, device=chosen_device, dtype=chosen_dtype)
    is_published = (Path(text) / openclip.CONFIG).is_file() and not (Path(text) / "config.json").is_file()
    if text.startswith(openclip.HUB) or is_published:
        source = f"local-dir:{text}" if is_published else text
        return openclip.load_published(source, name=text, device=chosen_device, dtype=chosen_dtype)
    if Path(text).is_dir():
        return load_hf(text, name=text, device=chosen_device, dtype=chosen_dtype)
    if (function := find_offered(GROUP, text, "encoder")) is not None:
        encoder = function(chosen_device, chosen_dtype)
        if not isinstance(encoder, Encoder):
            given = type(encoder).__name__
            raise ReactClipError(f"{text!r} gave a {given}; its function must return a react_clip.Encoder")
        encoder.name = text
        return encoder
    source, revision = _hub_id(name)
    return load_hf(source, name=text, device=chosen_device, dtype=chosen_dtype, revision=revision)


def fastest_dtype(name: str, device: torch.device) -> torch.dtype:
    """The fastest precision in which the gate of these weights is known to decide as in fp32.

    >>> fastest_dtype("clip-vit-b-16", torch.device("cuda")), fastest_dtype("clip-vit-b-16", torch.device("cpu"))
    (torch.float16, torch.float32)
    """
    return torch.float16 if device.type == "cuda" and name in OPENAI_VIT_B_16 else torch.float32


def pull(name: str, *, force: bool = False, say: Callable[[str], None] = lambda line: None) -> str:
    """Fetch a model ahead of time, so that :func:`load` works without a network; returns where it is."""
    if (parts := checkpoints.split_name(name)) is not None:
        return pull(parts[0], force=force, say=say)
    if name == offline.NAME:
        return str(offline.pull(force=force, say=say))
    say(f"fetching {name}")
    load(name, device="cpu")
    return name if Path(name).is_dir() or name.startswith(exported.PREFIX) else "the cache of its library"


def _hub_id(name: str | Path) -> tuple[str, str | None]:
    """Split ``owner/model@revision``; anything else is no name we know."""
    base, plus, file = str(name).partition("+")
    if plus:
        raise ReactClipError(f"{str(name)!r} asks for {base!r} with the checkpoint {file!r}, which is no file here")
    source, _, revision = str(name).partition("@")
    if isinstance(name, Path) or source.count("/") > 1 or source.startswith((".", "/", "~")) or source.endswith("/"):
        raise MissingFileError(f"{name} does not exist; check the path of the model")
    if "/" not in source:
        raise ReactClipError(f"no model is called {str(name)!r} and no such folder exists; choose {_WHAT_EXISTS}")
    return source, revision or None
