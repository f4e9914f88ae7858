"""The interface of defences: called on a classifier and images, a defence returns answers, diagnostics and costs."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from react_clip import noise
from react_clip.config import Registered, Registry
from react_clip.encoders.base import Encoder, Gradients
from react_clip.functional import Similarity
from react_clip.noise import Seed
from react_clip.optional import require
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    import pandas as pd

MEASUREMENTS = ("drift_low", "drift_high", "drift", "instability", "score", "gated", "sigma")
"""Fields of :class:`Defended` with one number per image that say why it was corrected or not."""


@dataclass(frozen=True, eq=False, repr=False)
class Defended:
    """Defended answers and diagnostics, one row per image; values that were not measured are NaN."""

    features: Tensor
    """Unit features ``[B, D]``. They serve retrieval too, except those of ``ReACT.for_encoder``: its anchors may have
    two of the ten views, which are enough for the answer; ``ReACT.constants_for`` always has all of them."""
    logits: Tensor
    """``[B, K]``"""
    drift_low: Tensor
    """Distance that the feature moves under the weak probe noise."""
    drift_high: Tensor
    """The same under the stronger probe noise."""
    drift: Tensor
    """r(x), the relative cross-noise drift."""
    instability: Tensor
    """J(x); NaN where r alone decides the gate, so that the augmented view was not encoded."""
    score: Tensor
    """s(x) = r + J, with J counted as 0 where it was not measured; ``gated`` is always ``score >= tau``, where tau may
    be shifted per image (``jitter``)."""
    gated: Tensor
    """Mask ``[B]``: which images were corrected."""
    sigma: Tensor
    """Noise scale of the anchor views, from the drift."""
    passes: Tensor
    """Encoder forward passes spent on the image: whole numbers, or floats where views of another size count as their
    share of the tokens."""
    backward_passes: Tensor
    """Encoder backward passes spent on the image (0 for everything optimisation-free)."""
    class_names: tuple[str, ...]
    similarity: Similarity = field(default=Similarity(), kw_only=True)
    """Scale and bias from cosines to logits, and whether probabilities are a softmax or one sigmoid per label."""

    @property
    def labels(self) -> Tensor:
        """The answer per image as an index into ``class_names``, integers ``[B]``; :attr:`names` has the words."""
        return self.logits.argmax(-1)

    @property
    def names(self) -> list[str]:
        """The answer per image as a word; :attr:`labels` has the indices."""
        return [self.class_names[index] for index in self.labels.tolist()]

    @property
    def probs(self) -> Tensor:
        """Class probabilities ``[B, K]``; those of a model with a sigmoid (SigLIP) do not add up to 1."""
        return self.similarity.probabilities(self.logits)

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        """Number of images, the first answers and how many were corrected."""
        shown = ", ".join(self.names[:4]) + (", ..." if len(self) > 4 else "")
        return f"{type(self).__name__}({len(self)} images: {shown}; {int(self.gated.sum())} corrected)"

    def to_dict(self) -> list[dict[str, Any]]:
        """One dictionary of JSON values per image: answer, probability and :data:`MEASUREMENTS`; no features."""
        best = self.probs.max(-1).values.tolist()
        rows = zip(self.names, best, diagnostics(self), strict=True)
        return [{"name": name, "probability": value, **measured} for name, value, measured in rows]

    def to_pandas(self) -> pd.DataFrame:
        """:meth:`to_dict` as a table with one row per image; needs pandas (extra ``eval``)."""
        table: pd.DataFrame = require("pandas", "to_pandas", extra="eval").DataFrame(self.to_dict())
        return table


class Defense(Registered, ABC):
    """A frozen configuration with a ``kind``; its ``repr`` is its id, and all its randomness follows seed and image.

    A class of another package is found by an entry point in the group ``react_clip.defenses``, or is written as
    ``module:Class``; see :mod:`react_clip.config`.
    """

    registry: ClassVar[Registry[Defense]] = Registry("defence", "react_clip.defenses")

    @abstractmethod
    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        ``seed`` is a number, or a secret as ``bytes``.
        """

    @abstractmethod
    def cost(self) -> tuple[int, int]:
        """Most forward and backward encoder passes that one image can need."""

    def check(self, encoder: Encoder) -> None:
        """Raise if this defence cannot run on an encoder; most defences run on all."""


BaseDefense = Defense
"""Earlier name of :class:`Defense`."""


def answer(
    clf: ZeroShotClassifier,
    features: Tensor,
    *,
    passes: tuple[Tensor | int, Tensor | int],
    logits: Tensor | None = None,
    **measured: Tensor,
) -> Defended:
    """The result of a defence; :data:`MEASUREMENTS` that are not given are NaN, and ``gated`` is true for all images.

    ``passes`` are forward and backward passes, each one number for all images or one per image ``[B]``. ``logits`` are
    those of the features by default.
    """
    if logits is None:
        with torch.set_grad_enabled(torch.is_grad_enabled() or features.requires_grad):
            logits = clf.logits(features)

    def column(value: Tensor | float) -> Tensor:
        return value if isinstance(value, Tensor) else torch.full((len(features),), value, device=features.device)

    if "gated" not in measured:
        measured["gated"] = column(True)
    return Defended(
        features=features,
        logits=logits,
        passes=column(passes[0]),
        backward_passes=column(passes[1]),
        class_names=clf.names,
        similarity=clf.encoder.similarity,
        **(dict.fromkeys(MEASUREMENTS, column(torch.nan)) | measured),
    )


Views = Callable[[Tensor, int, Tensor], Tensor]
"""From images ``[N, 3, S, S]``, the view number of the first row and random streams ``[N]`` to one view per image."""


