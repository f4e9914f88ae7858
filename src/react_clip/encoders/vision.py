"""CLIP's image tower in plain torch, with the parameter names of transformers' ``CLIPVisionModelWithProjection``.

Importing transformers takes several seconds, longer than the rest of the work for one photo; the offline tower does
without it. A CLIP of transformers or open_clip computes by this tower, too, when it is accelerated: its layers have
kernels on a GPU, and do less work everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from react_clip.encoders.base import Encoder, ViewMaker, embed_patches
from react_clip.encoders.layers import AddNorm, Packing, Projections, attend, fuse_operations, pack_weights
from react_clip.encoders.loading import GELU, QUICK_GELU
from react_clip.encoders.text import at_least_fp32
from react_clip.kernels import kernels_work, needs_gradients

MOST_PACKED = 16
"""Images in the largest batch whose views of several sizes share one matrix; those of more images are faster side by
side on an H200."""


class ViTEncoder(Encoder):
    """An encoder that computes by a :class:`VisionTower` if it has one, and otherwise by the layers of its model.

    Accelerated, the model of another library gets a tower with the same weights.
    """

    _shared: tuple[VisionTower, ...] = ()
    """That tower; in a tuple, so that its weights are not counted as other weights of this module."""

    @property
    def vision(self) -> VisionTower | None:
        """The tower, if there is one."""
        return self._shared[0] if self._shared else None

    def accelerate(self) -> Self:
        """:meth:`Encoder.accelerate`, and compute by a :class:`VisionTower`, on a CPU too."""
        super().accelerate()
        self.share_weights()
        return self

    def share_weights(self) -> None:
        """Compute by a :class:`VisionTower` with the weights of the model, if it is CLIP's vision transformer."""
        tower = self._same_tower()
        if tower is not None:
            (fuse_operations if kernels_work(self.device) else pack_weights)(tower)
            self._shared = (tower,)

    def _same_tower(self) -> VisionTower | None:
        """A tower with the weights of the model; ``None`` if it is another transformer, or a VisionTower itself."""
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._shared:
            self.share_weights()
        return self

    def _compute(self, pixels: Tensor) -> Tensor:
        if self.vision is None:
            return super()._compute(pixels)
        return at_least_fp32(self.vision(self._normalise(pixels), self._positions(pixels)))

    def _takes_one_pass(self, makers: tuple[ViewMaker, ...], pixels: Tensor) -> bool:
        # One image on x86, where PyTorch multiplies by MKL: two passes would read all weights twice. With gradients
        # each view has a pass, which needs less memory.
        one_on_a_cpu = len(pixels) == 1 and len(makers) > 1 and pixels.is_cpu and not needs_gradients(pixels)
        has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        return self.vision is not None and one_on_a_cpu and has_mkl

    def _compute_views(self, views: Sequence[Tensor]) -> list[Tensor]:
        few = len(views) > 1 and len(views[0]) <= MOST_PACKED
        return self._compute_packed(views) if few and self.vision is not None else super()._compute_views(views)

    def _compute_packed(self, views: Sequence[Tensor]) -> list[Tensor]:
        assert self.vision is not None
        pixels, positions = [self._normalise(view) for view in views], [self._positions(view) for view in views]
        return [at_least_fp32(each) for each in self.vision.packed(pixels, positions)]

    def _positions(self, pixels: Tensor) -> Tensor | None:
        """Position embeddings for pixels of another size than the model's."""
        return None if pixels.shape[-1] == self.image_size else self._tables[pixels.shape[-1]].positions


class VisionEncoder(ViTEncoder):
    """An encoder whose model is a :class:`VisionTower`."""

    tower: VisionTower

    @property
    def vision(self) -> VisionTower:
        """The tower."""
        return self.tower

    def accelerate(self) -> Self:
        """:meth:`Encoder.accelerate`, and pack the weights on a CPU."""
        super().accelerate()
        if not kernels_work(self.device):
            pack_weights(self.tower)
        return self

    def _learned_positions(self) -> Tensor:
        return self.tower.positions


