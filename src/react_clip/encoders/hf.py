"""CLIP, MetaCLIP and SigLIP through transformers: a hub id, or a local folder in Hugging Face layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from react_clip.encoders.base import CLIP_MEAN, CLIP_STD, Encoder, read_similarity
from react_clip.encoders.checkpoints import PROJECTION, to_openai
from react_clip.encoders.layers import QUICK_GELU
from react_clip.encoders.loading import check_activation, loading
from react_clip.encoders.text import TextTower
from react_clip.encoders.vision import VisionTower
from react_clip.errors import ReactClipError
from react_clip.preprocess import Preprocessing

CLIP, SIGLIP = ("clip", "clip_vision_model", "metaclip_2"), ("siglip", "siglip2")
"""Families that we load, by the ``model_type`` of a config.json."""

# OpenAI's ViT-B/16, recognised by its class embedding: it must run with QuickGELU whatever a config.json says.
_OPENAI_CLASS_EMBEDDINGS = {"48f61989319f64dd9ad133d0b904de2736297aa691e7729c4f70747cce24f67d"}


class SigLIPTower(nn.ModuleDict):
    """The ``vision_model`` of a ``SiglipModel``, for any size in whole patches: no class token, pooled by attention."""

    def forward(self, normalised: Tensor) -> Tensor:
        """Features of normalised pixels ``[B, 3, S, S]``."""
        features: Tensor = self["vision_model"](normalised, interpolate_pos_encoding=True).pooler_output
        return features


class SigLIP2Tower(nn.ModuleDict):
    """The ``vision_model`` of a ``Siglip2Model`` (NaFlex), which takes patches of any grid; here the grid is square."""

    def forward(self, normalised: Tensor) -> Tensor:
        """Features of normalised pixels ``[B, 3, S, S]``."""
        vision_model: Any = self["vision_model"]
        count, patch = len(normalised), vision_model.config.patch_size
        side = normalised.shape[-1] // patch
        # Patches row by row; in a patch rows, columns, then channels.
        grid = normalised.reshape(count, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        shapes = torch.full((count, 2), side, device=normalised.device)
        mask = torch.ones(count, side * side, dtype=torch.long, device=normalised.device)
        features: Tensor = vision_model(grid.reshape(count, side * side, -1), mask, shapes).pooler_output
        return features


class SigLIPText(TextTower):
    """The text tower of a ``SiglipModel`` or ``Siglip2Model``: always padded to its full length, as in training."""

    padding: bool | str = "max_length"

    def _features(self, prompts: list[str]) -> Tensor:
        features: Tensor = self.model.text_model(input_ids=self._tokenize(prompts)["input_ids"]).pooler_output
        return features

    def _tokenize(self, prompts: list[str]) -> Any:
        length = self.model.text_model.embeddings.position_embedding.num_embeddings
        how = {"padding": self.padding, "truncation": True, "max_length": length, "return_tensors": "pt"}
        return self.tokenizer(prompts, **how).to(self.device)


class HFText(SigLIPText):
    """The text tower of a ``CLIPModel`` or ``MetaClip2Model``: padded to the longest prompt, read at the end token."""

    padding = True

    def _features(self, prompts: list[str]) -> Tensor:
        tokens = self._tokenize(prompts)
        hidden = self.model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        features: Tensor = self.model.text_projection(hidden.pooler_output)
        return features

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :class:`TextTower`."""
        tokens = self._tokenize(list(prompts))
        embedded = self.model.text_model.embeddings.token_embedding(tokens["input_ids"])
        # The end token is the last one that is no padding, whatever its id.
        return embedded, tokens["attention_mask"].sum(1) - 1

    def _embedded_features(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        # The text model takes ids only; its parts have kept their names since transformers 4. Their causal mask comes
        # as `attention_mask`, the one argument that every version adds to the attention weights. Padding needs no mask:
        # it stands behind the end token, which does not attend to it.
        text = self.model.text_model
        count, length, _ = embeddings.shape
        mask = torch.full((length, length), -torch.inf, device=embeddings.device, dtype=embeddings.dtype).triu(1)
        hidden = embeddings + text.embeddings.position_embedding.weight[:length]
        hidden = text.encoder(inputs_embeds=hidden, attention_mask=mask.expand(count, 1, -1, -1)).last_hidden_state
        # Only the end token is read, so only it is normalised.
        pooled = text.final_layer_norm(hidden[torch.arange(count, device=hidden.device), ends])
        features: Tensor = self.model.text_projection(pooled)
        return features


def load_hf(
    source: str, *, name: str, device: torch.device, dtype: torch.dtype, revision: str | None = None
) -> Encoder:
    """Load from a folder or the hub. Safetensors where published, else ``weights_only``."""
    from transformers.utils import logging

    is_folder = Path(source).is_dir()
    if is_folder and not (Path(source) / "config.json").is_file():
        raise ReactClipError(f"{source} has no config.json; a model folder holds config.json and model.safetensors")
    logging.disable_progress_bar()
    try:
        with loading(source if is_folder else name, from_hub=not is_folder):
            model, report, tokenizer, processor = _read(source, name, revision)
    finally:
        logging.enable_progress_bar()
    if missing := sorted(key for key in report["missing_keys"] if not key.endswith("position_ids")):
        raise ReactClipError(f"{name!r} lacks {len(missing)} tensors, {missing[0]} first; the checkpoint is incomplete")
    vision, is_clip = getattr(model.config, "vision_config", model.config), model.config.model_type in CLIP
    if is_clip:
        text_activation = None if tokenizer is None else model.config.text_config.hidden_act
        check_activation(name, vision.hidden_act, text_activation, _expected_activation(source, model))
    text_kind = HFText if is_clip else SigLIPText
    mean, std = (CLIP_MEAN, CLIP_STD) if is_clip else ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    towers = {part: getattr(model, part) for part in ("text_model", "text_projection") if hasattr(model, part)}
    # NaFlex models name the patches of their square grid instead of a size.
    grid = getattr(vision, "num_patches", None)
    size = int(vision.image_size if grid is None else vision.patch_size * math.isqrt(grid))
    encoder = Encoder(
        _image_tower(model, vision, name),
        name=name,
        image_size=size,
        dim=int(model.config.projection_dim if is_clip else vision.hidden_size),
        mean=processor.get("image_mean") or mean,
        std=processor.get("image_std") or std,
        patch_size=int(vision.patch_size),
        class_token=is_clip,
        preprocessing=_preprocessing(name, processor, size),
        similarity=read_similarity(model),
        text=None if tokenizer is None else text_kind(nn.ModuleDict(towers), tokenizer, name),
    )
    return encoder.to(device=device, dtype=dtype)


def _read(source: str, name: str, revision: str | None) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
    """Model, loading report, for a complete CLIP the tokenizer, and what its image processor does."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, CLIPVisionModelWithProjection
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    config = AutoConfig.from_pretrained(source, revision=revision)
    if config.model_type not in (*CLIP, *SIGLIP):
        raise ReactClipError(
            f"{name!r} is a {config.model_type!r} model; react-clip loads CLIP and its relatives "
            f"({', '.join((*CLIP, *SIGLIP))})"
        )
    complete = config.model_type != "clip_vision_model"
    cls = AutoModel if complete else CLIPVisionModelWithProjection
    # The argument for the dtype has had two names; loading in fp32 and casting later works with both.
    model, report = cls.from_pretrained(source, revision=revision, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision) if complete else None
    processor: dict[str, Any] = {}
    if get_image_processor_config(source, revision=revision):  # empty if the model brings none
        processor = AutoImageProcessor.from_pretrained(source, revision=revision).to_dict()
    return model, report, tokenizer, processor


def _image_tower(model: Any, vision: Any, name: str) -> nn.Module:
    """The image tower, which shares the model's weights: ours for CLIP."""
    if (kind := model.config.model_type) in SIGLIP:
        return (SigLIPTower if kind == "siglip" else SigLIP2Tower)({"vision_model": model.vision_model})
    prefixes = ("vision_model.", PROJECTION)
    weights = {key: value.detach() for key, value in model.named_parameters() if key.startswith(prefixes)}
    how = {"heads": vision.num_attention_heads, "activation": vision.hidden_act, "eps": vision.layer_norm_eps}
    if (tower := VisionTower.of(to_openai(weights), **how)) is None:
        raise ReactClipError(f"{name!r} is no vision transformer as CLIP has it; correct its config.json")
    return tower


def _expected_activation(source: str, model: Any) -> str | None:
    embedding = model.vision_model.embeddings.class_embedding.detach().half().cpu().numpy().tobytes()
    known = hashlib.sha256(embedding).hexdigest() in _OPENAI_CLASS_EMBEDDINGS
    return QUICK_GELU if known or source.startswith("openai/clip-") else None


def _preprocessing(name: str, processor: dict[str, Any], image_size: int) -> Preprocessing | None:
    """The preprocessing of an image processor, for square images of this side; ``None`` if it has none."""
    naflex = "max_num_patches" in processor
    usual = Image.Resampling.BILINEAR if naflex else Image.Resampling.BICUBIC
    interpolation = Image.Resampling(processor.get("resample", usual)).name.lower()
    if naflex:  # it keeps the aspect of an image, which a square grid cannot
        return Preprocessing(image_size, image_size, "squash", interpolation)
    size = processor.get("size")
    if size is None or not processor.get("do_resize", True):
        return None
    squash = "shortest_edge" not in size
    side = size.get("shortest_edge", size.get("height"))
    if side is None or (squash and size.get("width") != side):
        raise ReactClipError(f"{name!r} resizes images to {size}; only squares and a shortest edge are supported")
    return Preprocessing(image_size, int(side), "squash" if squash else "shorter", interpolation, rounds_down=True)
