"""The image encoder: float pixels in [0, 1] in, unit fp32 features out, with the normalisation inside."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from react_clip import functional
from react_clip.accelerate import Function, Graphs
from react_clip.encoders.layers import AddNorm, can_compile
from react_clip.encoders.text import TextTower, at_least_fp32
from react_clip.encoders.vision import VisionTower
from react_clip.errors import ReactClipError
from react_clip.preprocess import Images, Preprocessing, as_pixels, check_range, layout

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


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
    wrong.

    Args:
        tower: from normalised pixels to projected features; it is put into evaluation mode and frozen.
        name: by which :func:`react_clip.load` finds it.
        image_size: side of the pixels in, S.
        dim: length of a feature.
        mean: what is subtracted from each of the three channels.
        std: what each channel is divided by then.
        patch_size: side of a patch, for towers that take any size in whole patches; ``None`` for one size only.
        class_token: whether such a tower has a token beside those of the patches.
        preprocessing: from images to pixels; the paper's by default.
        similarity: from cosines to probabilities; CLIP's softmax at a scale of 100 by default.
        text: the text tower of the same model; ``None`` where there is none.
    """

    mean: Tensor
    std: Tensor
    cpu_tokens = 1600
    """Most tokens that a CPU encodes at a time, so that a larger batch needs no more memory."""
    most_packed = 16
    """Images in the largest batch on a GPU whose views of several sizes share a pass; on a CPU it is one."""

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
        class_token: bool = True,
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
        self.class_token = class_token
        self.preprocessing = preprocessing or Preprocessing.paper(image_size)
        self.similarity = similarity or functional.Similarity()
        self._text = text if text is None else text.eval().requires_grad_(False)
        self._graphs: Graphs | None = None
        self._modules_of_tower: list[nn.Module] = []
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the tower."""
        return self.mean.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the tower; features are fp32 in every case (fp64 in a double-precision tower)."""
        return next(self.tower.parameters(), self.mean).dtype

    @property
    def feature_space(self) -> str:
        """The model whose feature space this is: a finetuned image tower keeps that of the model it started from."""
        return self.weights.partition("+")[0]

    # ------------------------------------------------------------------ text

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
                "folder of photos (from_folder) or names of the label table"
            )
        return self._text

    def __dir__(self) -> list[str]:
        # torch.jit reads every attribute that is listed.
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in names if name != "text" or self.has_text]

    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """Unit features of prompts, ``[N, dim]``."""
        return self.text.encode(prompts)

    # ------------------------------------------------------------------ pixels to features

    def forward(self, pixels: Tensor) -> Tensor:
        """Unit features of float pixels ``[B, 3, S, S]`` in [0, 1]."""
        self.check(pixels)
        return self.encode(pixels)

    def encode(self, views: Tensor) -> Tensor:
        """Unit features of views, whose pixels may leave [0, 1] and whose size may be any that :meth:`takes` allows."""
        return self.encode_several([views])[0]

    def encode_several(self, views: list[Tensor]) -> list[Tensor]:
        """:meth:`encode` of views of several sizes; few images share one pass."""
        return self._run(self._unit_features, views)

    def raw(self, pixels: Tensor) -> Tensor:
        """Features of views before scaling to unit length."""
        return self._run(self._features, [pixels])[0]

    def patch_tokens(self, pixels: Tensor) -> Tensor:
        """The patch tokens ``[B, patches, width]`` that the tower has before it projects, in at least fp32."""
        return self._run(self._patch_tokens, [pixels])[0]

    def _patch_tokens(self, pixels: Tensor) -> list[Tensor]:
        tower = self.tower
        if not isinstance(tower, VisionTower):
            raise ReactClipError(f"{self.name!r} gives no patch tokens; a vision transformer of CLIP does")
        return [torch.cat([at_least_fp32(tower.tokens(part)[:, 1:]) for part in self._parts(pixels)])]

    def record(self, function: Function, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """``function(*tensors)``; on an accelerated GPU a small batch without gradients becomes one CUDA graph.

        The function must be pure, hashable and free of host synchronisation, as is one that makes views and calls
        :meth:`encode`.
        """
        if self._graphs is None or not self._graphs.take(tensors):
            return function(*tensors)
        modules = self._modules_of_tower
        parameters = [each for module in modules for each in module._parameters.values() if each is not None]
        if torch.is_grad_enabled() and any(each.requires_grad for each in (*tensors, *parameters)):
            return function(*tensors)
        # A graph holds the addresses of the weights.
        state = tuple([each.data_ptr() for each in (self.mean, self.std, *parameters)])
        *outputs, passes = self._graphs.record(_Counted(self, function), tensors, state)
        for count in self._counters():
            count.forward += float(passes)
        return outputs

    def _run(self, function: Function, views: list[Tensor]) -> list[Tensor]:
        """Features of views, checked and counted."""
        for view in views:
            self._check_shape(view, any_size=True)
        features = list(self.record(function, [view.to(self.device) for view in views]))
        for view, each in zip(views, features, strict=True):
            self._count(view.shape[-1], each)
        return features

    def _unit_features(self, *views: Tensor) -> list[Tensor]:
        return [functional.normalize(features) for features in self._features(*views)]

    def _features(self, *views: Tensor) -> list[Tensor]:
        """Projected features of views, in at least fp32."""
        few = max(map(len, views)) <= (self.most_packed if views[0].is_cuda else 1)
        # With gradients each size has a pass of its own, which needs less memory.
        gradients = torch.is_grad_enabled() and any(view.requires_grad for view in views)
        if len(views) > 1 and few and not gradients and isinstance(self.tower, VisionTower):
            return [at_least_fp32(each) for each in self.tower.several([self._normalise(view) for view in views])]
        return [torch.cat([at_least_fp32(self.tower(each)) for each in self._parts(view)]) for view in views]

    def _parts(self, pixels: Tensor) -> Iterator[Tensor]:
        """Normalised pixels of the images to encode at a time."""
        most = len(pixels)
        if self.patch_size is not None and pixels.is_cpu:
            most = max(1, self.cpu_tokens // self._tokens(pixels.shape[-1], self.patch_size))
        return map(self._normalise, torch.split(pixels, most))

    def _normalise(self, pixels: Tensor) -> Tensor:
        return ((pixels - self.mean) / self.std).to(self.dtype)

    # ------------------------------------------------------------------ passes

    @contextmanager
    def counting(self) -> Iterator[Passes]:
        """Count the passes of this thread through this encoder, as in ``with encoder.counting() as count:``."""
        count = Passes()
        token = _counts.set((*_counts.get(), (self, count)))
        try:
            yield count
        finally:
            _counts.reset(token)

    def _counters(self) -> list[Passes]:
        return [count for encoder, count in _counts.get() if encoder is self]

    def _count(self, size: int, features: Tensor) -> None:
        """Add features of images of this size to the counts of this thread."""
        counts = self._counters()
        if not counts or torch._C._current_graph_task_id() != -1:  # in a backward pass
            return
        passes = len(features) * self.token_fraction(size)
        for count in counts:
            count.forward += passes

        def count_backward(_: Tensor) -> None:
            for count in counts:
                count.backward += passes

        if features.requires_grad:
            features.register_hook(count_backward)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ sizes and checks

    def takes(self, size: int) -> bool:
        """True if :meth:`encode` takes square images of this side."""
        resizable = self.patch_size is not None and size > 0 and size % self.patch_size == 0
        return size == self.image_size or resizable

    def size_near(self, fraction: float) -> int | None:
        """The size in whole patches nearest to a fraction of ``image_size``; ``None`` if it cannot be encoded.

        ViT-B/16 at 224 pixels has 14 patches a side; a fraction of 160/224 are 10 of them, 160 pixels.
        """
        if self.patch_size is None:
            return None
        size = self.patch_size * round(fraction * self.image_size / self.patch_size)
        return size if self.takes(size) else None

    def token_fraction(self, size: int) -> float:
        """Tokens of an image of this size (its patches and any class token), divided by those of ``image_size``."""
        if self.patch_size is None or size == self.image_size:
            return 1.0
        return self._tokens(size, self.patch_size) / self._tokens(self.image_size, self.patch_size)

    def _tokens(self, size: int, patch: int) -> int:
        return int(self.class_token) + (size // patch) ** 2

    def prepare(self, images: Images) -> Tensor:
        """Images (pixels in [0, 1], PIL images, paths or bytes) as checked fp32 or fp64 pixels on this device."""
        refuse_forked()
        pixels = as_pixels(images, self.preprocessing)
        self.check(pixels)
        return at_least_fp32(pixels.to(self.device))

    def check(self, pixels: Tensor) -> None:
        """Raise unless these are float pixels in [0, 1] of this encoder's size."""
        self._check_shape(pixels)
        check_range(pixels)

    def _check_shape(self, pixels: Tensor, *, any_size: bool = False) -> None:
        refuse_forked()
        size = self.image_size
        if any_size and pixels.ndim == 4 and self.takes(pixels.shape[-1]):
            size = pixels.shape[-1]
        # `len` would fix the number of images in a graph that is traced through here.
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size) or pixels.shape[0] < 1:
            raise ReactClipError(
                f"pixels have shape {list(pixels.shape)}: got {layout(pixels)}; {self.name!r} takes [B, 3, "
                f"{size}, {size}] with B >= 1, floats in [0, 1] (pass PIL images, uint8 arrays or paths to have them "
                "resized)"
            )
        if not pixels.is_floating_point():
            raise ReactClipError(
                f"pixels have dtype {pixels.dtype}; give floats in [0, 1] (uint8 images: x.float() / 255)"
            )

    # ------------------------------------------------------------------ acceleration and identity

    def accelerate(self) -> Self:
        """From now on use CUDA graphs for small batches and compiled layers, on a GPU.

        Graphs are recorded when a shape is met for the second time. Call it again after replacing modules of the tower.
        """
        self._graphs = Graphs()
        self._modules_of_tower = list(self.tower.modules())
        for module in self._modules_of_tower:
            if isinstance(module, AddNorm):
                module.compiled = can_compile()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to`, `cuda`, `half` and the like end here.
        mean, std = self.mean, self.std
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mean, self.std = mean.to(self.mean.device), std.to(self.std.device)  # in fp32 always
        if self._graphs is not None:
            self._graphs.clear()
        return self

    def fingerprint(self) -> str:
        """Short identity, for cache keys: a hash of everything that changes a feature."""
        # The printed modules lack some numbers, such as the attention heads of transformers.
        numbers = [
            [(name, value) for name, value in sorted(vars(part).items()) if type(value) in (int, float)]
            for part in self.modules()
            if part is not self
        ]
        about = self.image_size, self.patch_size, self.preprocessing, numbers
        digest = hashlib.sha256(f"{self.tower}{self._text}{about}".encode())
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(content)};".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Counted:
    """A function that also returns how many passes it made, as a number on the CPU: replayed graphs count nothing."""

    encoder: Encoder
    function: Function

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        token = _counts.set(())
        try:
            with self.encoder.counting() as count:
                outputs = self.function(*tensors)
        finally:
            _counts.reset(token)
        return [*outputs, torch.tensor(count.forward, device="cpu")]


_first_process: int | None = None
"""The process of the first encoder call; processes that are forked later inherit its number."""


def refuse_forked() -> None:
    """Raise in a process that was forked after its parent had computed: PyTorch's threads would wait forever there."""
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid() and torch.get_num_threads() > 1:
        raise ReactClipError(
            "this process was forked after an encoder had computed, and PyTorch's threads would hang; start it with "
            "multiprocessing.get_context('spawn')"
        )


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
