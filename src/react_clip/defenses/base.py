"""Defences: the base class with its one ``__call__``, the result, and what attackers who know a defence compute."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from react_clip.config import Registered, Registry
from react_clip.defenses.batch import PLAIN_GRADIENTS, Gradients, straight_through
from react_clip.defenses.result import Defended
from react_clip.defenses.view import Classes, Gate, View
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.preprocess import Images
from react_clip.secret import Seed, seed_or_secret
from react_clip.zeroshot import ZeroShotClassifier


class Defense(Registered, ABC):
    """A frozen configuration with a ``kind``; its ``repr`` is its id, and all its randomness follows seed and image.

    A subclass defines :meth:`defend`. A class of another package is found by an entry point in the group
    ``react_clip.defenses``, or is written as ``module:Class``; see :mod:`react_clip.config`.
    """

    registry: ClassVar[Registry[Defense]] = Registry("defence", "react_clip.defenses")

    removed: ClassVar[Mapping[str, Any]] = {
        **{"lazy": True, "max_batch": ..., "sequential": None, "jitter": 0.0, "alpha_closed": 0.0}
    }

    @abstractmethod
    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Unit features of the answers ``[B, D]``, and diagnostics with one value per image ``[B]``.

        The diagnostics may hold ``logits`` ``[B, K]`` where the answer is not that of the features.
        """

    def check(self, encoder: Encoder) -> None:
        """Raise if this defence cannot run on an encoder; most defences run on all."""

    @final
    def __call__(
        self, clf: ZeroShotClassifier, images: Images, seed: Seed | None = None, *, secret: bytes | None = None
    ) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        Random numbers depend on the image and on ``secret`` alone, of at least 16 bytes; by default on the secret of
        the process (:func:`react_clip.secret.process_secret`). A public ``seed`` makes them repeatable instead.
        """
        if not isinstance(clf, ZeroShotClassifier):
            raise ReactClipError(f"the first argument is of type {type(clf).__name__}; call guard(classifier, images)")
        key = seed_or_secret(seed, secret)
        return self.run(clf.encoder, clf.encoder.prepare(images), key, clf)

    @final
    def run(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor | Seed,
        classes: Classes = None,
        *,
        skip_unneeded: bool = True,
        how: Gradients = PLAIN_GRADIENTS,
    ) -> Defended:
        """The defence of checked pixels whose classes may differ.

        Args:
            encoder: the image encoder.
            pixels: ``[B, 3, S, S]`` in [0, 1] on the encoder's device.
            keys: a seed, or the random stream of each image ``[B]``, from :func:`react_clip.noise.stream_keys`.
            classes: the classes of all images, of each image, or ``None`` for features alone.
            skip_unneeded: leave out views that cannot change an answer; without, every image takes the same time.
            how: gradients for an attacker, where the pixels require them.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise ReactClipError(
                "a trace would hold the decisions about one image for all; trace the classifier without its defence "
                "(react-clip serve runs both)"
            )
        self.check(encoder)
        return self._answer(View(encoder, pixels, keys, classes, skip_unneeded=skip_unneeded, how=how))

    def _answer(self, x: View) -> Defended:
        differentiable = torch.is_grad_enabled() and x.pixels.requires_grad
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            features, diagnostics = self.defend(x)
            logits = diagnostics.pop("logits", None)
            if logits is None and x.classes is not None:
                logits = x.logits(features)
            if x.decision is not None:
                diagnostics["gate_open"] = x.decision.open
            changed = torch.ones_like(features[:, 0], dtype=torch.bool)
            if x.known_plain is not None:
                changed = (features != x.known_plain).any(1)
        measured = {name: value.detach() for name, value in diagnostics.items()}
        names = [clf.names for clf in x.classifiers]
        return Defended(features, logits, changed, x.passes, x.backward_passes, measured, names, x.encoder.similarity)


