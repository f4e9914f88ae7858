"""CLIP's image tower in plain torch, with the parameter names of transformers' ``CLIPVisionModelWithProjection``.

Importing transformers takes several seconds, longer than the rest of the work for one photo; the offline tower does
without it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from react_clip.encoders.base import Encoder, embed_patches


class VisionEncoder(Encoder):
    """An encoder whose tower is a :class:`VisionTower`."""

    tower: VisionTower

    def _learned_positions(self) -> Tensor:
        return self.tower.positions

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        features: Tensor = self.tower(normalised, positions)
        return features


class VisionTower(nn.Module):
    """Vision transformer: normalised pixels ``[B, 3, S, S]`` to projected features ``[B, dim]``, with QuickGELU."""

    def __init__(self, *, width: int, hidden: int, layers: int, heads: int, size: int, patch: int, dim: int) -> None:
        super().__init__()
        blocks = nn.ModuleList(_Block(width, hidden, heads) for _ in range(layers))
        parts: dict[str, nn.Module] = {
            "embeddings": _Embeddings(width, size, patch),
            "pre_layrnorm": nn.LayerNorm(width),  # the published spelling
            "encoder": nn.ModuleDict({"layers": blocks}),
            "post_layernorm": nn.LayerNorm(width),
        }
        self.vision_model = nn.ModuleDict(parts)
        self.visual_projection = nn.Linear(width, dim, bias=False)

    @property
    def positions(self) -> Tensor:
        """Learned position embeddings ``[1 + patches, width]``."""
        embeddings: Any = self.vision_model["embeddings"]
        positions: Tensor = embeddings.position_embedding.weight
        return positions

    def forward(self, normalised: Tensor, positions: Tensor | None = None) -> Tensor:
        """Features of the class token; images of another size need position embeddings of that size."""
        model = self.vision_model
        tokens: Tensor = model["pre_layrnorm"](model["embeddings"](normalised, positions))
        for block in self.vision_model["encoder"]["layers"]:  # type: ignore[index]
            tokens = block(tokens)
        features: Tensor = self.visual_projection(model["post_layernorm"](tokens[:, 0]))
        return features


class _Embeddings(nn.Module):
    """Patches and the class token ``[B, 1 + patches, width]``, with positions added."""

    def __init__(self, width: int, size: int, patch: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.patch_embedding = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        # nn.Embedding draws random values, which on the meta device imports torch's compiler and takes seconds.
        positions = torch.empty(1 + (size // patch) ** 2, width)
        self.position_embedding = nn.Embedding.from_pretrained(positions, freeze=False)  # type: ignore[no-untyped-call]

    def forward(self, normalised: Tensor, positions: Tensor | None) -> Tensor:
        positions = self.position_embedding.weight if positions is None else positions
        return embed_patches(normalised, self.patch_embedding, self.class_embedding, positions)


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each on normalised tokens and added to its input."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        # Same order as transformers, so that a fingerprint over the parameters is the same for both.
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.layer_norm1 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})
        self.layer_norm2 = nn.LayerNorm(width)
        self._heads = heads

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self._attend(self.layer_norm1(tokens))
        hidden = self.mlp["fc1"](self.layer_norm2(tokens))
        updated: Tensor = tokens + self.mlp["fc2"](hidden * torch.sigmoid(1.702 * hidden))
        return updated

    def _attend(self, tokens: Tensor) -> Tensor:
        names = ("q_proj", "k_proj", "v_proj")
        q, k, v = (self.self_attn[name](tokens).unflatten(-1, (self._heads, -1)).transpose(1, 2) for name in names)
        mixed: Tensor = self.self_attn["out_proj"](scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed
