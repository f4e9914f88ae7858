r"""SecondLook: our own defence, which looks a second time, at a smaller copy, and corrects the image where they differ.

.. math::
    s = \lVert l - f \rVert + w J(f, l), \qquad s' = \lVert m - f \rVert + w J(f, m)

Here f is the feature of the image, l that of its smaller copy (the look), m that of the image moved a little, and n
that of another moved view with noise. Attacks leave a feature that such changes undo; photos keep theirs.

1. Encode the image and the look. If :math:`s < t_1` and both have the same best class, the answer is f.
2. Otherwise encode the moved view.
3. If :math:`s \ge t_1` and :math:`s' \ge t_2`, the image counts as attacked: encode the noisy view and answer
   :math:`f + \alpha\,(\mathrm{mean}(l, m, n) - f)`.
4. Otherwise, if image and look have different best classes, answer :math:`f + \beta\,(\mathrm{mean}(l, m) - f)`, which
   undoes attacks that stop right behind the boundary between two classes.
5. Otherwise the answer is f.

Most clean photos end at step 1, after one pass and a look that costs half of one. Without classes there is no J and no
best class: the distances decide alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip import functional, noise
from react_clip.augment import Motion, smaller_copy
from react_clip.config import Count, NonNegative, PixelLength
from react_clip.defenses.base import Defended, Defense
from react_clip.defenses.react import Divergence, Logits, divergence_of, logits_of
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

LOOK, MOVED, NOISY, GRAIN = range(4)
"""Branches of an image's random stream: motion of the look (where it is a moved view), motion of the moved view, motion
of the noisy view and its noise."""

BRANCHES = ("keep", "blend", "correct")
"""Names of the branches: steps 1 and 5, step 4, step 3."""
KEEP, BLEND, CORRECT = range(3)

LEAST_PATCHES = 4
"""Fewest patches on a side of the look."""

# The thresholds of the default configuration were measured on these weights.
_CALIBRATED = {
    *("clip-vit-b-16", "openai/clip-vit-base-patch16"),
    *("open_clip:ViT-B-16/openai", "open_clip:ViT-B-16-quickgelu/openai"),
}


@dataclass(frozen=True, eq=False)
class Correction:
    """Features and diagnostics of :meth:`SecondLook.correct`, one row per image; NaN for what was not measured."""

    plain: Tensor
    """Unit features before the correction, ``[B, D]``."""
    features: Tensor
    """Unit features of the answer."""
    closed: Tensor
    """Unit features of the answer if step 3 is left out; measured for all images only without ``lazy``."""
    opened: Tensor
    """Unit features as step 3 corrects them; measured for all images only without ``lazy``."""
    drift: Tensor
    """Distance between the features of image and look."""
    instability: Tensor
    """J between the predictions of image and look; NaN without classes."""
    score: Tensor
    """s, from image and look."""
    moved_score: Tensor
    """s', from image and moved view; NaN where step 1 answered."""
    disagrees: Tensor
    """Mask ``[B]``: where image and look have different best classes."""
    branch: Tensor
    """Index into :data:`BRANCHES`."""
    excess: Tensor
    """The smaller one of s - t1 and s' - t2: an image counts as attacked where it is >= 0."""
    passes: Tensor
    """Encoder passes; a look counts as its share of the tokens of a whole image."""
    look_size: int
    """Side of the look in pixels; that of the image where the look is a moved view."""

    @property
    def gated(self) -> Tensor:
        """Mask ``[B]``: which images were changed."""
        return self.branch != KEEP


@dataclass(frozen=True, eq=False)
class SecondLooked(Defended):
    """Answers of :class:`SecondLook`: ``drift``, ``instability`` and ``score`` are those of image and look."""

    moved_score: Tensor
    """s', from image and moved view; NaN where the moved view was not needed."""
    disagrees: Tensor
    """Mask ``[B]``: where image and look have different best classes."""
    branch: Tensor
    """Index into :data:`BRANCHES`: 0 keeps the feature, 1 blends it with its views, 2 corrects it."""
    look_size: int
    """Side of the look in pixels."""
    look_is_smaller: bool
    """Whether the look was a smaller copy; an encoder that takes one size only looks at a moved view instead."""


