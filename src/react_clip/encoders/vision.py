"""CLIP's image tower in plain PyTorch, with OpenAI's parameter names.

Towers of transformers and open_clip become this one when they are loaded: it is faster than theirs, takes images of any
size in whole patches, and images of several sizes in one pass. Importing transformers takes several seconds, longer
than the rest of the work for one photo; the offline tower does without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from react_clip.augment import resizing_weights
from react_clip.encoders import layers
from react_clip.encoders.layers import AddNorm, Attention, Perceptron, Shapes
from react_clip.encoders.text import at_least_fp32


class VisionTower(nn.Module):
    """Vision transformer: normalised pixels ``[B, 3, S, S]`` to projected features ``[B, dim]``.

    Args:
        weights: its tensors by OpenAI's names, from which all sizes follow.
        heads: attention heads.
        activation: of the perceptrons, by its name in transformers.
        eps: of the layer norms.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, heads: int, activation: str, eps: float) -> None:
        super().__init__()
        width, _, _, self.patch = weights["conv1.weight"].shape
        hidden = len(weights["transformer.resblocks.0.mlp.c_fc.weight"])
        depth = sum(name.endswith("mlp.c_fc.weight") for name in weights)
        side, dim = math.isqrt(len(weights["positional_embedding"]) - 1), weights["proj"].shape[1]
        with torch.device("meta"):
            self.class_embedding = nn.Parameter(torch.empty(width))
            self.positional_embedding = nn.Parameter(torch.empty(1 + side**2, width))
            self.proj = nn.Parameter(torch.empty(width, dim))
            self.conv1 = nn.Conv2d(3, width, self.patch, stride=self.patch, bias=False)
            self.ln_pre, self.ln_post = AddNorm(width, eps), AddNorm(width, eps)
            blocks = [Block(width, hidden, heads, activation, eps) for _ in range(depth)]
            self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(blocks)})
        self.load_state_dict(weights, assign=True)
        self.eval().requires_grad_(False)
        self._about = f"size={self.patch * side}, dim={dim}, heads={heads}, activation={activation}, eps={eps}"

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], *, heads: int, activation: str, eps: float = 1e-5) -> Self | None:
        """The tower that has these tensors as its weights; ``None`` if they belong to another transformer."""
        try:
            return cls(weights, heads=heads, activation=activation, eps=eps)
        except (KeyError, ValueError, RuntimeError):  # a tensor is missing, of no use, or of another shape
            return None

    def forward(self, normalised: Tensor) -> Tensor:
        """Features of the class tokens of images whose side is a number of whole patches."""
        return self.several([normalised])[0]

    def several(self, images: Sequence[Tensor]) -> list[Tensor]:
        """:meth:`forward` of images of several sizes, in one pass that reads the weights once."""
        # Only the class tokens are read, so the last block computes nothing else.
        rows, shapes = self._last_rows(images, first_only=True)
        features = rows @ self.proj
        return list(torch.split(features, [count for count, _ in shapes])) if len(shapes) > 1 else [features]

    def tokens(self, normalised: Tensor) -> Tensor:
        """All tokens ``[B, 1 + patches, width]`` before the projection, the class token first."""
        return layers.unpack(*self._last_rows([normalised], first_only=False))[0]

    def _last_rows(self, images: Sequence[Tensor], *, first_only: bool) -> tuple[Tensor, Shapes]:
        """Normalised tokens behind the last block as rows, all or only the class tokens."""
        grids = [self._embed(each) for each in images]
        shapes = [(grid.shape[0], grid.shape[1]) for grid in grids]
        _, rows = self.ln_pre(layers.pack(grids))
        del grids
        update = None
        resblocks: Any = self.transformer["resblocks"]
        *blocks, last = resblocks
        for block in blocks:
            rows, update = block(rows, update, shapes)
        rows, update = last(rows, update, shapes, first_only=first_only)
        return self.ln_post(rows, update)[1], shapes

    def _embed(self, normalised: Tensor) -> Tensor:
        """Tokens ``[B, 1 + patches, width]``: the class token and the patches, with their positions."""
        images, channels, height, _ = normalised.shape
        count = height // self.patch
        # Patches do not overlap, so the convolution is one matrix product. Patches row by row; in a patch channels,
        # rows, then columns, as in the weights.
        grid = normalised.reshape(images, channels, count, self.patch, count, self.patch).permute(0, 2, 4, 1, 3, 5)
        tokens = F.linear(grid.flatten(3).flatten(1, 2), self.conv1.weight.flatten(1))
        first = self.class_embedding.to(tokens.dtype).expand(images, 1, -1)
        positions = interpolate_positions(self.positional_embedding, count)
        return torch.cat([first, tokens], 1) + positions.to(tokens.dtype)

    def extra_repr(self) -> str:
        """What the weights do not say."""
        return self._about


def interpolate_positions(positions: Tensor, side: int) -> Tensor:
    """Position embeddings ``[1 + side * side, width]`` of a grid with another side, by bicubic interpolation.

    This is how transformers interpolates them, but always in at least fp32; a class token, which comes first, keeps its
    own.
    """
    old_side = math.isqrt(len(positions))
    if side == old_side:
        return positions
    extra = len(positions) - old_side**2
    first, grid = positions[:extra], at_least_fp32(positions[extra:]).reshape(old_side, old_side, -1)
    if grid.is_cuda:  # PyTorch's kernel has one thread per position for all channels
        weights = resizing_weights(old_side, side, "bicubic", grid.device, grid.dtype)
        rows = (weights @ grid.flatten(1)).reshape(side, old_side, -1)
        resized = (weights @ rows).flatten(0, 1)
    else:
        planes = grid.permute(2, 0, 1)[None]
        resized = F.interpolate(planes, size=(side, side), mode="bicubic", align_corners=False)[0].flatten(1).T
    return torch.cat([first, resized.to(positions.dtype)])


class Block(nn.Module):
    """Attention and a perceptron, each on normalised tokens and added to its input.

    Takes and returns rows and an ``update`` that is still to be added to them: the next block adds it when it
    normalises.
    """

    def __init__(self, width: int, hidden: int, heads: int, activation: str, eps: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = AddNorm(width, eps), AddNorm(width, eps)
        self.attn = Attention(width, heads)
        self.mlp = Perceptron(width, hidden, activation)

    def forward(
        self, rows: Tensor, update: Tensor | None, shapes: Shapes, *, first_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """With ``first_only`` the result has only the first token of each image."""
        rows, normalised = self.ln_1(rows, update)
        update = self.attn(normalised, shapes, first_only=first_only)
        rows, normalised = self.ln_2(layers.first_tokens(rows, shapes) if first_only else rows, update)
        return rows, self.mlp(normalised)
