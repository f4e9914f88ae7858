"""Key layouts of CLIP image towers: OpenAI's (open_clip's too) and Hugging Face's, converted in both directions.

The common tongue is OpenAI's layout without the ``visual.`` prefix. It differs from Hugging Face's in names, in the
query, key and value matrices (one block here, three there) and in the projection, which is stored transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = dict[str, Tensor]

PROJECTION = "visual_projection.weight"
"""Hugging Face's name for what OpenAI calls ``proj``."""

_NAMES = (
    ("class_embedding", "vision_model.embeddings.class_embedding"),
    ("positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("conv1.", "vision_model.embeddings.patch_embedding."),
    ("ln_pre.", "vision_model.pre_layrnorm."),
    ("ln_post.", "vision_model.post_layernorm."),
    ("transformer.resblocks.", "vision_model.encoder.layers."),
)
_BLOCK_NAMES = (
    (".attn.out_proj.", ".self_attn.out_proj."),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)
_MERGED = re.compile(r"(.+)\.attn\.in_proj_(weight|bias)")
_SPLIT = re.compile(r"(.+)\.self_attn\.([qkv])_proj\.(weight|bias)")


def to_hf(state: Mapping[str, Tensor]) -> State:
    """From OpenAI's keys to Hugging Face's; a key that no CLIP vision transformer has stays as it is.

    >>> sorted(to_hf({"proj": torch.zeros(4, 2), "transformer.resblocks.0.attn.in_proj_bias": torch.zeros(6)}))[:2]
    ['vision_model.encoder.layers.0.self_attn.k_proj.bias', 'vision_model.encoder.layers.0.self_attn.q_proj.bias']
    """
    renamed: State = {}
    for key, tensor in state.items():
        if key == "proj":
            renamed[PROJECTION] = tensor.T
        elif merged := _MERGED.fullmatch(key):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                renamed[_hf_name(f"{merged[1]}.self_attn.{letter}_proj.{merged[2]}")] = part
        else:
            renamed[_hf_name(key)] = tensor
    return renamed


def to_openai(state: Mapping[str, Tensor]) -> State:
    """From Hugging Face's keys to OpenAI's; the inverse of :func:`to_hf`.

    >>> state = {"conv1.weight": torch.rand(1, 3, 2, 2), "proj": torch.rand(4, 2)}
    >>> to_openai(to_hf(state)).keys() == state.keys()
    True
    """
    renamed: State = {}
    for key, tensor in state.items():
        if key == PROJECTION:
            renamed["proj"] = tensor.T
        elif split := _SPLIT.fullmatch(key):
            block, letter, kind = split.groups()
            if letter == "q":
                parts = [state[f"{block}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
                renamed[_openai_name(f"{block}.attn.in_proj_{kind}")] = torch.cat(parts)
        else:
            renamed[_openai_name(key)] = tensor
    return renamed


def _hf_name(key: str) -> str:
    for openai, hf in _NAMES:
        if key.startswith(openai):
            key = hf + key.removeprefix(openai)
            break
    for openai, hf in _BLOCK_NAMES:
        key = key.replace(openai, hf)
    return key


def _openai_name(key: str) -> str:
    for openai, hf in _NAMES:
        if key.startswith(hf):
            key = openai + key.removeprefix(hf)
            break
    for openai, hf in _BLOCK_NAMES:
        key = key.replace(hf, openai)
    return key