class SecondLook(Defense):
    """Compare the image with a smaller copy of itself, and correct it where they differ.

    The thresholds are those of OpenAI's ViT-B/16.

    >>> guard = SecondLook(look_threshold=0.5)
    >>> guard.alpha, guard.sigma, guard.cost()
    (2.0, 0.05, (4, 0))
    >>> SecondLook.from_dict(guard.to_dict()) == guard
    True
    """

    kind = "second_look"
    colour = "#332288"

    look: Annotated[float, Field(gt=0, lt=1)] | None = 160 / 224
    """Size of the look as a share of the image's, rounded to whole patches; ``None`` looks at a moved view of full
    size, as encoders that take one size only do in any case."""
    look_threshold: NonNegative = 0.44
    """t1, the score s from which an image is suspicious."""
    moved_threshold: NonNegative = 0.42
    """t2, the score s' from which a suspicious image counts as attacked."""
    instability_weight: NonNegative = 0.2
    """w, the weight of J in both scores."""
    motion: Motion = field(default_factory=Motion)
    """How views are moved."""
    sigma: PixelLength = 0.05
    """Noise scale of the noisy view."""
    alpha: NonNegative = 2.0
    """Strength of the correction of attacked images."""
    blend: NonNegative = 0.7
    """beta, the strength of the correction where only the best classes differ."""
    lazy: bool = True
    """Skip views that cannot change the answer. ``False`` runs every pass and measures every diagnostic."""
    max_batch: Count = 64
    """Most views in one encoder call."""

    def __post_init__(self) -> None:
        largest = 2.0 + self.instability_weight * functional.MAX_INSTABILITY
        for name in ("look_threshold", "moved_threshold"):
            if getattr(self, name) > largest:
                raise ReactClipError(
                    f"{name} is {getattr(self, name):g}; unit features are at most 2 apart, so no score exceeds "
                    f"{largest:.3g} (by default {getattr(type(self), name):g})"
                )

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes that one image can need; the look counts as a whole pass."""
        return 4, 0

    def check(self, encoder: Encoder) -> None:
        """Raise if the look is not smaller than the image, or has too few patches."""
        self.look_size(encoder)

    def look_size(self, encoder: Encoder) -> int:
        """Side of the look in pixels: that of the image where the look is a moved view of full size."""
        size = None if self.look is None else encoder.size_near(self.look)
        if size is None:
            return encoder.image_size
        patch = encoder.patch_size or size
        if size >= encoder.image_size or size < LEAST_PATCHES * patch:
            sides = f"{size // patch} of the {encoder.image_size // patch} patches a side of {encoder.name!r}"
            raise ReactClipError(
                f"a look of {self.look:.3g} has {sides}; it needs at least {LEAST_PATCHES} and fewer than the image: "
                "change it, or look at a moved view of full size with look=None"
            )
        return size

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """The configuration we ship for an encoder.

        >>> SecondLook.for_encoder("clip-vit-b-16") == SecondLook()
        True
        """
        name = (encoder if isinstance(encoder, str) else encoder.original).partition("@")[0]
        if name not in _CALIBRATED:
            raise ReactClipError(
                f"there are no thresholds of SecondLook for {name!r}: every encoder has its own; run `react-clip "
                f"calibrate PHOTOS --model {name}` on some hundred clean photos and load its result"
            )
        return cls()

    # ------------------------------------------------------------------ the algorithm

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> SecondLooked:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`SecondLooked`.

        ``seed`` is a number, or a secret as ``bytes``. Motion and noise depend on it and on the image alone.
        """
        encoder = clf.encoder
        pixels, check = encoder.start_prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            keys = noise.stream_keys(pixels, seed)
            out = self.correct(encoder, pixels, keys, divergence_of(clf), logits_of(clf), wait=check.wait)
            nan = torch.full_like(out.drift, torch.nan)
            return SecondLooked(
                features=out.features,
                logits=clf.logits(out.features),
                drift_low=nan,
                drift_high=nan,
                drift=out.drift,
                instability=out.instability,
                score=out.score,
                gated=out.gated,
                sigma=nan,
                passes=out.passes,
                backward_passes=torch.zeros_like(out.branch),
                class_names=clf.names,
                moved_score=out.moved_score,
                disagrees=out.disagrees,
                branch=out.branch,
                look_size=out.look_size,
                look_is_smaller=out.look_size < encoder.image_size,
            )

    def correct(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor,
        divergence: Divergence | None = None,
        logits: Logits | None = None,
        *,
        wait: Callable[[], None] = lambda: None,
    ) -> Correction:
        """The defence of images that may have different class lists, or none.

        Args:
            encoder: the image encoder.
            pixels: ``[B, 3, S, S]`` in [0, 1], checked, on the encoder's device.
            keys: random stream of each image, ``[B]``, from :func:`react_clip.noise.stream_keys`.
            divergence: measures J of the rows it is given, each over its own classes; without it J counts as 0.
            logits: the logits of rows over their own classes; without it no best classes are compared.
            wait: called before the first decision, while a GPU may still be at work.
        """
        streams = noise.fork(keys, torch.arange(GRAIN + 1, device=keys.device)[:, None])  # one row per purpose: [4, B]
        everyone, look_size = torch.arange(len(pixels), device=pixels.device), self.look_size(encoder)

        # Step 1: the image and the look.
        plain = self._encode(encoder, everyone, lambda rows: pixels[rows])
        if look_size < encoder.image_size:
            look = self._encode(encoder, everyone, lambda rows: smaller_copy(pixels[rows], look_size))
        else:
            look = self._encode(encoder, everyone, lambda rows: self._moved(encoder, pixels, streams[LOOK], rows))
        drift = functional.drift(plain, look)
        instability, score = self._score(everyone, plain, look, divergence)
        disagrees = _different_answers(everyone, plain, look, logits)
        suspicious = score >= self.look_threshold
        passes = torch.full_like(score, 1.0 + encoder.token_share(look_size), dtype=torch.float32)
        wait()

        # Step 2: the moved view.
        rows = (suspicious | disagrees).nonzero().flatten() if self.lazy else everyone
        moved, moved_score = plain, torch.full_like(score, torch.nan)
        if len(rows):
            views = self._encode(encoder, rows, lambda rows: self._moved(encoder, pixels, streams[MOVED], rows))
            moved = moved.index_copy(0, rows, views)
            moved_score = moved_score.index_copy(0, rows, self._score(rows, plain[rows], views, divergence)[1])
            passes[rows] += 1.0

        # Step 4 first, because step 3 replaces it.
        blended = functional.extrapolate(plain, torch.stack([look, moved]).mean(0), self.blend)
        closed = torch.where(disagrees[:, None], blended, plain)

        # Step 3: the noisy view.
        excess = torch.minimum(score - self.look_threshold, moved_score - self.moved_threshold)
        attacked = excess >= 0
        rows = attacked.nonzero().flatten() if self.lazy else everyone
        opened = plain
        if len(rows):
            noisy = self._encode(encoder, rows, lambda rows: self._noisy(encoder, pixels, streams, rows))
            anchors = torch.stack([look[rows], moved[rows], noisy]).mean(0)
            opened = opened.index_copy(0, rows, functional.extrapolate(plain[rows], anchors, self.alpha))
            passes[rows] += 1.0
        return Correction(
            plain=plain,
            features=torch.where(attacked[:, None], opened, closed),
            closed=closed,
            opened=opened,
            drift=drift,
            instability=instability,
            score=score,
            moved_score=moved_score,
            disagrees=disagrees,
            branch=torch.where(attacked, CORRECT, torch.where(disagrees, BLEND, KEEP)),
            excess=excess,
            passes=passes,
            look_size=look_size,
        )

    # ------------------------------------------------------------------ steps of the algorithm

    def _encode(self, encoder: Encoder, rows: Tensor, views: Callable[[Tensor], Tensor]) -> Tensor:
        """Unit features ``[n, D]`` of one view of each of the rows; ``views`` makes them for some of these rows."""
        return encoder.encode_in_batches(len(rows), self.max_batch, lambda start, stop: views(rows[start:stop]))

    def _moved(self, encoder: Encoder, pixels: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        """Moved views of these rows."""
        return encoder.backend(self.motion, pixels[rows], keys[rows])

    def _noisy(self, encoder: Encoder, pixels: Tensor, streams: Tensor, rows: Tensor) -> Tensor:
        """Moved views of these rows, with noise."""
        views = self._moved(encoder, pixels, streams[NOISY], rows)
        return encoder.backend.noisy_view(views, streams[GRAIN][rows], views.new_full((len(rows),), self.sigma))

    def _score(
        self, rows: Tensor, plain: Tensor, views: Tensor, divergence: Divergence | None
    ) -> tuple[Tensor, Tensor]:
        """J and the score of these rows ``[n]``, from their features and those of a view; without classes J is NaN."""
        drift = functional.drift(plain, views)
        if divergence is None:
            return torch.full_like(drift, torch.nan), drift
        instability = divergence(rows, plain, views)
        return instability, drift + self.instability_weight * instability


def _different_answers(rows: Tensor, plain: Tensor, views: Tensor, logits: Logits | None) -> Tensor:
    """Mask ``[n]``: which rows have different best classes for two features."""
    if logits is None:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    one, other = logits(rows, torch.stack([plain, views], 1).detach()).argmax(-1).unbind(1)
    return one != other
