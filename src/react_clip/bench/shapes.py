"""Encoders of a known architecture with random weights: as fast as the real one, and good for nothing else."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from react_clip.encoders.base import Encoder, resolve_device, resolve_dtype
from react_clip.encoders.hf import HFEncoder
from react_clip.errors import ReactClipError

_START, _END, _CONTEXT = 49406, 49407, 77


@dataclass(frozen=True)
class Shape:
    """Sizes of both towers; every other number is CLIP's own."""

    patch: int
    image_size: int = 224
    width: int = 768
    layers: int = 12
    heads: int = 12
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    dim: int = 512


SHAPES = {"ViT-B-32": Shape(patch=32), "ViT-B-16": Shape(patch=16)}


def random_encoder(name: str, *, device: str | None = None, dtype: str = "fp32", seed: int = 0) -> Encoder:
    """A complete CLIP of these shapes, its weights drawn at random. Speed is all that it can tell.

    >>> random_encoder("ViT-Z-1")
    Traceback (most recent call last):
    react_clip.errors.ReactClipError: no shapes are called 'ViT-Z-1'; choose one of ViT-B-32, ViT-B-16
    """
    if name not in SHAPES:
        raise ReactClipError(f"no shapes are called {name!r}; choose one of {', '.join(SHAPES)}")
    shape = SHAPES[name]
    where, precision = resolve_device(device), resolve_dtype(dtype)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
        torch.manual_seed(seed)
        model = _model(shape)
    return HFEncoder(
        model.to(dtype=precision),
        name=f"{name} shapes, random weights",
        tokenizer=_Words(),
        image_size=shape.image_size,
        dim=shape.dim,
    ).to(where)


def _model(shape: Shape) -> Any:
    from transformers import CLIPConfig, CLIPModel

    vision = {
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "image_size": shape.image_size,
        "patch_size": shape.patch,
    }
    text = {
        "hidden_size": shape.text_width,
        "intermediate_size": 4 * shape.text_width,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "vocab_size": _END + 1,
        "max_position_embeddings": _CONTEXT,
        "bos_token_id": _START,
        "eos_token_id": _END,
        "pad_token_id": _END,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=shape.dim))


class _Words:
    """A token a word, whichever: random weights understand none, and prompts come out about as long as they are."""

    def __call__(self, prompts: list[str], *, max_length: int, **_: object) -> Any:
        from transformers import BatchEncoding

        rows = [[_START, *map(_token, prompt.split()[: max_length - 2]), _END] for prompt in prompts]
        longest = max(map(len, rows))
        padded = [row + [_END] * (longest - len(row)) for row in rows]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        return BatchEncoding({"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)})


def _token(word: str) -> int:
    return zlib.crc32(word.encode()) % _START
