"""CLIP through transformers: a hub id, or a local folder in Hugging Face layout (with or without a text tower)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from react_clip.encoders.base import (
    CLIP_MEAN,
    CLIP_STD,
    QUICK_GELU,
    Encoder,
    check_activation,
    embed_patches,
    loading_error,
    quiet_libraries,
    read_similarity,
)
from react_clip.encoders.text import TextTower
from react_clip.errors import ReactClipError

# OpenAI's ViT-B/16, recognised by its class embedding: it must run with QuickGELU whatever a config.json says.
_OPENAI_CLASS_EMBEDDINGS = {"48f61989319f64dd9ad133d0b904de2736297aa691e7729c4f70747cce24f67d"}


class HFEncoder(Encoder):
    """A ``CLIPModel`` (both towers) or a ``CLIPVisionModelWithProjection`` (image tower only).

    The towers and projections are called directly instead of ``get_image_features``, whose return type changed between
    transformers 4 and 5; these parts are the same in both.
    """

    def __init__(self, model: nn.Module, *, name: str, tokenizer: Any, **kwargs: Any) -> None:
        config: Any = model.config
        vision = getattr(config, "vision_config", config)
        super().__init__(
            model,
            name=name,
            image_size=int(vision.image_size),
            dim=int(config.projection_dim),
            patch_size=int(vision.patch_size),
            text=None if tokenizer is None else HFText(model, tokenizer, name),
            **kwargs,
        )

    def _image_features(self, normalised: Tensor) -> Tensor:
        model: Any = self.tower
        features: Tensor = model.visual_projection(model.vision_model(pixel_values=normalised).pooler_output)
        return features

    def _learned_positions(self) -> Tensor:
        model: Any = self.tower
        positions: Tensor = model.vision_model.embeddings.position_embedding.weight
        return positions

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        # `interpolate_pos_encoding=True` would give the same, but interpolate in every call.
        model: Any = self.tower
        vision = model.vision_model
        embeddings = vision.embeddings
        tokens = embed_patches(normalised, embeddings.patch_embedding, embeddings.class_embedding, positions)
        hidden = vision.encoder(inputs_embeds=vision.pre_layrnorm(tokens)).last_hidden_state
        features: Tensor = model.visual_projection(vision.post_layernorm(hidden[:, 0]))
        return features


class HFText(TextTower):
    """The text tower of a ``CLIPModel``."""

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
            mean, std = _normalisation(source, revision)
    except ReactClipError:
        raise
    except Exception as error:
        raise loading_error(source if folder else name, error) from error
    finally:
        logging.enable_progress_bar()
    if missing := sorted(key for key in report["missing_keys"] if not key.endswith("position_ids")):
        raise ReactClipError(f"{name!r} lacks {len(missing)} tensors, {missing[0]} first; the checkpoint is incomplete")
    vision = config if tokenizer is None else config.vision_config
    text_activation = None if tokenizer is None else config.text_config.hidden_act
    check_activation(name, vision.hidden_act, text_activation, _expected_activation(source, model))
    similarity = read_similarity(model)
    model = model.to(dtype=dtype)
    return HFEncoder(model, name=name, tokenizer=tokenizer, mean=mean, std=std, similarity=similarity).to(device)


def _read(source: str, name: str, revision: str | None) -> tuple[Any, nn.Module, dict[str, Any], Any]:
    """Configuration, model, loading report and, for a complete CLIP, the tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, CLIPModel, CLIPVisionModelWithProjection

    config = AutoConfig.from_pretrained(source, revision=revision)
    if config.model_type not in ("clip", "clip_vision_model"):
        raise ReactClipError(
            f"{name!r} is a {config.model_type!r} model; react-clip loads CLIP (clip, clip_vision_model)"
        )
    complete = config.model_type == "clip"
    cls = CLIPModel if complete else CLIPVisionModelWithProjection
    # The argument for the dtype has had two names; loading in fp32 and casting later works with both.
    model, report = cls.from_pretrained(source, revision=revision, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision) if complete else None
    return config, model, report, tokenizer


def _expected_activation(source: str, model: nn.Module) -> str | None:
    vision: Any = model
    embedding = vision.vision_model.embeddings.class_embedding.detach().half().cpu().numpy().tobytes()
    known = hashlib.sha256(embedding).hexdigest() in _OPENAI_CLASS_EMBEDDINGS
    return QUICK_GELU if known or source.startswith("openai/clip-") else None


def _normalisation(source: str, revision: str | None) -> tuple[list[float], list[float]]:
    """Mean and std from preprocessor_config.json where there is one; CLIP's own otherwise."""
    from transformers.utils import cached_file

    path = cached_file(
        source, "preprocessor_config.json", revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if path is None:
        return list(CLIP_MEAN), list(CLIP_STD)
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    return config.get("image_mean", list(CLIP_MEAN)), config.get("image_std", list(CLIP_STD))
