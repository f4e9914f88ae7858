"""The image encoder: float pixels in [0, 1] in, unit fp32 features out, with the normalisation inside."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from react_clip import functional
from react_clip.accelerate import AcceleratedBackend, Backend
from react_clip.encoders.layers import fuse_operations
from react_clip.encoders.text import TextTower, at_least_fp32
from react_clip.errors import ReactClipError
from react_clip.kernels import kernels_work
from react_clip.preprocess import Images, Preprocessing, RangeCheck, as_pixels

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

ViewMaker = Callable[..., Tensor]
"""A function of tensors ``[B, ...]`` that returns one view of each image; pure and hashable: graphs are kept."""


def _unchanged(features: Tensor) -> Tensor:
    return features


@dataclass(frozen=True)
class Gradients:
    """Gradients through a defence, for an attacker who differentiates it; answers do not depend on these options."""

    checkpoint: bool = False
    """Recompute encoder activations in the backward pass instead of keeping them: one call bounds the memory."""
    detach_sigma: bool = False
    """Treat the anchor's noise scale as a constant instead of a function of the pixels."""
    instability_temperature: float = 1.0
    """The gradient of J is that of logits divided by this: at CLIP's own scale it vanishes where an answer is clear."""


@dataclass
class Passes:
    """Passes through an encoder, in images; one of another size counts as its fraction of the tokens."""

    forward: float = 0.0
    backward: float = 0.0
    """Passes whose gradient was taken; activations that a checkpoint computes again there are no further pass."""


_counts: ContextVar[tuple[tuple[nn.Module, Passes], ...]] = ContextVar("counts", default=())


