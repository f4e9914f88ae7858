"""CLIP through open_clip: ``open_clip:MODEL/PRETRAINED``, where PRETRAINED is a published tag or a checkpoint file.

A model of its own configuration is ``hf-hub:OWNER/NAME`` or a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from react_clip.encoders.base import CLIP_MEAN, CLIP_STD, Encoder, read_similarity
from react_clip.encoders.layers import APPROXIMATIONS, QUICK_GELU
from react_clip.encoders.loading import check_activation, loading
from react_clip.encoders.text import TextTower
from react_clip.encoders.vision import VisionTower
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.preprocess import Preprocessing

PREFIX, HUB, CONFIG = "open_clip:", "hf-hub:", "open_clip_config.json"

_RESIZE_MODES: dict[str, Any] = {"shortest": "shorter", "longest": "longer", "squash": "squash"}
"""Modes of :class:`Preprocessing` by their names in open_clip."""


class OpenCLIPTower(nn.ModuleDict):
    """The ``visual`` of an open_clip model, if it is no CLIP vision transformer."""

    def forward(self, normalised: Tensor) -> Tensor:
        """Projected features of normalised pixels ``[B, 3, S, S]``."""
        features = self["visual"](normalised)
        result: Tensor = features[0] if isinstance(features, tuple) else features  # CoCa returns its tokens too
        return result


class OpenCLIPText(TextTower):
    """The text tower of an open_clip model."""

    def _features(self, prompts: list[str]) -> Tensor:
        features: Tensor = self.model.encode_text(self.tokenizer(prompts).to(self.device))
        return features

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :class:`TextTower`."""
        text = self._causal_tower()
        tokens = self.tokenizer(list(prompts)).to(self.device)
        # CLIP's end token has the highest id of its vocabulary; what stands behind it is padding.
        ends = tokens.argmax(1)
        return text.token_embedding(tokens[:, : int(ends.max()) + 1]), ends

    def _embedded_features(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        text = self._causal_tower()
        count, length, _ = embeddings.shape
        hidden = embeddings + text.positional_embedding[:length]
        hidden = text.transformer(hidden, attn_mask=text.attn_mask[:length, :length])
        pooled = text.ln_final(hidden[torch.arange(count, device=hidden.device), ends])
        projection = text.text_projection
        features: Tensor = projection(pooled) if isinstance(projection, nn.Module) else pooled @ projection
        return features

    def _causal_tower(self) -> Any:
        """The module with the parts of the text tower; raises unless it is CLIP's: causal, read at the end token."""
        text = getattr(self.model, "text", self.model)
        pool = getattr(text, "text_pool_type", getattr(text, "pool_type", None))
        causal = getattr(text, "attn_mask", None) is not None and getattr(text, "cls_emb", None) is None
        if pool != "argmax" or not causal or text.text_projection is None:
            raise self._no_embeddings()
        return text


def load_open_clip(name: str, *, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Load ``open_clip:MODEL/PRETRAINED`` with the activation the weights were trained with."""
    open_clip = require("open_clip", repr(name), extra="open_clip")
    model_name, _, pretrained = name.removeprefix(PREFIX).partition("/")
    if model_name not in open_clip.list_models():
        close = [known for known in open_clip.list_models() if model_name.lower()[:5] in known.lower()][:8]
        raise ReactClipError(f"open_clip has no model {model_name!r}; near ones: {', '.join(close) or 'none'}")
    tags = open_clip.list_pretrained_tags_by_model(model_name)
    tag = open_clip.get_pretrained_cfg(model_name, pretrained) if pretrained in tags else None
    if tag is None and not Path(pretrained).is_file():
        raise ReactClipError(
            f"open_clip has no weights {pretrained!r} for {model_name}; give a checkpoint file or one of "
            f"{', '.join(tags)}"
        )
    named_quick = bool(open_clip.get_model_config(model_name).get("quick_gelu", False))
    # A plain model name follows its tag (ViT-B-32/openai runs QuickGELU); a -quickgelu name that its tag contradicts
    # has no right answer.
    quick = named_quick if tag is None else bool(tag.get("quick_gelu", False))
    activation, trained = (QUICK_GELU if each else "gelu" for each in (quick or named_quick, quick))
    check_activation(name, activation, None, trained)
    how = {"pretrained": pretrained, "force_quick_gelu": quick}
    return _load(model_name, name, device, dtype, from_hub=tag is not None, **how)


def load_published(source: str, *, name: str, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Load what was published with its configuration: ``hf-hub:OWNER/NAME`` or ``local-dir:FOLDER``.

    The folder holds open_clip_config.json and open_clip_pytorch_model.bin, or safetensors.
    """
    # Without its weights open_clip would go on with random ones.
    return _load(source, name, device, dtype, from_hub=source.startswith(HUB), require_pretrained=True)


def _load(
    source: str, name: str, device: torch.device, dtype: torch.dtype, *, from_hub: bool, **options: Any
) -> Encoder:
    open_clip = require("open_clip", repr(name), extra="open_clip")
    with loading(name, from_hub=from_hub):
        dim = open_clip.get_model_config(source)["embed_dim"]
        model = open_clip.create_model(source, device="cpu", **options)
        tokenizer = open_clip.get_tokenizer(source)
    encoder = wrap_model(model, name=name, dim=dim, tokenizer=tokenizer)
    del model.visual  # the encoder has what it needs of it
    # Cast as a whole: open_clip's own half precisions keep some layers in fp32, and the scale is read in fp32.
    return encoder.to(device=device, dtype=dtype)


def wrap_model(model: nn.Module, *, name: str, dim: int, tokenizer: Any) -> Encoder:
    """An encoder around a model that open_clip has made, with the model's own image size and normalisation.

    They share their weights; without a tokenizer the encoder has no text tower.
    """
    preprocess = require("open_clip", repr(name), extra="open_clip").get_model_preprocess_cfg(model)
    parts: Any = model
    size = preprocess.get("size", parts.visual.image_size)
    height, width = size if isinstance(size, tuple | list) else (size, size)
    if height != width:
        raise ReactClipError(f"{name!r} takes images of {height} x {width} pixels; only square ones are supported")
    vit = _vision_tower(parts.visual)
    return Encoder(
        vit or OpenCLIPTower({"visual": parts.visual}),
        name=name,
        patch_size=vit.patch if vit else None,
        text=None if tokenizer is None else OpenCLIPText(model, tokenizer, name),
        image_size=int(height),
        dim=int(dim),
        mean=preprocess.get("mean", CLIP_MEAN),
        std=preprocess.get("std", CLIP_STD),
        preprocessing=Preprocessing(
            size=int(height),
            resize=int(height),
            mode=_RESIZE_MODES[preprocess.get("resize_mode", "shortest")],
            # open_clip has no third filter at test time.
            interpolation="bilinear" if preprocess.get("interpolation") == "bilinear" else "bicubic",
            fill=int(preprocess.get("fill_color", 0)),
        ),
        similarity=read_similarity(model),
    )


def _vision_tower(visual: Any) -> VisionTower | None:
    """CLIP's vision transformer, read at the class token, as our tower; ``None`` for any other image tower."""
    from open_clip.transformer import VisionTransformer

    if not isinstance(visual, VisionTransformer) or visual.attn_pool is not None or visual.pool_type != "tok":
        return None
    (height, width), block = visual.patch_size, visual.transformer.resblocks[0]
    if height != width or visual.grid_size[0] != visual.grid_size[1] or not hasattr(block, "mlp"):
        return None
    names = {approximation: name for name, approximation in APPROXIMATIONS.items()}
    activation = names[block.mlp.gelu.approximate] if isinstance(block.mlp.gelu, nn.GELU) else QUICK_GELU
    weights = {key: value.detach() for key, value in visual.named_parameters()}
    return VisionTower.of(weights, heads=block.attn.num_heads, activation=activation, eps=visual.ln_post.eps)
