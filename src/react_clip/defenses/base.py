"""What every defence is: called on a classifier and images, it returns defended answers and says what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from react_clip.encoders.base import Encoder
from react_clip.noise import Seed
from react_clip.preprocess import Images, as_pixels
from react_clip.zeroshot import ZeroShotClassifier


@dataclass(frozen=True, eq=False)
class Defended:
    """Defended answers, one row per image, and why: what was not measured is NaN."""

    features: Tensor
    """Unit features ``[B, D]``, for retrieval too."""
    logits: Tensor
    """``[B, K]``"""
    drift_low: Tensor
    """How far the feature moves under the weak probe noise."""
    drift_high: Tensor
    """The same under the stronger probe noise."""
    drift: Tensor
    """r(x), the relative cross-noise drift."""
    instability: Tensor
    """J(x); NaN where r alone had decided the gate and the augmented pass was saved."""
    score: Tensor
    """s(x) = r + J, with J counted as 0 where it was not needed; ``gated`` is always ``score >= tau``."""
    gated: Tensor
    """Whether the correction was applied."""
    sigma: Tensor
    """Anchor-noise scale the drift maps to."""
    passes: Tensor
    """Encoder forward passes spent on the image."""
    backward_passes: Tensor
    """Encoder backward passes spent on the image (0 for everything optimisation-free)."""
    class_names: tuple[str, ...]

    @property
    def labels(self) -> Tensor:
        """Index of the answer per image, ``[B]``."""
        return self.logits.argmax(-1)

    @property
    def names(self) -> list[str]:
        """The answer per image as a name."""
        return [self.class_names[index] for index in self.labels.tolist()]

    @property
    def probs(self) -> Tensor:
        """Class probabilities ``[B, K]``."""
        return self.logits.softmax(-1)

    def __len__(self) -> int:
        return len(self.features)


@runtime_checkable
class Defense(Protocol):
    """A frozen configuration whose ``repr`` is its id; all randomness comes from ``seed`` and the image."""

    @property
    def name(self) -> str:
        """Short name for tables."""

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for images (pixels in [0, 1], PIL images, paths or bytes)."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""


@runtime_checkable
class Priced(Protocol):
    """A defence that can say what it costs without being run; all of ours can."""

    def cost(self) -> tuple[int, int]:
        """Most forward and backward encoder passes that one image can need."""


def prepare(clf: ZeroShotClassifier, images: Images) -> Tensor:
    """Images as checked pixels on the classifier's device."""
    pixels = as_pixels(images, clf.encoder.image_size)
    clf.encoder.check(pixels)
    pixels = pixels.to(clf.device)
    return pixels if pixels.dtype == torch.float64 else pixels.float()


def unmeasured(pixels: Tensor) -> Tensor:
    """NaN per image: the value of a diagnostic that a defence does not compute."""
    return torch.full((len(pixels),), torch.nan, device=pixels.device)


def answer(
    clf: ZeroShotClassifier,
    *,
    features: Tensor,
    logits: Tensor | None = None,
    passes: Tensor | int,
    backward_passes: Tensor | int = 0,
    score: Tensor | None = None,
    gated: Tensor | None = None,
) -> Defended:
    """The result of a defence that measures neither r nor J; what it does not know is NaN.

    ``logits`` are those of the features unless a defence has its own; a defence without a gate acts on every image.
    """
    count, device = len(features), features.device
    nan = torch.full((count,), torch.nan, device=device)
    return Defended(
        features=features,
        logits=clf.logits(features) if logits is None else logits,
        drift_low=nan,
        drift_high=nan,
        drift=nan,
        instability=nan,
        score=nan if score is None else score,
        gated=torch.ones(count, dtype=torch.bool, device=device) if gated is None else gated,
        sigma=nan,
        passes=_per_image(passes, count, device),
        backward_passes=_per_image(backward_passes, count, device),
        class_names=clf.names,
    )


def _per_image(passes: Tensor | int, count: int, device: torch.device) -> Tensor:
    if isinstance(passes, Tensor):
        return passes.long()
    return torch.full((count,), passes, dtype=torch.long, device=device)


def encode_in_batches(encoder: Encoder, count: int, max_batch: int, views: Callable[[int, int], Tensor]) -> Tensor:
    """Unit features of ``count`` views, in as few, as large calls as allowed; ``views(start, stop)`` builds a range."""
    ranges = [(start, min(start + max_batch, count)) for start in range(0, count, max_batch)]
    return torch.cat([encoder.encode_views(views(start, stop)) for start, stop in ranges])


class DefendedModule(nn.Module):
    """A classifier with its defence as one module from [0, 1] pixels to logits."""

    def __init__(self, clf: ZeroShotClassifier, defense: Defense, seed: Seed) -> None:
        super().__init__()
        self.clf = clf
        self.defense = defense
        self.seed = seed

    def forward(self, pixels: Tensor) -> Tensor:
        """Defended logits; gradients flow through the correction where the pixels ask for them."""
        return self.defense(self.clf, pixels, seed=self.seed).logits


def as_module(clf: ZeroShotClassifier, defense: Defense, *, seed: Seed = 0) -> DefendedModule:
    """The defended classifier as ``nn.Module``: [0, 1] pixels to logits, for any attack library.

    The noise follows the pixels, so every step of an iterative attack meets fresh noise, as it would in deployment.
    """
    return DefendedModule(clf, defense, seed)
