"""What a defence sees of a batch: images, features of views of them, the classes and a gate.

A view of an image is a copy that was changed: noise added, moved, made smaller. A defence names the views that it wants
(:class:`Copies`) and asks for their features; making them, cutting batches, the gradient mode and counting passes is
done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from react_clip import linf, noise
from react_clip.augment import smaller_copy
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

VIEWS = 128
"""Most views in one encoder call, if it has several images: bounds the memory."""
VIEWS_WITH_GRADIENTS = 64
"""The same where the encoder keeps activations for a backward pass."""
SMALL_BATCH = 16
"""Images that leave most of a GPU idle: encoding one more view of each takes less time than waiting for a decision."""

Result = TypeVar("Result")

Classes = ZeroShotClassifier | Sequence[ZeroShotClassifier] | None
"""The classes of a batch: one classifier for all images, one per image, or none."""


@dataclass(frozen=True)
class Gradients:
    """Gradients through a defence, for an attacker who differentiates it; answers do not depend on these options."""

    checkpoint: bool = False
    """Recompute encoder activations in the backward pass instead of keeping them: one call bounds the memory."""
    detach_sigma: bool = False
    """Treat the noise scale of anchor views as a constant instead of a function of the pixels."""
    instability_temperature: float = 1.0
    """The gradient of J is that of logits divided by this: at CLIP's own scale it vanishes where an answer is clear."""


PLAIN_GRADIENTS = Gradients()


@dataclass(frozen=True, eq=False)
class Copies:
    """Views of each image that can be encoded: ``make(images, *values)`` makes one per row.

    With ``stream`` or ``numbers`` they are drawn at random: ``make(images, keys, *values)``.
    """

    make: Callable[..., Tensor]
    values: tuple[Tensor, ...] = ()
    """What else they depend on, one value per image ``[B, ...]``."""
    stream: int | None = None
    """Branch of an image's random stream; ``None`` for the stream itself."""
    numbers: range | None = None
    """Numbers of the views, each with a branch of that stream; ``None`` for a single view on the stream itself."""

    @property
    def drawn(self) -> bool:
        """True if ``make`` needs random streams."""
        return self.stream is not None or self.numbers is not None

    def views(self, images: Tensor, keys: Tensor | None, values: Sequence[Tensor]) -> Tensor:
        """Views ``[n * count, 3, s, s]`` of images ``[n, 3, S, S]``: those of the first image, then of the second."""
        if keys is None or not self.drawn:
            return self.make(images, *values)
        keys = keys if self.stream is None else noise.fork(keys, self.stream)
        if self.numbers is not None:
            keys = noise.fork(keys[:, None], torch.tensor(self.numbers, device=keys.device)).flatten()
            images, *values = (each.repeat_interleave(len(self.numbers), 0) for each in (images, *values))
        return self.make(images, keys, *values)


@dataclass(frozen=True, eq=False)
class Gate:
    """A decision per image ``[B]``; the gate is open where ``score >= threshold``."""

    score: Tensor
    threshold: Tensor
    open: Tensor


