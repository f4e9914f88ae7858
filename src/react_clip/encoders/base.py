"""What every encoder is: float pixels in [0, 1] in, unit fp32 features out, normalisation inside."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from react_clip import functional
from react_clip.encoders.memory import ViewMemory
from react_clip.errors import ReactClipError
from react_clip.graphs import Graphs

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Encoder(nn.Module, ABC):
    """A frozen CLIP: ``encoder(pixels)`` gives unit features ``[B, dim]`` in fp32.

    Subclasses say how to run the two towers on what they are given; everything else (checks, normalisation, dtype, unit
    length) happens here once, so that no caller can get the pixel space wrong.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        tower: nn.Module,
        *,
        name: str,
        image_size: int,
        dim: int,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        has_text: bool,
    ) -> None:
        super().__init__()
        self.tower = tower.eval().requires_grad_(False)
        self.name = name
        self.base = name
        """Whose feature space this is: a finetuned image tower keeps that of the model it started from."""
        self.image_size = image_size
        self.dim = dim
        self.has_text = has_text
        self._memory: ViewMemory | None = None
        self._graphs: Graphs | None = None
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    @abstractmethod
    def _image_features(self, normalised: Tensor) -> Tensor:
        """Projected image features of normalised pixels, as the tower gives them."""

    @abstractmethod
    def _text_features(self, prompts: list[str]) -> Tensor:
        """Projected text features, as the tower gives them."""

    @property
    def original(self) -> str:
        """Whose weights these are, hence whose calibration holds: an exported tower is still the one it came from."""
        return self.name

    @property
    def device(self) -> torch.device:
        """Where the tower lives."""
        return next(self.tower.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the tower computes in; features are fp32 all the same."""
        return next(self.tower.parameters()).dtype

    def forward(self, pixels: Tensor) -> Tensor:
        """Unit features of float pixels ``[B, 3, S, S]`` in [0, 1]."""
        self.check(pixels)
        return self.encode_views(pixels)

    def encode_views(self, pixels: Tensor) -> Tensor:
        """Unit features of noisy views: the internal door that skips the range check, and only that."""
        if self._memory is None or pixels.requires_grad or pixels.dtype == torch.float64:
            return functional.normalize(self.raw_features(pixels))
        return self._memory.recall(pixels, lambda: functional.normalize(self.raw_features(pixels)))

    @contextmanager
    def remembering(self, memory: ViewMemory) -> Iterator[None]:
        """Within this block, a batch of views that the memory knows is not encoded again."""
        before, self._memory = self._memory, memory
        try:
            yield
        finally:
            self._memory = before

    def raw_features(self, pixels: Tensor) -> Tensor:
        """Projected features before scaling to unit length, in fp32 (fp64 in a double-precision tower)."""
        self._check_shape(pixels)
        if self._graphs is not None and self._graphs.suit(pixels):
            return self._graphs(pixels)[0]
        return self._run(pixels)

    @property
    def graphed(self) -> bool:
        """Whether small batches are answered by CUDA graphs."""
        return self._graphs is not None

    def use_graphs(self, enabled: bool = True) -> Self:
        """Answer small batches on a GPU by CUDA graphs from now on: the same features, several times sooner.

        For encoders that stay as they are: moving or converting one drops its graphs, but weights that somebody
        replaces (rather than changes in place) are not noticed. Elsewhere than on a GPU it changes nothing.
        """
        self._graphs = Graphs(lambda pixels: (self._run(pixels),)) if enabled else None
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `cuda`, `float` and their like end in: tensors get new addresses.
        if self._graphs is not None:
            self._graphs.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _run(self, pixels: Tensor) -> Tensor:
        normalised = (pixels.to(self.mean.device) - self.mean) / self.std
        features = self._image_features(normalised.to(self.dtype))
        return features if features.dtype == torch.float64 else features.float()

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """Unit features of prompts, ``[N, dim]``."""
        if not self.has_text:
            raise ReactClipError(
                f"{self.name!r} has no text tower; use ready class features (ZeroShotClassifier.from_features), a "
                "folder of photos (from_folder) or names of the label bank"
            )
        features = self._text_features(list(prompts))
        return functional.normalize(features if features.dtype == torch.float64 else features.float())

    @torch.no_grad()
    def embed_prompts(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token embeddings ``[N, T, width]`` of prompts and the position of each end token ``[N]``.

        What :meth:`encode_embedded` reads: whoever tunes prompts replaces some of the embeddings in between. Position 0
        holds the start token, and T ends with the longest prompt.
        """
        if not self.has_text:
            raise ReactClipError(
                f"{self.name!r} has no text tower, so there are no prompts to embed; use a complete CLIP such as "
                "openai/clip-vit-base-patch32"
            )
        return self._embed_prompts(list(prompts))

    def encode_embedded(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        """Unit features ``[N, dim]`` of embedded prompts; gradients flow to the embeddings, which may be of any dtype.

        Equals :meth:`encode_text` when the embeddings are those of :meth:`embed_prompts`.
        """
        features = self._embedded_features(embeddings.to(self.dtype), ends)
        return functional.normalize(features if features.dtype == torch.float64 else features.float())

    def _embed_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Embeddings and ends, as the tower's tokenizer and table give them."""
        raise self._fixed_prompts()

    def _embedded_features(self, embeddings: Tensor, ends: Tensor) -> Tensor:
        """Projected text features of embeddings without positions, as the tower gives them."""
        raise self._fixed_prompts()

    def _fixed_prompts(self) -> ReactClipError:
        return ReactClipError(
            f"the text tower of {self.name!r} takes no token embeddings (it is not CLIP's causal transformer); use a "
            "complete CLIP such as openai/clip-vit-base-patch32"
        )

    def check(self, pixels: Tensor) -> None:
        """Refuse what is not float pixels in [0, 1] of this encoder's size."""
        self.look_at(pixels)()

    def look_at(self, pixels: Tensor) -> Callable[[], None]:
        """:meth:`check` in two steps: this one looks, the call of what it returns refuses.

        Whoever gives a GPU something to do in between need not let it wait.
        """
        self._check_shape(pixels)
        span = torch.stack(torch.aminmax(pixels.detach())).to("cpu", non_blocking=True)
        sent = torch.cuda.current_stream(pixels.device).record_event() if pixels.is_cuda else None

        def refuse() -> None:
            if sent is not None:
                sent.synchronize()
            low, high = span.tolist()
            # Written so that NaN fails too.
            if not (low >= 0 and high <= 1):
                raise ReactClipError(
                    f"pixels span [{low:.4g}, {high:.4g}]; they must lie in [0, 1] without NaN (divide uint8 images by "
                    "255, and leave CLIP's mean/std normalisation to the encoder)"
                )

        return refuse

    def _check_shape(self, pixels: Tensor) -> None:
        size = self.image_size
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

    def fingerprint(self) -> str:
        """Short identity of the weights, for cache keys: a hash over samples of every parameter."""
        digest = hashlib.sha256(str(self.dtype).encode())
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


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"fp32" | "bf16" | "fp16"`` or a torch dtype.

    >>> resolve_dtype("bf16")
    torch.bfloat16
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ReactClipError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ReactClipError(f"device {device!r} is unknown; use cpu, cuda or cuda:0") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ReactClipError(f"device {device!r} was asked for, but this machine has no CUDA device; use cpu")
    return resolved


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the loaders' own chatter (retries, download notices) out of the user's terminal; errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


QUICK_GELU, GELU = "quick_gelu", "gelu"


def check_activation(name: str, image: str, text: str | None, expected: str | None) -> None:
    """Refuse weights run with another activation than they were trained with: features drift and nothing crashes."""
    for activation in filter(None, (image, text)):
        if activation not in (QUICK_GELU, GELU):
            raise ReactClipError(f"{name!r} asks for activation {activation!r}; CLIP towers use {QUICK_GELU} or {GELU}")
    if text is not None and text != image:
        raise ReactClipError(
            f"{name!r} has activation {image!r} in the image tower but {text!r} in the text tower; correct its "
            "config.json"
        )
    if expected is not None and image != expected:
        raise ReactClipError(
            f"{name!r} holds weights trained with {expected!r} but its configuration says {image!r}; set hidden_act to "
            f"{expected!r} (open_clip: choose the {'-quickgelu' if expected == QUICK_GELU else 'plain'} model)"
        )
