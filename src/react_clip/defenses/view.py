"""What a defence sees of a batch: images, features of views of them, the classes and a gate.

A view of an image is a copy that was changed: noise added, moved, made smaller. A defence names the views that it wants
(:class:`Copies`) and asks for their features; :class:`Batch` encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from react_clip import linf, noise
from react_clip.defenses.batch import PLAIN_GRADIENTS, Batch, Copies, Gradients, straight_through, unchanged
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

Classes = ZeroShotClassifier | Sequence[ZeroShotClassifier] | None
"""The classes of a batch: one classifier for all images, one per image, or none."""


@dataclass(frozen=True, eq=False)
class Gate:
    """A decision per image ``[B]``."""

    open: Tensor
    margin: Tensor
    """Distance ``[B]`` of the score from the threshold, negative where the gate is closed; infinite without a gate."""


class View(Batch):
    """A batch of images and what a defence may ask about it.

    Args:
        encoder: as for :class:`Batch`, like ``pixels``, ``keys``, ``how`` and ``replay``.
        classes: the classes of all images, of each image, or none.
        skip_unneeded: leave out views that cannot change the answer; ``False`` encodes all views of all images.
        force: opens or closes the gate for every image.
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
        replay: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(encoder, pixels, keys, how, replay)
        if isinstance(classes, Sequence) and len(set(classes)) == 1:
            classes = classes[0]
        self.classes = classes
        self.skip_unneeded, self.force = skip_unneeded, force
        self.image = Copies(unchanged, recordable=True)
        self.decision: Gate | None = None
        self.known_plain: Tensor | None = None

    # ------------------------------------------------------------------ views

    def changed(self, change: Callable[[Tensor], Tensor]) -> Copies:
        """One view per image without random numbers: ``change(images)``."""
        return Copies(change)

    def given(self, images: Tensor) -> Copies:
        """Images ``[B, 3, s, s]`` that are made already."""
        return Copies(lambda _, given: given, values=(images,))

    def drawn(
        self,
        draw: Callable[..., Tensor],
        stream: int | None,
        numbers: range | None = None,
        *values: Tensor,
        count: int = 1,
        recordable: bool = False,
    ) -> Copies:
        """Views ``draw(images, keys, *values)``, one on a branch of each image's random stream (``None``: the stream).

        With ``numbers`` there is a view on each of these branches of that branch. ``values`` are ``[B, ...]``.
        ``count`` and ``recordable`` are explained at :class:`Copies`.
        """
        return Copies(draw, stream, numbers, count, recordable, values)

    def noisy(self, sigma: Tensor | float, stream: int, count: int) -> Copies:
        """``count`` views x + sigma * noise; ``sigma`` is one scale for all images, or one per image ``[B]``."""
        if not isinstance(sigma, Tensor):
            sigma = self.pixels.new_full((len(self),), sigma)
        return self.drawn(noise.noisy_view, stream, range(count), sigma.to(self.pixels.dtype), recordable=True)

    # ------------------------------------------------------------------ features

    @property
    def plain(self) -> Tensor:
        """Unit features of the images ``[B, D]``."""
        if self.known_plain is None:
            self.encode(self.image)
        assert self.known_plain is not None
        return self.known_plain

    def encode(self, copies: Copies, where: Tensor | None = None, instead: Tensor | None = None) -> Tensor:
        """Unit features of the views ``[B, D]``, or ``[B, count, D]`` where an image has several.

        With a mask ``where`` ``[B]`` only its images are encoded. Rows of the others hold ``instead`` ``[B, D]``, by
        default the plain feature, or their own views where these were encoded anyway.
        """
        if where is None or not self.skip_unneeded:
            return self.encode_together(copies)[0]
        rows = where.nonzero().flatten()
        features = self.plain if instead is None else instead
        if not copies.single:
            features = features[:, None].expand(-1, copies.total, -1)
        return features.index_copy(0, rows, self.features((copies,), rows)[0]) if len(rows) else features

    def encode_together(self, *copies: Copies) -> list[Tensor]:
        """Unit features of several views of every image, encoded in the same calls."""
        features = self.features(copies)
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

    def ball(self, eps: float) -> linf.Ball:
        """The L-infinity ball around the images, without gradients."""
        return linf.Ball(self.pixels.detach(), eps)

    def ascend(
        self, objective: Callable[[Tensor], Tensor], start: Tensor, ball: linf.Ball, *, steps: int, step_size: float
    ) -> Tensor:
        """Images ``[B, 3, S, S]`` after sign steps inside a ball, up an objective as in :meth:`gradient`."""
        return linf.ascend(lambda at: self.gradient(objective, at)[1], start, ball, steps=steps, step_size=step_size)

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
        part = View(self.encoder, self.pixels[rows], self.streams[rows], classes, how=self.how)
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
        beyond = score - torch.full_like(score, threshold)
        self.decision = Gate(opened, -beyond if below else beyond)
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

    def rows_of_classes(self) -> Iterator[tuple[ZeroShotClassifier, list[int]]]:
        """Each classifier with the numbers of its images."""
        for clf in dict.fromkeys(self.classifiers):
            yield clf, [row for row, each in enumerate(self.classifiers) if each is clf]

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[B, ..., K]`` of features ``[B, ..., D]``, each image over its own classes; the rest is -inf."""
        if self.classes is None:
            raise ReactClipError("there are no classes, which these logits need; give a classifier with labels")
        if isinstance(self.classes, ZeroShotClassifier):
            return self.classes.logits(features)
        most = max(len(clf.names) for clf in self.classes)
        logits = features.new_full((*features.shape[:-1], most), -torch.inf)
        for clf, rows in self.rows_of_classes():
            logits[rows, ..., : len(clf.names)] = clf.logits(features[rows])
        return logits

    def best(self, features: Tensor) -> Tensor:
        """The best class ``[B]`` of features ``[B, D]``; 0 for all images without classes."""
        if self.classes is None:
            return torch.zeros(len(self), dtype=torch.long, device=self.pixels.device)
        return self.logits(features).argmax(-1)

    def lead(self, features: Tensor, others: Tensor) -> Tensor:
        r"""How far others ``[B, D]`` lie beyond the boundary between their best class b and that of features, a.

        That is :math:`(\cos(o, w_b) - \cos(o, w_a)) / \lVert w_b - w_a \rVert`, a distance ``[B]``; 0 where a is b.
        """
        between = self._class_features(self.best(others)) - self._class_features(self.best(features))
        length: Tensor = torch.linalg.vector_norm(between, dim=-1)
        return (others * between).sum(-1) / length.clamp_min(torch.finfo(length.dtype).tiny)

    def _class_features(self, labels: Tensor) -> Tensor:
        """Unit features ``[B, D]`` of one class of each image ``[B]``."""
        features = self.pixels.new_empty(len(self), self.encoder.dim, dtype=self.classifiers[0].class_features.dtype)
        for clf, rows in self.rows_of_classes():
            features[rows] = clf.class_features[labels[rows]]
        return features

    def instability(self, features: Tensor, others: Tensor, where: Tensor | None = None) -> Tensor:
        """J between the predictions of features ``[B, D]``; NaN outside a mask, and without classes."""
        if self.classes is None:
            return torch.full_like(features[:, 0], torch.nan)
        logits, temperature = (self.logits(features), self.logits(others)), self.how.instability_temperature
        value = self.encoder.similarity.instability(*logits, temperature).to(features.dtype)
        return value if where is None or not self.skip_unneeded else torch.where(where, value, torch.nan)