class Encoder(nn.Module):
    """A frozen CLIP: ``encoder(pixels)`` gives unit features ``[B, dim]`` in fp32.

    Checks, normalisation, precision and unit length are handled here once, so that no caller can get the pixel space
    wrong. ``tower`` maps normalised pixels to projected features; subclasses whose tower is called in another way
    override :meth:`_image_features`.

    A vision transformer with learned positions takes images of other sizes too, in whole patches: its subclass gives
    ``patch_size`` and defines :meth:`_learned_positions` and :meth:`_resized_features`.

    Args:
        tower: the model; it is put into evaluation mode and frozen.
        name: by which :func:`react_clip.load` finds it.
        image_size: side of the pixels in, S.
        dim: length of a feature.
        mean: what is subtracted from each of the three channels.
        std: what each channel is divided by then.
        patch_size: side of a patch, for towers that take other sizes; ``None`` for towers that take one size only.
        preprocessing: from images to pixels; the paper's by default.
        similarity: from cosines to probabilities; CLIP's softmax at a scale of 100 by default.
        text: the text tower of the same model; ``None`` where there is none.
    """

    mean: Tensor
    std: Tensor
    extra_tokens = 1
    """Tokens of a vision transformer beside its patches."""
    cpu_tokens = 1600
    """Most tokens that a CPU encodes at a time, so that a larger batch needs no more memory."""

    def __init__(
        self,
        tower: nn.Module,
        *,
        name: str,
        image_size: int,
        dim: int,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        patch_size: int | None = None,
        preprocessing: Preprocessing | None = None,
        similarity: functional.Similarity | None = None,
        text: TextTower | None = None,
    ) -> None:
        super().__init__()
        self.tower = tower.eval().requires_grad_(False)
        self.name = name
        self.weights = name
        """What the model is: ``"clip-vit-b-16"``, or ``"clip-vit-b-16+FILE"`` with the image tower of a checkpoint."""
        self.image_size = image_size
        self.dim = dim
        self.patch_size = patch_size
        self.preprocessing = preprocessing or Preprocessing.paper(image_size)
        self.similarity = similarity or functional.Similarity()
        self._tables: dict[int, PositionTable] = {}
        self._text = text
        self.backend = Backend()
        self._joint_functions: dict[tuple[Any, ...], Callable[..., Tensor]] = {}
        self.gradients = Gradients()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the tower."""
        return self.mean.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the tower; features are fp32 in every case (fp64 in a double-precision tower)."""
        return next(self.tower.parameters()).dtype

    @property
    def original(self) -> str:
        """Old name of :attr:`weights`."""
        return self.weights

    @property
    def base(self) -> str:
        """Old name of :attr:`feature_space`."""
        return self.feature_space

    @property
    def feature_space(self) -> str:
        """The model whose feature space this is: a finetuned image tower keeps that of the model it started from."""
        return self.weights.partition("+")[0]

    @property
    def has_text(self) -> bool:
        """True if there is a text tower."""
        return self._text is not None

    @property
    def text(self) -> TextTower:
        """The text tower; raises where there is none."""
        if self._text is None:
            raise ReactClipError(
                f"{self.name!r} has no text tower; use ready class features (ZeroShotClassifier.from_features), a "
                "folder of photos (from_folder) or names of the label bank"
            )
        return self._text

    # ------------------------------------------------------------------ pixels to features

    def forward(self, pixels: Tensor) -> Tensor:
        """Unit features of float pixels ``[B, 3, S, S]`` in [0, 1]."""
        self.check(pixels)
        return self.encode_views(pixels)

    @overload
    def encode(self, views: Tensor) -> Tensor: ...

    @overload
    def encode(self, views: list[Tensor]) -> list[Tensor]: ...

    def encode(self, views: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """Unit features of views, whose pixels may leave [0, 1] and whose size may be any that :meth:`takes` allows.

        A list of views of several sizes gives a list of features.
        """
        if isinstance(views, Tensor):
            return self.encode_views(views)
        return [self.encode_views(each) for each in views]

    def raw(self, pixels: Tensor) -> Tensor:
        """Features of views before scaling to unit length."""
        return self.raw_features(pixels)

    def encode_views(self, pixels: Tensor) -> Tensor:
        """Unit features of views, whose pixels may leave [0, 1] and whose size may be any that :meth:`takes` allows."""
        return functional.normalize(self.raw_features(pixels))

    @contextmanager
    def counting(self) -> Iterator[Passes]:
        """Count the passes of this thread through this encoder.

        >>> with encoder.counting() as count:                                     # doctest: +SKIP
        ...     features = encoder(pixels)
        >>> count.forward                                                         # doctest: +SKIP
        8.0
        """
        count = Passes()
        token = _counts.set((*_counts.get(), (self, count)))
        try:
            yield count
        finally:
            _counts.reset(token)

    def _count(self, size: int, features: Tensor) -> None:
        """Add features of images of this size to the counts of this thread."""
        counts = [count for encoder, count in _counts.get() if encoder is self]
        if not counts or torch._C._current_graph_task_id() != -1:  # in a backward pass
            return
        passes = len(features) * self.token_fraction(size)
        for count in counts:
            count.forward += passes

        def count_backward(_: Tensor) -> None:
            for count in counts:
                count.backward += passes

        if features.requires_grad:
            features.register_hook(count_backward)

    def encode_in_batches(self, count: int, max_batch: int, views: Callable[[int, int], Tensor]) -> Tensor:
        """Unit features ``[count, dim]`` of the views that ``views(start, stop)`` makes, ``max_batch`` at a time."""

        def encode(start: int) -> Tensor:
            return self.encode_views(views(start, min(start + max_batch, count)))

        starts = range(0, count, max_batch)
        if self.gradients.checkpoint and torch.is_grad_enabled():
            # Noise follows from keys, so views that are made again have the same bits.
            parts = [checkpoint(encode, i, use_reentrant=False, preserve_rng_state=False) for i in starts]
        else:
            parts = [encode(start) for start in starts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def make_and_encode(
        self,
        makers: tuple[ViewMaker, ...],
        *tensors: Tensor,
        max_batch: int,
        then: Callable[..., Tensor] = _unchanged,
        given: tuple[Tensor, ...] = (),
        rows: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Unit features ``[B, len(makers), dim]`` of the views ``make(*tensors)``, for ``max_batch`` images at a time.

        With ``then``, a pure and hashable function, the result is ``then(features, *given)``; rows of ``given`` are
        images too. ``rows`` are the indices of the images to encode, all by default. On an accelerated GPU all of it is
        one CUDA graph, or a few for a large batch; ``share`` is the size of the views as a share of an image's tokens.
        """
        count = tensors[0].shape[0] if rows is None else rows.shape[0]
        most = min(max_batch, int(self.backend.max_rows / share))
        if not self.backend.records(min(count, most), *tensors, *given, share=share):
            if rows is not None:
                tensors, given = (tuple(each.index_select(0, rows) for each in group) for group in (tensors, given))
            if self._takes_one_pass(makers, tensors[0]):
                return self._make_and_compute(makers, then, len(tensors), *tensors, *given)
            return self._encode_each(makers, *tensors, max_batch=max_batch, then=then, given=given)
        # A graph reads the tables of position embeddings, but its replay does not run the code that updates them.
        for size in self._tables:
            self.update_positions(size)
        known = (makers, then, len(tensors))
        compute = self._joint_functions.setdefault(known, partial(self._make_and_compute, *known))
        if count <= most:
            return self.backend(compute, *tensors, *given, rows=rows, share=share)
        rows = torch.arange(count, device=tensors[0].device) if rows is None else rows
        parts = torch.tensor_split(rows, -(-count // most))
        return torch.cat([self.backend(compute, *tensors, *given, rows=part, share=share) for part in parts])

    def _takes_one_pass(self, makers: tuple[ViewMaker, ...], pixels: Tensor) -> bool:
        """True if one pass without a graph encodes all views of these images; overridden where that is faster."""
        return False

    def _encode_each(
        self,
        makers: tuple[ViewMaker, ...],
        *tensors: Tensor,
        max_batch: int,
        then: Callable[..., Tensor] = _unchanged,
        given: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """:meth:`make_and_encode` with one call of the tower per view."""

        def encode(make: ViewMaker) -> Tensor:
            return self.encode_in_batches(
                len(tensors[0]), max_batch, lambda i, k: make(*(tensor[i:k] for tensor in tensors))
            )

        features = self.backend.side_by_side([partial(encode, make) for make in makers], tensors[0])
        return then(torch.stack(features, 1), *given)

    def _make_and_compute(
        self, makers: tuple[ViewMaker, ...], then: Callable[..., Tensor], count: int, *tensors: Tensor
    ) -> Tensor:
        """:meth:`make_and_encode` of one batch; the first ``count`` tensors are those of the makers."""
        views = [make(*tensors[:count]) for make in makers]
        for view in views:
            if view.shape[-1] != self.image_size:
                self.update_positions(view.shape[-1])
        return then(functional.normalize(torch.stack(self._compute_views(views), 1)), *tensors[count:])

    def _compute_views(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Projected features of views whose sizes differ, in at least fp32; overridden where one pass can do it."""
        return self.backend.side_by_side([partial(self._compute, view) for view in views], views[0])

    def raw_features(self, pixels: Tensor) -> Tensor:
        """Projected features before scaling to unit length, in fp32 (fp64 in a double-precision tower)."""
        self._check_shape(pixels, any_size=True)
        if pixels.shape[-1] != self.image_size:
            self.update_positions(pixels.shape[-1])
        parts = [self.backend(self._compute, part) for part in torch.split(pixels, self._most_at_once(pixels))]
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._count(pixels.shape[-1], features)
        return features

    def _most_at_once(self, pixels: Tensor) -> int:
        """Number of these images to encode at a time."""
        if self.patch_size is None or not pixels.is_cpu:
            return len(pixels)
        return max(1, self.cpu_tokens // self._tokens(pixels.shape[-1], self.patch_size))

    def _compute(self, pixels: Tensor) -> Tensor:
        normalised = self._normalise(pixels)
        if pixels.shape[-1] == self.image_size:
            return at_least_fp32(self._image_features(normalised))
        return at_least_fp32(self._resized_features(normalised, self._tables[pixels.shape[-1]].positions))

    def _normalise(self, pixels: Tensor) -> Tensor:
        return self.backend.normalise(pixels.to(self.mean.device), self.mean, self.std, self.dtype)

    def _image_features(self, normalised: Tensor) -> Tensor:
        features: Tensor = self.tower(normalised)
        return features

    def _resized_features(self, normalised: Tensor, positions: Tensor) -> Tensor:
        """Projected features at another size, with its position embeddings; overridden where there is a patch size."""
        raise NotImplementedError

    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """Unit features of prompts, ``[N, dim]``."""
        return self.text.encode(prompts)

    # ------------------------------------------------------------------ other sizes

    def takes(self, size: int) -> bool:
        """True if :meth:`encode_views` takes square images of this side."""
        resizable = self.patch_size is not None and size > 0 and size % self.patch_size == 0
        return size == self.image_size or resizable

    def size_near(self, share: float) -> int | None:
        """The size in whole patches nearest to a share of ``image_size``; ``None`` if it cannot be encoded.

        ViT-B/16 at 224 pixels has 14 patches a side; a share of 160/224 are 10 of them, 160 pixels.
        """
        if self.patch_size is None:
            return None
        size = self.patch_size * round(share * self.image_size / self.patch_size)
        return size if self.takes(size) else None

    def token_share(self, size: int) -> float:
        """Old name of :meth:`token_fraction`."""
        return self.token_fraction(size)

    def token_fraction(self, size: int) -> float:
        """Tokens of an image of this size (its patches and any class token), divided by those of ``image_size``."""
        if self.patch_size is None or size == self.image_size:
            return 1.0
        return self._tokens(size, self.patch_size) / self._tokens(self.image_size, self.patch_size)

    def _tokens(self, size: int, patch: int) -> int:
        """Tokens of an image of this size."""
        return self.extra_tokens + (size // patch) ** 2

    def update_positions(self, size: int) -> None:
        """Interpolate the position embeddings for a size, unless that was done since the weights last changed."""
        if self.patch_size is None:
            return
        learned = self._learned_positions()
        version = 0 if learned.is_inference() else learned._version
        known = self._tables.get(size)
        if known is not None and known.version == version:
            return
        with torch.inference_mode(False), torch.no_grad():
            positions = interpolate_positions(learned, size // self.patch_size)
            # CUDA graphs hold the address of a table, so new values go into the memory of the old ones.
            positions = positions if known is None else known.positions.copy_(positions)
        self._tables[size] = PositionTable(positions, version)

    def _learned_positions(self) -> Tensor:
        """Position embeddings ``[1 + patches, width]`` at ``image_size``; the first is that of the class token, if any.

        Encoders with a ``patch_size`` override it.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ checks

    def prepare(self, images: Images) -> Tensor:
        """Images (pixels in [0, 1], PIL images, paths or bytes) as checked fp32 or fp64 pixels on this device."""
        pixels, check = self.start_prepare(images)
        check.wait()
        return pixels

    def start_prepare(self, images: Images) -> tuple[Tensor, RangeCheck]:
        """:meth:`prepare` without waiting for the device: the caller waits for the check later."""
        pixels = as_pixels(images, self.preprocessing)
        self._check_shape(pixels)
        check = RangeCheck(pixels)
        pixels = pixels.to(self.device)
        return pixels if pixels.dtype == torch.float64 else pixels.float(), check

    def check(self, pixels: Tensor) -> None:
        """Raise unless these are float pixels in [0, 1] of this encoder's size."""
        self._check_shape(pixels)
        RangeCheck(pixels).wait()

    def _check_shape(self, pixels: Tensor, *, any_size: bool = False) -> None:
        size = self.image_size
        if any_size and pixels.ndim == 4 and self.takes(pixels.shape[-1]):
            size = pixels.shape[-1]
        # `len` would fix the number of images in a graph that is traced through here.
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size) or pixels.shape[0] < 1:
            raise ReactClipError(
                f"pixels have shape {list(pixels.shape)}; {self.name!r} takes [B, 3, {size}, {size}] with B >= 1 (pass "
                "PIL images or paths to have them resized)"
            )
        if not pixels.is_floating_point():
            raise ReactClipError(
                f"pixels have dtype {pixels.dtype}; give floats in [0, 1] (uint8 images: x.float() / 255)"
            )

    # ------------------------------------------------------------------ acceleration and identity

    def accelerate(self) -> Self:
        """From now on use CUDA graphs for small batches and Triton kernels, on a GPU.

        Kernels are compiled when they are first needed, in a second or two each. For encoders whose weights stay:
        moving or converting an encoder drops its graphs, but weights that change otherwise may not be noticed.
        """
        self.backend = AcceleratedBackend()
        if kernels_work(self.device):
            fuse_operations(self.tower)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to`, `cuda`, `float` and the like end here; weights get new addresses.
        self.backend.reset()
        self._tables.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def fingerprint(self) -> str:
        """Short identity, for cache keys: a hash over samples of every parameter, and how images are prepared."""
        digest = hashlib.sha256(str(self.dtype).encode())
        if self.preprocessing != Preprocessing.paper(self.image_size):
            digest.update(str(self.preprocessing).encode())
        for name, parameter in self.tower.named_parameters():
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)].float().cpu()
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()[:16]

    def extra_repr(self) -> str:
        """One line: name, size, dtype, device."""
        sizes = f"image_size={self.image_size}, dim={self.dim}"
        return f"name={self.name!r}, {sizes}, dtype={self.dtype}, device={self.device}"


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Interpolated position embeddings, and the version of the learned ones that they were computed from."""

    positions: Tensor
    version: int


def interpolate_positions(positions: Tensor, side: int) -> Tensor:
    """Position embeddings ``[1 + side * side, width]`` of a grid with another side, by bicubic interpolation.

    This is how transformers interpolates them, but always in at least fp32; a class token, which comes first, keeps its
    own.
    """
    old_side = math.isqrt(len(positions))
    extra = len(positions) - old_side**2
    first, grid = positions[:extra], positions[extra:]
    planes = at_least_fp32(grid).T.reshape(1, -1, old_side, old_side)
    planes = F.interpolate(planes, size=(side, side), mode="bicubic", align_corners=False)
    return torch.cat([first, planes[0].flatten(1).T.to(positions.dtype)])


def embed_patches(normalised: Tensor, patches: nn.Conv2d, class_embedding: Tensor) -> Tensor:
    """Tokens ``[B, 1 + patches, width]`` of normalised pixels: the class token and the patches, without positions.

    Patches do not overlap, so the convolution is one matrix product, which a GPU computes faster.
    """
    images, channels, height, _ = normalised.shape
    side, rows = patches.kernel_size[0], height // patches.kernel_size[0]
    # Patches row by row; in a patch channels, rows, then columns, as in the weights.
    grid = normalised.reshape(images, channels, rows, side, rows, side).permute(0, 2, 4, 1, 3, 5)
    tokens = F.linear(grid.flatten(3).flatten(1, 2), patches.weight.flatten(1), patches.bias)
    first = class_embedding.to(tokens.dtype).expand(tokens.shape[0], 1, -1)
    return torch.cat([first, tokens], 1)


def read_similarity(model: Any) -> functional.Similarity:
    """Scale and bias of a model of transformers or open_clip; a bias means a sigmoid for each label (SigLIP).

    Read it before the model is cast: in half precision the scale would be off by up to 1 %.
    """
    scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
    if scale is None:
        return functional.Similarity()
    return functional.Similarity(
        float(scale.detach().exp()), 0.0 if bias is None else float(bias.detach()), bias is not None
    )