class View:
    """A batch of images and what a defence may ask about it.

    Args:
        encoder: the image encoder.
        pixels: ``[B, 3, S, S]`` in [0, 1], on the encoder's device.
        keys: a seed, or the random stream of each image ``[B]`` (:func:`react_clip.noise.stream_keys`).
        classes: the classes of all images, of each image, or none.
        skip_unneeded: leave out views that cannot change the answer; ``False`` encodes all views of all images.
        how: gradients, where the pixels require them.
        force: opens or closes the gate for every image.
        replay: features of an earlier run of the same defence on the same images, which this run takes over.
    """

    def __init__(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor | noise.Seed,
        classes: Classes = None,
        *,
        skip_unneeded: bool = True,
        how: Gradients = PLAIN_GRADIENTS,
        force: bool | None = None,
        replay: Sequence[Any] = (),
    ) -> None:
        if isinstance(classes, Sequence) and len(set(classes)) == 1:
            classes = classes[0]
        self.encoder, self.classes = encoder, classes
        self.skip_unneeded, self.how, self.force = skip_unneeded, how, force
        self.image = Copies(lambda images: images)
        self.decision: Gate | None = None
        with torch.inference_mode(False):  # defences take gradients and count in place, which inference mode forbids
            self.pixels = pixels.clone() if pixels.is_inference() else pixels
            self.passes, self.backward_passes = torch.zeros(2, len(pixels), device=pixels.device)
        self.known_plain: Tensor | None = None
        self.recorded: list[Any] = []
        """Features and gradients of this run, kept if its gate is forced."""
        self._keys = keys
        self._replay = list(replay)
        self._early: dict[Copies, Tensor] = {}

    def __len__(self) -> int:
        return len(self.pixels)

    # ------------------------------------------------------------------ views

    def changed(self, change: Callable[[Tensor], Tensor]) -> Copies:
        """One view per image without random numbers: ``change(images)``."""
        return Copies(change)

    def given(self, images: Tensor) -> Copies:
        """Images ``[B, 3, s, s]`` that are made already."""
        return Copies(lambda _, given: given, (images,))

    def smaller(self, size: int) -> Copies:
        """Copies of ``size`` pixels a side."""
        return self.changed(lambda images: smaller_copy(images, size))

    def drawn(
        self, draw: Callable[..., Tensor], stream: int | None, numbers: range | None = None, *values: Tensor
    ) -> Copies:
        """Views ``draw(images, keys, *values)``, one on a branch of each image's random stream (``None``: the stream).

        With ``numbers`` there is a view on each of these branches of that branch. ``values`` are ``[B, ...]``.
        """
        return Copies(draw, values, stream, numbers)

    def noisy(self, sigma: Tensor | float, stream: int, count: int) -> Copies:
        """``count`` views x + sigma * noise; ``sigma`` is one scale for all images, or one per image ``[B]``."""
        if not isinstance(sigma, Tensor):
            sigma = self.pixels.new_full((len(self),), sigma)
        sigma = (sigma.detach() if self.how.detach_sigma else sigma).to(self.pixels.dtype)
        return self.drawn(noise.noisy_view, stream, range(count), sigma)

    def keys(self, stream: int) -> Tensor:
        """A branch of the random stream of each image ``[B]``."""
        return noise.fork(self._streams(None), stream)

    # ------------------------------------------------------------------ features

    @property
    def plain(self) -> Tensor:
        """Unit features of the images ``[B, D]``."""
        if self.known_plain is None:
            self.encode(self.image)
        assert self.known_plain is not None
        return self.known_plain

    def encode(self, copies: Copies, where: Tensor | None = None, instead: Tensor | None = None) -> Tensor:
        """Unit features of the views ``[B, D]``, or ``[B, count, D]`` where they have numbers.

        With a mask ``where`` ``[B]`` only its images are encoded. Rows of the others hold ``instead`` ``[B, D]``, by
        default the plain feature, or their own views where these were encoded anyway.
        """
        if copies in self._early:
            return self._early[copies]
        if where is None or not self.skip_unneeded:
            return self.encode_together(copies)[0]
        rows = where.nonzero().flatten()
        features = self.plain if instead is None else instead
        if copies.numbers is not None:
            features = features[:, None].expand(-1, len(copies.numbers), -1)
        return features.index_copy(0, rows, self._features((copies,), rows)[0]) if len(rows) else features

    def encode_together(self, *copies: Copies, soon: Copies | None = None) -> list[Tensor]:
        """Unit features of several views of every image, encoded in the same calls.

        ``soon`` will be asked for next, for some images: small batches on a GPU, and runs that skip nothing, encode it
        in these calls for all of them.
        """
        idle = self.pixels.is_cuda and len(self) <= SMALL_BATCH and not isinstance(self._keys, bytes)
        if soon is not None and (idle or not self.skip_unneeded):
            *features, self._early[soon] = self._features((*copies, soon))
        else:
            features = self._features(copies)
        if self.image in copies:
            self.known_plain = features[copies.index(self.image)]
        return features

    def answer_at(self, moved: Tensor, where: Tensor | None = None, instead: Tensor | None = None) -> Tensor:
        """Unit features ``[B, D]`` of moved images ``[B, 3, S, S]``; the other arguments as in :meth:`encode`.

        For an attacker the movement counts as a constant (BPDA): gradients are taken at the moved pixels.
        """
        if torch.is_grad_enabled():
            moved, where = straight_through(moved, self.pixels), None
        return self.encode(self.given(moved), where, instead)

    def raw(self, images: Tensor) -> Tensor:
        """Features ``[B, D]`` of given images before they are scaled to unit length; without gradients."""
        self.passes += 1
        with torch.no_grad():
            parts = torch.split(images.detach(), VIEWS)
            return self._once((images,), lambda: torch.cat([self.encoder.raw(part) for part in parts]))

    def gradient(self, objective: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        """Raw features of images ``[B, D]``, and the gradient ``[B, 3, S, S]`` of an objective in their pixels.

        ``objective`` maps raw features ``[B, D]`` to values ``[B]``; a value may depend on its own row alone. One
        forward and one backward pass.
        """
        self.passes += 1
        self.backward_passes += 1
        return self._once((at,), lambda: self._gradient(objective, at.detach()))

    def _gradient(self, objective: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for start in range(0, len(at), VIEWS_WITH_GRADIENTS):
            with torch.enable_grad():
                pixels = at[start : start + VIEWS_WITH_GRADIENTS].requires_grad_()
                raw = self.encoder.raw(pixels)
                stop = start + len(raw)
                # The objective sees all rows; those of other parts are zero here, and their values are left out.
                values = objective(F.pad(raw, (0, 0, start, len(at) - stop)))[start:stop]
                gradient = linf.gradient(values, pixels)
            if gradient is None:
                raise ReactClipError(
                    f"features of {self.encoder.name!r} carry no gradient to the pixels, which this defence needs; use "
                    "an encoder that runs in torch, or a defence without gradients such as SecondLook"
                )
            parts.append((raw.detach(), gradient))
        features, gradients = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(gradients)

    def ball(self, eps: float) -> linf.Ball:
        """The L-infinity ball around the images, without gradients."""
        return linf.Ball(self.pixels.detach(), eps)

    # ------------------------------------------------------------------ some of the images

    def only(
        self, where: Tensor, change: Callable[[View, Tensor], tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """New values of ``tensors`` ``[B, ...]`` for the images of a mask; other rows stay as they are.

        ``change(part, rows)`` gets these images as a view of their own and their numbers ``[n]``, and returns the new
        rows ``[n, ...]`` of each tensor.
        """
        rows = where.nonzero().flatten()
        if not len(rows):
            return tensors
        classes = self.classes
        if isinstance(classes, Sequence):
            classes = [classes[row] for row in rows.tolist()]
        part = View(self.encoder, self.pixels[rows], self._streams(rows), classes, how=self.how)
        new = change(part, rows)
        self.passes[rows] += part.passes
        self.backward_passes[rows] += part.backward_passes
        return tuple(old.index_copy(0, rows, each) for old, each in zip(tensors, new, strict=True))

    def gate(self, score: Tensor, threshold: float | None, *, below: bool = False) -> Tensor:
        """Mask ``[B]`` of the images to correct: where the score reaches the threshold, or with ``below`` stays below.

        ``None`` corrects every image. An attacker may open or close the gate (:func:`forced_answers`).
        """
        if threshold is None:
            return torch.ones_like(score, dtype=torch.bool)
        opened = score < threshold if below else score >= threshold
        sign = -1.0 if below else 1.0
        self.decision = Gate(sign * score, torch.full_like(score, sign * threshold), opened)
        return opened if self.force is None else torch.full_like(opened, self.force)

    # ------------------------------------------------------------------ classes

    @property
    def classifiers(self) -> Sequence[ZeroShotClassifier]:
        """The classifier of each image; none without classes."""
        if isinstance(self.classes, ZeroShotClassifier):
            return [self.classes] * len(self)
        return self.classes or []

    @property
    def classifier(self) -> ZeroShotClassifier:
        """The classifier of all images; raises where there is none, or several."""
        if not isinstance(self.classes, ZeroShotClassifier):
            raise ReactClipError("this defence needs the classes, the same for all images of a batch; give one list")
        return self.classes

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[B, ..., K]`` of features ``[B, ..., D]``, each image over its own classes; the rest is -inf."""
        if self.classes is None:
            raise ReactClipError("there are no classes, which these logits need; give a classifier with labels")
        if isinstance(self.classes, ZeroShotClassifier):
            return self.classes.logits(features)
        most = max(len(clf.names) for clf in self.classes)
        logits = features.new_full((*features.shape[:-1], most), -torch.inf)
        for clf in set(self.classes):
            rows = [row for row, each in enumerate(self.classes) if each is clf]
            logits[rows, ..., : len(clf.names)] = clf.logits(features[rows])
        return logits

    def best(self, features: Tensor) -> Tensor:
        """The best class ``[B]`` of features ``[B, D]``; 0 for all images without classes."""
        if self.classes is None:
            return torch.zeros(len(self), dtype=torch.long, device=self.pixels.device)
        return self.logits(features).argmax(-1)

    def instability(self, features: Tensor, others: Tensor, where: Tensor | None = None) -> Tensor:
        """J between the predictions of features ``[B, D]``; NaN outside a mask, and without classes."""
        if self.classes is None:
            return torch.full_like(features[:, 0], torch.nan)
        logits, temperature = (self.logits(features), self.logits(others)), self.how.instability_temperature
        value = self.encoder.similarity.instability(*logits, temperature).to(features.dtype)
        return value if where is None or not self.skip_unneeded else torch.where(where, value, torch.nan)

    # ------------------------------------------------------------------ batches, passes, replay

    def _streams(self, rows: Tensor | None) -> Tensor:
        """Random streams of all images, or of those with these numbers; a seed is hashed with these images alone."""
        if isinstance(self._keys, Tensor):
            return self._keys if rows is None else self._keys[rows]
        if rows is not None:
            return noise.stream_keys(self.pixels[rows], self._keys)
        self._keys = noise.stream_keys(self.pixels, self._keys)
        return self._keys

    def _features(self, copies: tuple[Copies, ...], rows: Tensor | None = None) -> list[Tensor]:
        """Unit features of views of all images, or of those with these numbers ``[n]``."""
        given = tuple(value for each in copies for value in each.values)
        return self._once(given, lambda: self._encode(copies, rows))

    def _once(self, given: tuple[Tensor, ...], compute: Callable[[], Result]) -> Result:
        """The result of ``compute``, or that of the earlier run at this place if it was computed from the same."""
        before, result = self._replay.pop(0) if self._replay else (None, None)
        if before is None or len(before) != len(given) or not all(map(torch.equal, before, given)):
            result = compute()
        if self.force is not None:
            self.recorded.append((given, result))
        return result

    def _encode(self, copies: tuple[Copies, ...], rows: Tensor | None) -> list[Tensor]:
        limit = VIEWS_WITH_GRADIENTS if torch.is_grad_enabled() else VIEWS
        step = max(1, limit // sum(1 if each.numbers is None else len(each.numbers) for each in copies))
        keys = self._streams(rows) if any(each.drawn for each in copies) else None
        parts = []
        for start in range(0, len(self) if rows is None else len(rows), step):
            part = slice(start, start + step)
            arguments = copies, part if rows is None else rows[part], None if keys is None else keys[part]
            if self.how.checkpoint and torch.is_grad_enabled():
                # Noise follows from keys, so views that are made again have the same bits.
                options: Any = {"use_reentrant": False, "preserve_rng_state": False}
                parts.append(checkpoint(self._make_and_encode, *arguments, **options))
            else:
                parts.append(self._make_and_encode(*arguments))
        features, passes = zip(*parts, strict=True)
        self.passes[slice(None) if rows is None else rows] += passes[0]
        return [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*features, strict=True)]

    def _make_and_encode(
        self, copies: tuple[Copies, ...], rows: Tensor | slice, keys: Tensor | None
    ) -> tuple[list[Tensor], float]:
        """Unit features of views of some images, one tensor for each of ``copies``, and the passes of one image."""
        images = self.pixels[rows]
        views = [each.views(images, keys, [value[rows] for value in each.values]) for each in copies]
        features = _encode(self.encoder, views)
        passes = sum(len(each) * self.encoder.token_fraction(each.shape[-1]) for each in views) / len(images)
        numbered = [each.reshape(len(images), -1, each.shape[-1]) for each in features]
        single = [copy.numbers is None for copy in copies]
        return [each[:, 0] if one else each for each, one in zip(numbered, single, strict=True)], passes


def straight_through(values: Tensor, source: Tensor) -> Tensor:
    r"""``values`` with the gradient of ``source`` (BPDA with the identity).

    .. math:: z = v, \qquad \partial z := \partial s

    >>> source = torch.tensor([1.0], requires_grad=True)
    >>> answer = straight_through(torch.tensor([5.0]), 3.0 * source)
    >>> answer.detach(), torch.autograd.grad(answer, source)[0]
    (tensor([5.]), tensor([3.]))
    """
    return values.detach() + (source - source.detach())


def _encode(encoder: Encoder, views: Sequence[Tensor]) -> list[Tensor]:
    """Unit features of views; those of one size are joined."""
    sizes: dict[int, list[Tensor]] = {}
    for each in views:
        sizes.setdefault(each.shape[-1], []).append(each)
    joined = encoder.encode([torch.cat(group) for group in sizes.values()])
    pairs = zip(sizes, joined, strict=True)
    features = {size: list(torch.split(each, [len(view) for view in sizes[size]])) for size, each in pairs}
    return [features[each.shape[-1]].pop(0) for each in views]
