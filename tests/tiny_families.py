"""Small random models of the families beside CLIP, written to disk as transformers and open_clip read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

SIZE, PATCH, WIDTH = 64, 8, 32

_TOWER = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {"vocab_size": 64, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SQUARE, _HALF = {"height": SIZE, "width": SIZE}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PATCHES = {"patch_size": PATCH, "max_num_patches": (SIZE // PATCH) ** 2}
_CROP = {"size": {"shortest_edge": SIZE}, "crop_size": _SQUARE, "do_center_crop": True}

PROCESSORS: dict[str, dict[str, Any]] = {
    "siglip": {"image_processor_type": "SiglipImageProcessor", "resample": 3, "size": _SQUARE, **_HALF},
    "siglip2": {"image_processor_type": "Siglip2ImageProcessor", "resample": 2, **_PATCHES, **_HALF},
    "metaclip_2": {"image_processor_type": "CLIPImageProcessor", "resample": 3, **_CROP, **_HALF},
}
"""The preprocessor_config.json of each family of transformers."""

_VIT = {"layers": 2, "width": WIDTH, "patch_size": PATCH, "head_width": 16}
_OPEN_CLIP_TEXT = {"context_length": 77, "vocab_size": 49408, "width": WIDTH, "heads": 2, "layers": 1}
OPEN_CLIP: dict[str, dict[str, Any]] = {
    "sigmoid": {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"},
    "eva": {"timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token", "timm_proj": "linear"},
    "convnext": {"timm_model_name": "convnext_atto", "timm_pool": "", "timm_proj": "linear"},
    "mobileclip": {"timm_model_name": "fastvit_t8", "timm_pool": "avg", "timm_proj": "linear"},
    "resnet": {"layers": [1, 1, 1, 1], "width": 16},
    "vit": _VIT,
    "vit-tanh": {**_VIT, "act_kwargs": {"approximate": "tanh"}},
}
"""The image tower's configuration of each family of open_clip."""


def spread(model: nn.Module) -> None:
    """Larger random weights than the libraries', so that features move with the image."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "position" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter[0].numel() ** 0.5)


def write_hf(folder: Path, family: str) -> Path:
    """A complete model of transformers with a word tokenizer and its preprocessor_config.json."""
    from transformers import AutoConfig, AutoModel

    vision = _TOWER | {"patch_size": PATCH}
    vision |= {"num_patches": (SIZE // PATCH) ** 2} if family == "siglip2" else {"image_size": SIZE}
    shared = {"projection_dim": WIDTH}
    text = _TOWER | _TEXT
    config = AutoConfig.for_model(family, text_config=text | shared, vision_config=vision | shared, **shared)
    model = AutoModel.from_config(config)
    spread(model)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
        if hasattr(model, "logit_bias"):
            model.logit_bias.fill_(-5.0)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "this", "is", "a", "photo", "of", "cat", "dog", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_open_clip(folder: Path, family: str) -> str:
    """Registers a model of a family with open_clip, writes random weights, and returns the name to load it by.

    A name with "siglip" in it would make open_clip fetch that model's tokenizer.
    """
    import open_clip

    name = f"tiny-{family}"
    size = {"eva": 224, "sigmoid": 160}.get(family, SIZE)
    config: dict[str, Any] = {"embed_dim": WIDTH, "vision_cfg": {"image_size": size, **OPEN_CLIP[family]}}
    config["text_cfg"] = _OPEN_CLIP_TEXT
    if family == "sigmoid":
        config |= {"custom_text": True, "init_logit_bias": -10}
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    model = open_clip.create_model(name)
    spread(model)
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / f"{name}.safetensors")
    return f"open_clip:{name}/{folder / name}.safetensors"
