"""Encoders by name: hub ids, ``open_clip:MODEL/PRETRAINED``, folders, the offline ``clip-vit-b-16``, ``BASE+FILE``.

Exported towers have names too: ``onnx:FOLDER`` and ``openvino:FOLDER``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from react_clip.encoders import checkpoints, exported, offline, openclip
from react_clip.encoders.base import Encoder, resolve_device, resolve_dtype
from react_clip.encoders.hf import load_hf
from react_clip.errors import ReactClipError

__all__ = ["Encoder", "load", "pull"]

_WHAT_EXISTS = (
    f"{offline.NAME} (offline), a Hugging Face id such as openai/clip-vit-base-patch32 (optionally @revision), "
    f"{openclip.PREFIX}MODEL/PRETRAINED such as {openclip.PREFIX}ViT-B-32/openai, a folder (in Hugging Face "
    "layout, or written by `react-clip finetune`), BASE+FILE for one of these with the image tower of a checkpoint, or "
    "onnx:FOLDER and openvino:FOLDER as `react-clip export` writes them"
)


def load(name: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype = "fp32") -> Encoder:
    """Load a CLIP encoder by name.

    Args:
        name: ``"clip-vit-b-16"`` (offline), a hub id (``"openai/clip-vit-base-patch32"``, optionally ``@revision``),
            ``"open_clip:ViT-B-32/openai"``, a folder in Hugging Face layout or written by ``react-clip finetune``, or
            any of these with the image tower of a checkpoint: ``"clip-vit-b-16+path/to/tecoa.safetensors"``. What
            ``react-clip export`` wrote is ``"onnx:FOLDER"`` or ``"openvino:FOLDER"``; it runs on the CPU.
        device: where to run; CUDA if there is one by default.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for the towers. Features are fp32 in every case.
    """
    text = str(name)
    if exported.split_name(text) is not None:
        return exported.load_exported(text, device=device, dtype=dtype)
    chosen_device, chosen_dtype = resolve_device(device), resolve_dtype(dtype)
    if (parts := checkpoints.split_name(text)) is not None:
        base, checkpoint = parts
        encoder = load(base, device=chosen_device, dtype=chosen_dtype)
        checkpoints.load_tower(encoder, checkpoint)
        encoder.name = text
        return encoder
    if text == offline.NAME:
        return offline.load_offline(device=chosen_device, dtype=chosen_dtype)
    if text.startswith(openclip.PREFIX):
        return openclip.load_open_clip(text, device=chosen_device, dtype=chosen_dtype)
    if Path(text).is_dir():
        return load_hf(text, name=text, device=chosen_device, dtype=chosen_dtype)
    source, revision = _hub_id(name)
    return load_hf(source, name=text, device=chosen_device, dtype=chosen_dtype, revision=revision)


def pull(name: str, *, force: bool = False, say: Callable[[str], None] = lambda line: None) -> str:
    """Fetch a model ahead of time, so that :func:`load` works without a network; returns where it is."""
    if (parts := checkpoints.split_name(name)) is not None:
        return pull(parts[0], force=force, say=say)
    if name == offline.NAME:
        return str(offline.pull(force=force, say=say))
    if (written := exported.split_name(name)) is not None:
        load(name)
        return str(written[1])
    if not name.startswith(openclip.PREFIX) and not Path(name).is_dir():
        _hub_id(name)
    say(f"fetching {name}")
    load(name, device="cpu")
    return "the model hub's cache" if not Path(name).is_dir() else name


def _hub_id(name: str | Path) -> tuple[str, str | None]:
    """Split ``owner/model@revision``; anything else is no name we know."""
    base, plus, file = str(name).partition("+")
    if plus:
        raise ReactClipError(f"{str(name)!r} asks for {base!r} with the checkpoint {file!r}, which is no file here")
    source, _, revision = str(name).partition("@")
    if isinstance(name, Path) or source.count("/") != 1 or source.startswith((".", "/", "~")) or source.endswith("/"):
        raise ReactClipError(f"no model is called {str(name)!r} and no such folder exists; choose {_WHAT_EXISTS}")
    return source, revision or None