class CalibratedDefense(Defense):
    """A defence whose constants are measured for each encoder."""

    constants: ClassVar[Mapping[str, str]]
    """Names of the encoders whose constants the package has, and their file in it; no file for the defaults."""

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """The constants of an encoder; raises where there are none, and says how to measure them."""
        name = (encoder if isinstance(encoder, str) else encoder.weights).partition("@")[0]
        if name in cls.constants:
            file = cls.constants[name]
            return cls.load(Path(str(files("react_clip") / "assets" / "calibrations" / file))) if file else cls()
        raise ReactClipError(
            f"there is no calibration for {name!r} of {cls.__name__}, and every encoder needs its own, from some "
            f"hundred clean photos: `react-clip calibrate PHOTOS --model {name}` writes a file for --config, in Python "
            f"SecondLook.calibrate(clf, photos).config is one; {cls.__name__}() has the constants of its paper, or of "
            "another encoder"
        )


class Undefended(Defense):
    """CLIP without a defence, the reference of every table: one forward pass.

    >>> Undefended()
    Undefended()
    """

    kind = "undefended"
    label = "CLIP"
    colour = "#767676"

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The features of the images."""
        return x.plain, {}


# ---------------------------------------------------------------------- for attackers who know the defence


@dataclass(frozen=True, eq=False)
class Forced:
    """Both answers of a defence, whatever its gate decides, with gradients; one row per image."""

    closed: Defended
    """With the gate closed. For a defence without a gate: the plain answer."""
    opened: Defended
    """With the gate open. For a defence without a gate: its answer."""
    gate: Gate


def forced_answers(
    defense: Defense, clf: ZeroShotClassifier, pixels: Tensor, seed: Seed, how: Gradients = PLAIN_GRADIENTS
) -> Forced:
    """The answers of one draw of the noise with the gate closed and with it open; differentiable in the pixels.

    The defence runs twice, and the second run takes over the features of the first. Answers without a gradient get that
    of undefended CLIP (BPDA with the identity).
    """
    given = clf.encoder, clf.encoder.prepare(pixels), seed, clf
    x = View(*given, skip_unneeded=False, how=how, force=False, replay=())
    first = defense._answer(x)
    if x.decision is not None:
        opened = defense._answer(View(*given, skip_unneeded=False, how=how, force=True, replay=x.recorded))
        return Forced(first, opened, x.decision)
    closed = replace(first, features=x.plain, scores=clf.logits(x.plain))
    if closed.features.requires_grad and not first.logits.requires_grad:
        features = straight_through(first.features, closed.features)
        first = replace(first, features=features, scores=straight_through(first.logits, closed.logits))
    gateless = Gate(torch.ones_like(first.gated), torch.full_like(first.passes, torch.inf))
    return Forced(closed, first, gateless)


class DefendedModule(nn.Module):
    """The defended classifier as a module: [0, 1] pixels to logits, for any attack library.

    The noise follows the pixels, so every step of an iterative attack meets other noise, as it would in deployment.

    Args:
        clf: CLIP with its classes.
        defense: any defence.
        seed: of the noise.
        differentiable: for an attacker who knows the defence: memory stays bounded, and a defence that gives no
            gradients gets those of undefended CLIP (BPDA with the identity).
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
        fresh: bool = False,
    ) -> None:
        super().__init__()
        self.clf = clf
        self.defense = defense
        self.seed = seed
        self.differentiable = differentiable
        self.fresh = fresh
        self.calls = 0

    def next_seed(self) -> Seed:
        """Seed of the next call: always the same, or with ``fresh`` another one for every call."""
        self.calls += 1
        return derived_seed(self.seed, f"draw {self.calls}") if self.fresh else self.seed

    def forward(self, pixels: Tensor) -> Tensor:
        """Defended logits ``[B, K]``; gradients flow through the correction if the pixels require them."""
        encoder = self.clf.encoder
        checked = encoder.prepare(pixels)
        how = Gradients(checkpoint=self.differentiable)
        logits = self.defense.run(encoder, checked, self.next_seed(), self.clf, how=how).logits
        wanted = self.differentiable and torch.is_grad_enabled() and pixels.requires_grad
        return straight_through(logits, self.clf(pixels)) if wanted and not logits.requires_grad else logits


as_module = DefendedModule
"""``as_module(clf, defense)``: classifier and defence as one ``nn.Module`` from [0, 1] pixels to logits."""


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
