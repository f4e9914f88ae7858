r"""SecondLook: our own defence, which looks a second time, at a smaller copy, and corrects the image where they differ.

f is the feature of the image, l that of its smaller copy (the look), and m that of a still smaller copy of the image
moved a little (the moved look). An attack is made for the image as it is, so its effect is smaller in both looks; a
photo keeps its feature in them.

1. Encode the image and the look. If :math:`\lVert l - f \rVert < t` and both have the same best class, answer f.
2. Otherwise encode the moved look.
3. If :math:`\lVert l - f \rVert \ge t`, the image counts as attacked: answer
   :math:`f + \alpha\,(\tfrac12 (l + m) - f)`.
4. Otherwise answer :math:`f + \beta\,(\tfrac12 (l + m) - f)`, which undoes attacks that stop right behind the boundary
   between two classes.

Most clean photos end at step 1, after one pass and a look that costs two thirds of one. Without classes there is no
best class: the distance decides alone. An accelerated GPU (``load(..., compile=True)``) encodes all three views of up
to 16 images at once, which takes less time than waiting for the decision; decision and answers are one graph then.

Its closest relatives are CSR (:mod:`react_clip.defenses.csr`), which gates on the distance to a low-pass copy, and AGC
(:mod:`react_clip.defenses.agc`), which moves the feature through the mean of views.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip import functional
from react_clip.accelerate import HostCopy
from react_clip.augment import Motion
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defended, Defense, answer
from react_clip.defenses.looks import LOOK, MOVED_LOOK, Extrapolation, MovedCopy, SmallerCopy, streams_of, the_image
from react_clip.defenses.react import Logits, logits_of
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

if TYPE_CHECKING:
    from react_clip.defenses.look_calibration import LookCalibration, Photos

Share = Annotated[float, Field(gt=0, lt=1)]

BRANCHES = ("keep", "blend", "correct")
"""Names of the branches: steps 1, 4 and 3."""
KEEP, BLEND, CORRECT = range(3)

AT_ONCE = 16
"""Images in the largest batch whose three views are encoded by one CUDA graph: such a batch leaves most of a GPU idle,
so the moved look of all images takes less time than waiting for the decision and encoding that of some."""

LEAST_PATCHES = 4
"""Fewest patches on a side of the look."""

# The default threshold was measured on these weights.
_CALIBRATED = {
    *("clip-vit-b-16", "openai/clip-vit-base-patch16"),
    *("open_clip:ViT-B-16/openai", "open_clip:ViT-B-16-quickgelu/openai"),
}


@dataclass(frozen=True, eq=False)
class Decision:
    """Result of :meth:`SecondLook.decide`, one row per image."""

    views: Tensor
    """Unit features of image and look, ``[B, 2, D]``; where the moved look was encoded with them, followed by the
    answers of steps 3 and 4, ``[B, 4, D]``."""
    drift: Tensor
    """Distance between the features of image and look."""
    instability: Tensor
    """J between the predictions of image and look, which decides nothing; NaN without classes."""
    disagrees: Tensor
    """Mask ``[B]``: where image and look have different best classes."""
    branch: Tensor
    """Index into :data:`BRANCHES`."""
    missing: tuple[Tensor, HostCopy] | None
    """Indices of the images, those that need a moved look first, and their number, for the host to read; ``None`` where
    all of them have one."""

    @property
    def plain(self) -> Tensor:
        """Unit features before the correction, ``[B, D]``."""
        return self.views[:, 0]


@dataclass(frozen=True, eq=False)
class Correction(Decision):
    """Features and diagnostics of :meth:`SecondLook.correct`, one row per image."""

    features: Tensor
    """Unit features of the answer."""
    closed: Tensor
    """Unit features of the answer if no image counts as attacked."""
    opened: Tensor
    """Unit features of the answer if every image counts as attacked; with ``lazy`` only those of attacked images."""
    passes: Tensor
    """Encoder passes; a look counts as its share of the tokens of a whole image."""

    @property
    def score(self) -> Tensor:
        """The drift, which the threshold is compared with."""
        return self.drift

    @property
    def attacked(self) -> Tensor:
        """Mask ``[B]``: which images count as attacked."""
        return self.branch == CORRECT

    @property
    def gated(self) -> Tensor:
        """Mask ``[B]``: which images were changed."""
        return self.branch != KEEP


@dataclass(frozen=True, eq=False, repr=False)
class SecondLooked(Defended):
    """Answers of :class:`SecondLook`; ``drift`` and ``score`` are the distance between image and look as features."""

    disagrees: Tensor
    """Mask ``[B]``: where image and look have different best classes."""
    branch: Tensor
    """Index into :data:`BRANCHES`: 0 keeps the feature, 1 blends it with its looks, 2 corrects it."""
    look_size: int
    """Side of the look in pixels."""
    look_is_smaller: bool
    """True if the look was a smaller copy; an encoder that takes one size only looks at moved views instead."""


class SecondLook(Defense):
    """Compare the image with a smaller copy of itself, and correct it where they differ.

    The threshold is that of OpenAI's ViT-B/16; :meth:`calibrate` finds that of another encoder, or of your photos.

    >>> guard = SecondLook(threshold=0.45)
    >>> guard.alpha, guard.blend, guard.cost()
    (2.0, 1.0, (3, 0))
    >>> SecondLook.from_dict(guard.to_dict()) == guard
    True
    """

    kind = "second_look"
    colour = "#332288"

    look: Share | None = 176 / 224
    """Size of the look as a share of the image's, rounded to whole patches. ``None`` looks at moved views of full size,
    as encoders that take one size only do in any case."""
    moved_look: Share = 160 / 224
    """Size of the moved look, likewise; that of the look where the encoder cannot take it."""
    threshold: Annotated[float, Field(ge=0, le=2)] = 0.4795
    """t, the distance between the features of image and look from which an image counts as attacked."""
    motion: Motion = field(default_factory=Motion)
    """Motion of the image before the moved look."""
    alpha: NonNegative = 2.0
    """Strength of the correction of attacked images."""
    blend: NonNegative = 1.0
    """beta, the strength of the correction where only the best classes differ; 1 gives the mean of both looks."""
    lazy: bool = True
    """Skip views that cannot change the answer. ``False`` runs every pass."""
    max_batch: Count = 64
    """Most views in one encoder call."""

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes that one image can need; a look counts as a whole pass."""
        return 3, 0

    def check(self, encoder: Encoder) -> None:
        """Raise if a look is not smaller than the image, or has too few patches."""
        self.moved_look_size(encoder)

    def look_size(self, encoder: Encoder) -> int:
        """Side of the look in pixels: that of the image where it is a moved view of full size."""
        size = None if self.look is None else _whole_patches(encoder, self.look)
        return encoder.image_size if size is None else size

    def moved_look_size(self, encoder: Encoder) -> int:
        """Side of the moved look in pixels."""
        look = self.look_size(encoder)
        return look if look == encoder.image_size else _whole_patches(encoder, self.moved_look) or look

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """The configuration we ship for an encoder.

        >>> SecondLook.for_encoder("clip-vit-b-16") == SecondLook()
        True
        """
        name = (encoder if isinstance(encoder, str) else encoder.original).partition("@")[0]
        if name not in _CALIBRATED:
            raise ReactClipError(
                f"there is no threshold of SecondLook for {name!r}: every encoder has its own; measure it on "
                "some hundred clean photos: --calibrate-on PHOTOS, or rc.SecondLook.calibrate(clip, photos).config"
            )
        return cls()

    @classmethod
    def calibrate(cls, clip: ZeroShotClassifier | Encoder, photos: Photos, clean_pass: float = 0.97) -> LookCalibration:
        """The threshold from clean photos of your own, without labels and without an attack.

        Its ``config`` is the defence; see :func:`react_clip.defenses.look_calibration.calibrate`.
        """
        from react_clip.defenses import look_calibration

        encoder = clip.encoder if isinstance(clip, ZeroShotClassifier) else clip
        return look_calibration.calibrate(encoder, photos, base=cls(), clean_pass=clean_pass)

    # ------------------------------------------------------------------ the algorithm

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> SecondLooked:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`SecondLooked`.

        ``seed`` is a number, or a secret as ``bytes``. The motion depends on it and on the image alone.
        """
        encoder = clf.encoder
        pixels, check = encoder.start_prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            keys = seed if isinstance(seed, bytes) else int(seed)  # NumPy's integers are no int
            answers: tuple[Tensor, ...]
            if self._encodes_all(encoder, pixels, keys):
                check.start()  # first, so that its result is there while a GPU still encodes
                views = self._encode(encoder, pixels, keys, at_once=True)
                answers = encoder.backend(_Answers(self, encoder), views, constants=(clf.class_features,))
            else:
                views = self._encode(encoder, pixels, keys, at_once=False)
                decision = self.decide(encoder, views, logits_of(clf))
                check.start()  # a GPU does it while the host learns the decision
                out = self.act(encoder, pixels, keys, decision)
                answers = _answers(out, clf.logits(out.features))
            features, logits, passes, drift, instability, disagrees, branch = answers
            measured = {"drift": drift, "instability": instability, "score": drift, "gated": branch != KEEP}
            defended = answer(clf, features, logits=logits, passes=(passes, 0), **measured)
            check.wait()
            size = self.look_size(encoder)
            return SecondLooked(
                **vars(defended),
                disagrees=disagrees,
                branch=branch,
                look_size=size,
                look_is_smaller=size < encoder.image_size,
            )

    def correct(
        self, encoder: Encoder, pixels: Tensor, keys: Tensor | Seed, logits: Logits | None = None
    ) -> Correction:
        """The defence of images that may have different class lists, or none: :meth:`decide`, then :meth:`act`.

        Args:
            encoder: the image encoder.
            pixels: ``[B, 3, S, S]`` in [0, 1], checked, on the encoder's device.
            keys: random stream of each image, ``[B]``, from :func:`react_clip.noise.stream_keys`, or the seed; then
                only the streams of images that need them are computed.
            logits: the logits of rows over their own classes; without it no best classes are compared and J is NaN.
        """
        views = self._encode(encoder, pixels, keys, at_once=self._encodes_all(encoder, pixels, keys))
        return self.act(encoder, pixels, keys, self.decide(encoder, views, logits))

    def decide(self, encoder: Encoder, views: Tensor, logits: Logits | None) -> Decision:
        """The branch of each image, from the features ``views`` of step 1; it does not wait for a GPU.

        ``views`` are those of image and look ``[B, 2, D]``, or all of :attr:`Decision.views`.
        """
        drift = functional.drift(views[:, 0], views[:, 1])
        both = None if logits is None else _logits_of_both(views, logits)
        disagrees = (
            torch.zeros_like(drift, dtype=torch.bool) if both is None else both[0].argmax(-1) != both[1].argmax(-1)
        )
        branch = torch.where(drift >= self.threshold, CORRECT, disagrees.long())  # KEEP and BLEND are 0 and 1
        # J after the decision: a GPU computes it while the host reads how many images need a moved look.
        missing = _first_and_count(branch != KEEP) if views.shape[1] == 2 else None
        instability = torch.full_like(drift, torch.nan) if both is None else encoder.similarity.instability(*both)
        return Decision(views, drift, instability, disagrees, branch, missing)

    def act(self, encoder: Encoder, pixels: Tensor, keys: Tensor | Seed, decision: Decision) -> Correction:
        """Steps 2 to 4: the moved look of the images that need it, and both answers of these images."""
        if decision.missing is None:
            return self._correction(encoder, decision, decision.views)
        streams = streams_of(pixels, 0 if isinstance(keys, bytes) else keys)
        moved = self._moved_look(encoder, keys)
        # Images without a moved look keep their feature in both answers.
        views = torch.cat([decision.views, decision.views[:, :1].expand(-1, 2, -1)], 1)
        order, count = decision.missing
        rows = order[: int(count.wait())]
        if len(rows):
            if isinstance(keys, bytes):  # hashing on the host is slow: only the images that need it
                streams = streams.index_copy(0, rows, streams_of(pixels.index_select(0, rows), keys))
            corrected = encoder.make_and_encode(
                (moved,),
                *(pixels, streams),
                max_batch=self.max_batch,
                then=Extrapolation(self.alpha, self.blend),
                given=(decision.views,),
                rows=rows,
                share=encoder.token_share(moved.size),
            )
            views = views.index_copy(0, rows, corrected)
        return self._correction(encoder, decision, views)

    def _encodes_all(self, encoder: Encoder, pixels: Tensor, keys: Tensor | Seed) -> bool:
        """True if the moved looks of all images are encoded: where that costs less than waiting for the decision.

        A secret is hashed with the pixels on the host, which costs more.
        """
        in_one_graph = len(pixels) <= AT_ONCE and encoder.backend.records(len(pixels), pixels)
        return not self.lazy or (in_one_graph and not isinstance(keys, bytes))

    def _correction(self, encoder: Encoder, decision: Decision, views: Tensor) -> Correction:
        """The answers of images whose features of image, look, and steps 3 and 4 are ``views``, ``[B, 4, D]``."""
        branch = decision.branch
        plain, _, opened, blended = views.unbind(1)
        closed = torch.where(decision.disagrees[:, None], blended, plain)
        has_moved_look = torch.ones_like(decision.disagrees) if decision.missing is None else branch != KEEP
        two = 1.0 + encoder.token_share(self.look_size(encoder))
        three = two + encoder.token_share(self.moved_look_size(encoder))
        return Correction(
            **vars(decision),
            features=torch.where((branch == CORRECT)[:, None], opened, closed),
            closed=closed,
            opened=opened,
            passes=torch.where(has_moved_look, three, two),
        )

    def _encode(self, encoder: Encoder, pixels: Tensor, keys: Tensor | Seed, *, at_once: bool) -> Tensor:
        """Features of image and look ``[B, 2, D]``; ``at_once`` adds those of steps 3 and 4, ``[B, 4, D]``."""
        size, backend = self.look_size(encoder), encoder.backend
        smaller = size < encoder.image_size
        hashes = isinstance(keys, int)
        look = SmallerCopy(size, backend) if smaller else MovedCopy(self.motion, size, LOOK, hashes, backend)
        tensors = (pixels,) if smaller and not at_once else (pixels, streams_of(pixels, keys))
        if not at_once:
            return encoder.make_and_encode((the_image, look), *tensors, max_batch=self.max_batch)
        views = (the_image, look, self._moved_look(encoder, keys))
        then = Extrapolation(self.alpha, self.blend)
        return encoder.make_and_encode(views, *tensors, max_batch=self.max_batch, then=then)

    def _moved_look(self, encoder: Encoder, keys: Tensor | Seed) -> MovedCopy:
        """The function that makes the moved look."""
        size = self.moved_look_size(encoder)
        return MovedCopy(self.motion, size, MOVED_LOOK, isinstance(keys, int), encoder.backend)


def _first_and_count(mask: Tensor) -> tuple[Tensor, HostCopy]:
    """Indices ``[B]``, those in the mask first, and the number of those."""
    count = HostCopy(mask.sum())
    return mask.argsort(descending=True, stable=True), count


@dataclass(frozen=True)
class _Answers:
    """A function from ``Decision.views`` ``[B, 4, D]`` and class features ``[K, D]`` to the result of :func:`_answers`.

    It depends on tensors alone, so these forty small operations can be one CUDA graph.
    """

    guard: SecondLook
    encoder: Encoder

    def __call__(self, views: Tensor, class_features: Tensor) -> tuple[Tensor, ...]:
        def logits(_: Tensor, features: Tensor) -> Tensor:
            return self.encoder.similarity.logits(features, class_features.to(features.dtype))

        decision = self.guard.decide(self.encoder, views, logits)
        out = self.guard._correction(self.encoder, decision, views)
        return _answers(out, logits(views, out.features))


def _answers(out: Correction, logits: Tensor) -> tuple[Tensor, ...]:
    """Features ``[B, D]``, logits ``[B, K]``, and ``[B]`` each: passes, drift, J, mask of disagreements, branch."""
    return out.features, logits, out.passes, out.drift, out.instability, out.disagrees, out.branch


def _whole_patches(encoder: Encoder, share: float) -> int | None:
    """Size of a look in pixels, or ``None`` if the encoder cannot take it; raises if it has too few or all patches."""
    size = encoder.size_near(share)
    if size is None:
        return None
    patch = encoder.patch_size or size
    if size >= encoder.image_size or size < LEAST_PATCHES * patch:
        sides = f"{size // patch} of the {encoder.image_size // patch} patches a side of {encoder.name!r}"
        raise ReactClipError(
            f"a look of {share:.3g} has {sides}; it needs at least {LEAST_PATCHES} and fewer than the image: change "
            "it, or look at moved views of full size with look=None"
        )
    return size


def _logits_of_both(views: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
    """Logits ``[B, K]`` of the features of images and of their looks."""
    rows = torch.arange(len(views), device=views.device)
    image, look = logits(rows, views[:, :2].detach()).unbind(1)
    return image, look