def encode_with_views(
    encoder: Encoder, pixels: Tensor, seed: Seed, make: Views, count: int, max_batch: int
) -> tuple[Tensor, Tensor]:
    """Unit features of images ``[B, D]`` and of ``count`` views of each ``[B, count, D]``.

    ``make`` gets consecutive views: those of the first image, then those of the second, and so on.
    """
    keys = noise.stream_keys(pixels, seed)

    def build(start: int, stop: int) -> Tensor:
        number = torch.arange(start, stop, device=pixels.device)
        image = number // count
        return make(pixels[image], start % count, noise.fork(keys[image], number % count))

    plain = encoder.encode_in_batches(len(pixels), max_batch, lambda start, stop: pixels[start:stop])
    views = encoder.encode_in_batches(len(pixels) * count, max_batch, build)
    return plain, views.reshape(len(pixels), count, -1)


def diagnostics(out: Any) -> list[dict[str, Any]]:
    """:data:`MEASUREMENTS` and passes of each image as JSON values, ``None`` for what was not measured.

    ``out`` is a :class:`Defended`, or a correction that has some of these fields.
    """
    nothing = dict.fromkeys((*MEASUREMENTS, "passes"))
    known = [name for name in nothing if hasattr(out, name)]
    rows = zip(*(getattr(out, name).tolist() for name in known), strict=True)
    return [nothing | {name: value for name, value in zip(known, row, strict=True) if value == value} for row in rows]


class Undefended(Defense):
    """CLIP without a defence, the reference of every table: one forward pass.

    >>> Undefended()
    Undefended()
    """

    kind = "undefended"
    label = "CLIP"
    colour = "#767676"

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 1, 0

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Plain answers."""
        pixels = clf.encoder.prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            features = clf.encoder.encode_views(pixels)
            never = torch.zeros(len(pixels), dtype=torch.bool, device=pixels.device)
            return answer(clf, features, passes=self.cost(), gated=never)


@contextmanager
def gradients(encoder: Encoder, how: Gradients) -> Iterator[None]:
    """Within this block, defences of this encoder are differentiated that way."""
    before, encoder.gradients = encoder.gradients, how
    try:
        yield
    finally:
        encoder.gradients = before


def derived_seed(seed: Seed, label: str) -> Seed:
    """Another seed for every label; those derived from numbers lie above 2**62, so they do not meet seeds of users.

    >>> derived_seed(0, "draw 1") == derived_seed(0, "draw 1"), derived_seed(0, "draw 1") == derived_seed(0, "draw 2")
    (True, False)
    >>> derived_seed(0, "draw 1") >= 2**62
    True
    """
    if isinstance(seed, bytes):
        return hashlib.blake2b(label.encode(), key=hashlib.blake2b(seed).digest(), digest_size=32).digest()
    digest = hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**62 + 2**62


class DefendedModule(nn.Module):
    """The defended classifier as a module: [0, 1] pixels to logits, for any attack library.

    The noise follows the pixels, so every step of an iterative attack meets other noise, as it would in deployment.

    Args:
        clf: CLIP with its classes.
        defense: any defence.
        seed: of the noise.
        differentiable: for an attacker who knows the defence: memory stays bounded (see ``checkpoint``), and a defence
            that gives no gradients gets those of undefended CLIP (BPDA with the identity).
        checkpoint: recompute every encoder call in the backward pass instead of keeping its activations; on where
            ``differentiable`` is.
        detach_sigma: keep the anchor's noise scale out of the gradient.
        instability_temperature: divides the logits that the gradient of J is taken of.
        fresh: every call draws other noise, also for the same pixels, as averaging over draws (EOT) needs; a new
            module with the same seed repeats the same sequence.
    """

    def __init__(
        self,
        clf: ZeroShotClassifier,
        defense: Defense,
        *,
        seed: Seed = 0,
        differentiable: bool = False,
        checkpoint: bool | None = None,
        detach_sigma: bool = False,
        instability_temperature: float = 1.0,
        fresh: bool = False,
    ) -> None:
        super().__init__()
        self.clf = clf
        self.defense = defense
        self.seed = seed
        self.differentiable = differentiable
        checkpoint = differentiable if checkpoint is None else checkpoint
        self.how = Gradients(checkpoint, detach_sigma, instability_temperature)
        self.fresh = fresh
        self.calls = 0

    def next_seed(self) -> Seed:
        """Seed of the next call: always the same, or with ``fresh`` another one for every call."""
        self.calls += 1
        return derived_seed(self.seed, f"draw {self.calls}") if self.fresh else self.seed

    def forward(self, pixels: Tensor) -> Tensor:
        """Defended logits ``[B, K]``; gradients flow through the correction if the pixels require them."""
        with gradients(self.clf.encoder, self.how):
            logits = self.defense(self.clf, pixels, seed=self.next_seed()).logits
        wanted = self.differentiable and torch.is_grad_enabled() and pixels.requires_grad
        return straight_through(logits, self.clf(pixels)) if wanted and not logits.requires_grad else logits


as_module = DefendedModule
"""``as_module(clf, defense)``: classifier and defence as one ``nn.Module`` from [0, 1] pixels to logits."""


def straight_through(defended: Tensor, plain: Tensor) -> Tensor:
    r"""The values of a defence without gradients, with the gradients of undefended CLIP (BPDA with the identity).

    .. math:: z = z_{def}(x), \qquad \partial z / \partial x := \partial z_{CLIP} / \partial x

    >>> plain = torch.tensor([1.0], requires_grad=True)
    >>> answer = straight_through(torch.tensor([5.0]), 3.0 * plain)
    >>> answer.detach(), torch.autograd.grad(answer, plain)[0]
    (tensor([5.]), tensor([3.]))
    """
    return defended.detach() + (plain - plain.detach())
