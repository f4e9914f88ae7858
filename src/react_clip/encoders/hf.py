"""CLIP, MetaCLIP and SigLIP through transformers: a hub id, or a local folder in Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from react_clip.encoders.base import CLIP_MEAN, CLIP_STD, embed_patches, read_similarity
from react_clip.encoders.checkpoints import image_parameters
from react_clip.encoders.layers import AddNorm
from react_clip.encoders.loading import QUICK_GELU, check_activation, loading_error, quiet_libraries
from react_clip.encoders.text import TextTower
from react_clip.encoders.vision import VisionTower, ViTEncoder
from react_clip.errors import ReactClipError
from react_clip.preprocess import Preprocessing

# OpenAI's ViT-B/16, recognised by its class embedding: it must run with QuickGELU whatever a config.json says.
_OPENAI_CLASS_EMBEDDINGS = {"48f61989319f64dd9ad133d0b904de2736297aa691e7729c4f70747cce24f67d"}


class HFEncoder(ViTEncoder):
    """A ``CLIPModel`` or ``MetaClip2Model`` (both towers), or a ``CLIPVisionModelWithProjection`` (image tower only).

    The towers and projections are called directly instead of ``get_image_features``, whose return type changed between
    transformers 4 and 5; these parts are the same in both.
    """

    def __init__(self, model: nn.Module, *, name: str, tokenizer: Any, **kwargs: Any) -> None:
        config: Any = model.config
        vision = _vision_config(config)
        super().__init__(
            model,
            name=name,
            image_size=_image_size(vision),
            dim=self._dim(config),
            patch_size=int(vision.patch_size),
            text=None if tokenizer is None else self._text_tower(model, tokenizer, name),
            **kwargs,
        )

    @staticmethod
    def _dim(config: Any) -> int:
        return int(config.projection_dim)

    @staticmethod
    def _text_tower(model: nn.Module, tokenizer: Any, name: str) -> TextTower:
        return HFText(model, tokenizer, name)

    def _image_features(self, normalised: Tensor) -> Tensor:
        return self._resized_features(normalised, self._learned_positions())

    def _same_tower(self) -> VisionTower | None:
        vision = _vision_config(self.tower.config)
        if vision.layer_norm_eps != AddNorm.EPS:
            return None
        weights = image_parameters(self)
        return VisionTower.of(weights, heads=vision.num_attention_heads, activation=vision.hidden_act)

    def _learned_positions(self) -> Tensor:
        model: Any = self.tower
        positions: Tensor = model.vision_model.embeddings.position_embedding.weight
        return positions

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        # `interpolate_pos_encoding=True` would give the same, but interpolate in every call.
        model: Any = self.tower
        vision = model.vision_model
        embeddings = vision.embeddings
        tokens = embed_patches(normalised, embeddings.patch_embedding, embeddings.class_embedding)
        tokens = vision.pre_layrnorm(tokens + positions.to(tokens.dtype))
        hidden = vision.encoder(inputs_embeds=tokens).last_hidden_state
        features: Tensor = model.visual_projection(vision.post_layernorm(hidden[:, 0]))
        return features


class SigLIPEncoder(HFEncoder):
    """A ``SiglipModel``: no class token, features pooled by attention."""

    extra_tokens = 0

    @staticmethod
    def _dim(config: Any) -> int:
        return int(config.vision_config.hidden_size)

    @staticmethod
    def _text_tower(model: nn.Module, tokenizer: Any, name: str) -> TextTower:
        return SigLIPText(model, tokenizer, name)

    def _image_features(self, normalised: Tensor) -> Tensor:
        model: Any = self.tower
        features: Tensor = model.vision_model(pixel_values=normalised).pooler_output
        return features

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        model: Any = self.tower
        vision = model.vision_model
        tokens = vision.embeddings.patch_embedding(normalised).flatten(2).transpose(1, 2)
        hidden = vision.encoder(inputs_embeds=tokens + positions.to(tokens.dtype)).last_hidden_state
        features: Tensor = vision.head(vision.post_layernorm(hidden))
        return features


class SigLIP2Encoder(SigLIPEncoder):
    """A ``Siglip2Model`` (NaFlex), which takes patches of any grid; here the grid is square."""

    def _image_features(self, normalised: Tensor) -> Tensor:
        model: Any = self.tower
        count, patch = len(normalised), self.patch_size or 1
        side = normalised.shape[-1] // patch
        # Patches row by row; in a patch rows, columns, then channels.
        grid = normalised.reshape(count, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        shapes = torch.full((count, 2), side, device=normalised.device)
        mask = torch.ones(count, side * side, dtype=torch.long, device=normalised.device)
        features: Tensor = model.vision_model(grid.reshape(count, side * side, -1), mask, shapes).pooler_output
        return features

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        # The model interpolates positions itself, in its own way.
        return self._image_features(normalised)


def _vision_config(config: Any) -> Any:
    """The configuration of the image tower: a part of a complete model's, or all there is."""
    return getattr(config, "vision_config", config)


def _image_size(vision: Any) -> int:
    """Side of the images; NaFlex models name the patches of their square grid instead."""
    if getattr(vision, "num_patches", None) is not None:
        return int(vision.patch_size) * math.isqrt(int(vision.num_patches))
    return int(vision.image_size)