class VisionTower(nn.Module):
    """Vision transformer: normalised pixels ``[B, 3, S, S]`` to projected features ``[B, dim]``."""

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        layers: int,
        heads: int,
        size: int,
        patch: int,
        dim: int,
        activation: str = QUICK_GELU,
    ) -> None:
        super().__init__()
        blocks = nn.ModuleList(_Block(width, hidden, heads, activation) for _ in range(layers))
        parts: dict[str, nn.Module] = {
            "embeddings": _Embeddings(width, size, patch),
            "pre_layrnorm": AddNorm(width),  # the published spelling
            "encoder": nn.ModuleDict({"layers": blocks}),
            "post_layernorm": AddNorm(width),
        }
        self.vision_model = nn.ModuleDict(parts)
        self.visual_projection = nn.Linear(width, dim, bias=False)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], *, heads: int, activation: str) -> Self | None:
        """The tower that has these tensors as its weights; ``None`` if they belong to another transformer."""
        sizes = {name: tensor.shape for name, tensor in weights.items()}
        embeddings, first = "vision_model.embeddings", "vision_model.encoder.layers.0.mlp.fc1.weight"
        names = (f"{embeddings}.patch_embedding.weight", f"{embeddings}.position_embedding.weight", first)
        if activation not in _ACTIVATIONS or not {*names, "visual_projection.weight"} <= sizes.keys():
            return None
        patches, positions, layer = (sizes[name] for name in names)
        with torch.device("meta"):
            tower = cls(
                width=patches[0],
                hidden=layer[0],
                layers=sum(name.endswith("mlp.fc1.weight") for name in sizes),
                heads=heads,
                size=patches[-1] * math.isqrt(positions[0] - 1),
                patch=patches[-1],
                dim=sizes["visual_projection.weight"][0],
                activation=activation,
            ).requires_grad_(False)
        if {name: tensor.shape for name, tensor in tower.state_dict().items()} != sizes:
            return None
        tower.load_state_dict(weights, assign=True)
        return tower.eval()

    @property
    def positions(self) -> Tensor:
        """Learned position embeddings ``[1 + patches, width]``."""
        embeddings: Any = self.vision_model["embeddings"]
        positions: Tensor = embeddings.position_embedding.weight
        return positions

    def forward(self, normalised: Tensor, positions: Tensor | None = None) -> Tensor:
        """Features of the class token; images of another size need position embeddings of that size."""
        return self._features(self._embed(normalised, positions))[:, 0]

    def packed(self, images: Sequence[Tensor], positions: Sequence[Tensor | None]) -> list[Tensor]:
        """:meth:`forward` of images of several sizes, with the tokens of all of them in one matrix ``[tokens, width]``.

        A small batch of two sizes takes a GPU little longer than one size, and a CPU reads the weights once.
        """
        grids = [self._embed(each, table) for each, table in zip(images, positions, strict=True)]
        shapes = [(grid.shape[0], grid.shape[1]) for grid in grids]
        tokens = torch.cat([grid.flatten(0, 1) for grid in grids])
        return list(torch.split(self._features(tokens, Packing.of(tokens, shapes)), [count for count, _ in shapes]))

    def _embed(self, normalised: Tensor, positions: Tensor | None) -> Tensor:
        """Tokens ``[B, 1 + patches, width]`` before the first block."""
        tokens: Tensor
        _, tokens = self.vision_model["pre_layrnorm"](*self.vision_model["embeddings"](normalised, positions))
        return tokens

    def _features(self, tokens: Tensor, packing: Packing | None = None) -> Tensor:
        """Features of the class tokens, ``[B, 1, dim]``, or of packed tokens ``[images, dim]``."""
        *blocks, last = self.vision_model["encoder"]["layers"]  # type: ignore[index]
        update = None
        for block in blocks:
            tokens, update = block(tokens, update, packing)
        tokens, update = last(tokens, update, packing, first_only=True)
        _, normalised = self.vision_model["post_layernorm"](tokens, update)
        features: Tensor = self.visual_projection(normalised)
        return features


class _Embeddings(nn.Module):
    """The class token and patches ``[B, 1 + patches, width]``, and the positions to add, ``[1 + patches, width]``."""

    def __init__(self, width: int, size: int, patch: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.patch_embedding = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        # nn.Embedding draws random values, which on the meta device imports torch's compiler and takes seconds.
        positions = torch.empty(1 + (size // patch) ** 2, width)
        self.position_embedding = nn.Embedding.from_pretrained(positions, freeze=False)  # type: ignore[no-untyped-call]

    def forward(self, normalised: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        positions = self.position_embedding.weight if positions is None else positions
        tokens = embed_patches(normalised, self.patch_embedding, self.class_embedding)
        return tokens, positions.to(tokens.dtype)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x).

    On a CPU, without gradients, the result replaces the input, part by part: a part stays in the cache between the
    three operations, and no memory is needed for two more tensors of this size.
    """

    PART = 1 << 18
    """Numbers in a part: 1 MiB in fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The activation of a tensor of any shape; on a CPU the tensor may be overwritten."""
        if hidden.is_cpu and hidden.is_contiguous() and not (needs_gradients(hidden) or torch.compiler.is_compiling()):
            for part in torch.split(hidden.view(-1), self.PART):
                part.mul_((1.702 * part).sigmoid_())
            return hidden
        return hidden * torch.sigmoid(1.702 * hidden)


_ACTIVATIONS: dict[str, type[nn.Module]] = {QUICK_GELU: QuickGELU, GELU: nn.GELU}


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each on normalised tokens and added to its input.

    Takes and returns tokens and an ``update`` that is still to be added to them: the next block adds it when it
    normalises. With ``first_only`` the result has only the first token of each image, which attends to all of them: the
    last block of a tower needs no more, and saves five sixths of its time.
    """

    def __init__(self, width: int, hidden: int, heads: int, activation: str) -> None:
        super().__init__()
        self.self_attn = Projections(width)
        self.layer_norm1 = AddNorm(width)
        activate = _ACTIVATIONS[activation]()
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, hidden), "activation": activate, "fc2": nn.Linear(hidden, width)}
        )
        self.layer_norm2 = AddNorm(width)
        self._heads = heads

    def forward(
        self,
        tokens: Tensor,
        update: Tensor | None,
        packing: Packing | None = None,
        *,
        first_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        tokens, normalised = self.layer_norm1(tokens, update)
        if first_only:
            tokens, queries = (first_tokens(each, packing) for each in (tokens, normalised))
        else:
            queries = normalised
        tokens, normalised = self.layer_norm2(tokens, self._attend(queries, normalised, packing))
        return tokens, self.mlp["fc2"](self.mlp["activation"](self.mlp["fc1"](normalised)))

    def _attend(self, queries: Tensor, tokens: Tensor, packing: Packing | None) -> Tensor:
        """A method of its own, so that queries, keys and values are freed before the perceptron needs their memory."""
        q, k, v = self.self_attn(queries, tokens)
        attended: Tensor = self.self_attn["out_proj"]((packing.attend if packing else attend)(q, k, v, self._heads))
        return attended


def first_tokens(tokens: Tensor, packing: Packing | None) -> Tensor:
    """The first token of each image: ``[B, 1, width]``, or of packed tokens ``[images, width]``."""
    return tokens[:, :1] if packing is None else packing.first_tokens(tokens)