class HFText(TextTower):
    """The text tower of a ``CLIPModel`` or ``MetaClip2Model``."""

    def _features(self, prompts: list[str]) -> Tensor:
        tokens = self._tokenize(prompts)
        hidden = self.model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        features: Tensor = self.model.text_projection(hidden.pooler_output)
        return features

    def _tokenize(self, prompts: list[str]) -> Any:
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return tokens.to(self.device)

    def _embed(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        tokens = self._tokenize(prompts)
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


class SigLIPText(TextTower):
    """The text tower of a ``SiglipModel`` or ``Siglip2Model``: always padded to its full length, as in training."""

    def _features(self, prompts: list[str]) -> Tensor:
        length = self.model.config.text_config.max_position_embeddings
        options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
        ids = self.tokenizer(prompts, **options)["input_ids"].to(self.device)
        features: Tensor = self.model.text_model(input_ids=ids).pooler_output
        return features

    def _embed(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        raise ReactClipError(
            f"the text tower of {self.name!r} takes no token embeddings (it is not CLIP's causal transformer); use a "
            "complete CLIP such as openai/clip-vit-base-patch32"
        )

    def _embedded_features(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        raise NotImplementedError


FAMILIES = {
    **dict.fromkeys(("clip", "clip_vision_model", "metaclip_2"), HFEncoder),
    **{"siglip": SigLIPEncoder, "siglip2": SigLIP2Encoder},
}
"""Encoders by the ``model_type`` of a config.json."""


def load_hf(
    source: str, *, name: str, device: torch.device, dtype: torch.dtype, revision: str | None = None
) -> HFEncoder:
    """Load from a folder or the hub (its cache first). Safetensors where published, else ``weights_only``."""
    from transformers.utils import logging

    folder = Path(source) if Path(source).is_dir() else None
    if folder and not (folder / "config.json").is_file():
        raise ReactClipError(f"{folder} has no config.json; a model folder holds config.json and model.safetensors")
    logging.disable_progress_bar()
    try:
        with quiet_libraries():
            config, model, report, tokenizer = _read(source, name, revision)
            similarity = read_similarity(model)
            processor = _read_processor(source, revision)
    except ReactClipError:
        raise
    except Exception as error:
        raise loading_error(source if folder else name, error) from error
    finally:
        logging.enable_progress_bar()
    if missing := sorted(key for key in report["missing_keys"] if not key.endswith("position_ids")):
        raise ReactClipError(f"{name!r} lacks {len(missing)} tensors, {missing[0]} first; the checkpoint is incomplete")
    family = FAMILIES[config.model_type]
    vision = _vision_config(config)
    if family is HFEncoder:
        text_activation = None if tokenizer is None else config.text_config.hidden_act
        check_activation(name, vision.hidden_act, text_activation, _expected_activation(source, model))
    return family(
        model.to(dtype=dtype),
        name=name,
        tokenizer=tokenizer,
        mean=processor.get("image_mean", CLIP_MEAN if family is HFEncoder else (0.5, 0.5, 0.5)),
        std=processor.get("image_std", CLIP_STD if family is HFEncoder else (0.5, 0.5, 0.5)),
        preprocessing=_preprocessing(name, processor, _image_size(vision)),
        similarity=similarity,
    ).to(device)


def _read(source: str, name: str, revision: str | None) -> tuple[Any, nn.Module, dict[str, Any], Any]:
    """Configuration, model, loading report and, for a complete CLIP, the tokenizer."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPVisionModelWithProjection

    config = AutoConfig.from_pretrained(source, revision=revision)
    if config.model_type not in FAMILIES:
        raise ReactClipError(
            f"{name!r} is a {config.model_type!r} model; react-clip loads CLIP and its relatives "
            f"({', '.join(FAMILIES)})"
        )
    complete = config.model_type != "clip_vision_model"
    cls = AutoModel if complete else CLIPVisionModelWithProjection
    # The argument for the dtype has had two names; loading in fp32 and casting later works with both.
    model, report = cls.from_pretrained(source, revision=revision, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision) if complete else None
    return config, model, report, tokenizer


def _expected_activation(source: str, model: nn.Module) -> str | None:
    vision: Any = model
    embedding = vision.vision_model.embeddings.class_embedding.detach().half().cpu().numpy().tobytes()
    known = hashlib.sha256(embedding).hexdigest() in _OPENAI_CLASS_EMBEDDINGS
    return QUICK_GELU if known or source.startswith("openai/clip-") else None


def _read_processor(source: str, revision: str | None) -> dict[str, Any]:
    """The content of preprocessor_config.json; empty if there is none."""
    from transformers.utils import cached_file

    path = cached_file(
        source, "preprocessor_config.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    config: dict[str, Any] = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    return config


def _preprocessing(name: str, processor: dict[str, Any], image_size: int) -> Preprocessing | None:
    """The preprocessing in preprocessor_config.json, for square images of this side; ``None`` if it has none."""
    if "max_num_patches" in processor:
        # NaFlex keeps the aspect of an image; a square grid cannot.
        return Preprocessing(image_size, image_size, "squash", _filter(processor, Image.Resampling.BILINEAR))
    size = processor.get("size")
    if size is None or not processor.get("do_resize", True):
        return None
    size = {"shortest_edge": size} if isinstance(size, int) else size
    squash = "shortest_edge" not in size
    side = size.get("shortest_edge", size.get("height"))
    if side is None or (squash and size.get("width") != side):
        raise ReactClipError(f"{name!r} resizes images to {size}; only squares and a shortest edge are supported")
    mode: Literal["squash", "shorter"] = "squash" if squash else "shorter"
    return Preprocessing(image_size, int(side), mode, _filter(processor, Image.Resampling.BICUBIC), rounds_down=True)


def _filter(processor: dict[str, Any], default: Image.Resampling) -> str:
    return Image.Resampling(processor.get("resample", default)).name.lower()
