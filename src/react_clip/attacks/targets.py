"""Targets of attacks: a plain model, or a classifier behind a defence.

For an attacker who knows the defence, it gives one of two answers, chosen by a gate:

.. math:: z_{def}(x) = z_{closed}(x) + 1[s(x) \\ge \\tau]\\,[z_{open}(x) - z_{closed}(x)]

Defences that correct through an anchor (ReACT, AOM, Defend-CLIP, SecondLook) show all these parts with gradients. Of
any other defence only the answer is known; if it has no gradient, that of undefended CLIP is used (BPDA with the
identity).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.losses import margin
from react_clip.defenses.base import (
    DefendedModule,
    Defense,
    Priced,
    derived_seed,
    gradients,
    straight_through,
)
from react_clip.defenses.react import ReACT, divergence_of, logits_of
from react_clip.defenses.second_look import SecondLook
from react_clip.encoders.base import Gradients
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

Model = Callable[[Tensor], Tensor]
"""From pixels ``[B, C, H, W]`` in [0, 1] to logits ``[B, K]``."""

Passes = tuple[int, int]
"""Forward and backward passes of the encoder for one image."""


@dataclass(frozen=True, eq=False)
class Target:
    """A model that returns logits ``[B, K]`` for pixels, and the encoder passes that this costs per image."""

    answer: Model
    """Called without gradients."""
    differentiable: Model
    """Called for logits with a gradient to the pixels."""
    answer_passes: Passes = (1, 0)
    gradient_passes: Passes = (1, 1)
    """Passes of :attr:`differentiable` and its backward pass."""


@dataclass(frozen=True, eq=False)
class Draw:
    """Everything an attacker can compute from one draw of the defence's noise; one row per image."""

    labels: Tensor
    clean_features: Tensor
    """Plain features of the images before the attack."""
    closed: Tensor
    """Logits with the gate closed: those of the plain feature, unless the defence corrects there too."""
    opened: Tensor
    """Logits of the corrected feature; for a defence without a gate, its answer."""
    defended: Tensor
    """Logits that the defence answers with."""
    closed_features: Tensor
    opened_features: Tensor
    defended_features: Tensor
    score: Tensor
    """The gate's score s(x); NaN without a gate."""
    drift: Tensor
    """The part r(x) of the score, without the prediction instability."""
    threshold: Tensor
    """The gate opens where the score is at least this; NaN without a gate."""


@dataclass(eq=False)
class DefendedClassifier:
    """A classifier behind a defence. Every call draws new noise; the sequence of draws follows from the seed."""

    clf: ZeroShotClassifier
    defense: Defense
    passes: Passes
    """Most encoder passes that the defence needs for an image."""
    seed: noise.Seed
    how: Gradients = field(default_factory=Gradients)
    draws: int = 0
    """Draws so far."""

    @classmethod
    def of(cls, target: object, seed: noise.Seed, example: Tensor) -> DefendedClassifier:
        """The parts of what :func:`react_clip.as_module` returns; ``example`` is one image ``[1, C, H, W]``."""
        if not isinstance(target, DefendedModule):
            raise ReactClipError(
                f"the target is a {type(target).__name__}, but an attack that knows the defence needs one; give "
                "rc.as_module(clf, defense)"
            )
        return cls(target.clf, target.defense, defense_passes(target.clf, target.defense, example), seed)

    def with_noise(self, label: str) -> DefendedClassifier:
        """The same with a sequence of draws of its own."""
        return replace(self, seed=derived_seed(self.seed, label), draws=0)

    def answer(self, images: Tensor) -> Tensor:
        """Defended logits of one draw."""
        with torch.no_grad():
            return self.defense(self.clf, images, seed=self._next_seed()).logits

    def mean_answer(self, images: Tensor, draws: int) -> Tensor:
        """Mean of the defended logits over several draws."""
        total = self.answer(images)
        for _ in range(draws - 1):
            total = total + self.answer(images)
        return total / draws

    def judge(self, images: Tensor, labels: Tensor, draws: int) -> tuple[Tensor, Tensor]:
        """Over several draws, per image: the share of wrong answers and the mean margin."""
        wrong, loss = torch.zeros(2, len(images), device=images.device)
        for _ in range(draws):
            logits = self.answer(images)
            wrong = wrong + (logits.argmax(1) != labels)
            loss = loss + margin(logits, labels).float()
        return wrong / draws, loss / draws

    def draw(self, pixels: Tensor, labels: Tensor, clean_features: Tensor) -> Draw:
        """One draw with all its parts, differentiable where the pixels require gradients."""
        seed = self._next_seed()
        with gradients(self.clf.encoder, self.how):
            if isinstance(self.defense, ReACT):
                parts = self._anchored_parts(self.defense, pixels, seed)
            elif isinstance(self.defense, SecondLook):
                parts = self._looked_parts(self.defense, pixels, seed)
            else:
                parts = self._other_parts(pixels, seed)
        return Draw(labels, clean_features, **parts)

    def _next_seed(self) -> noise.Seed:
        self.draws += 1
        return derived_seed(self.seed, f"draw {self.draws}")

    def _anchored_parts(self, defense: ReACT, pixels: Tensor, seed: noise.Seed) -> dict[str, Tensor]:
        clf, pixels = self.clf, self.clf.encoder.prepare(pixels)
        # Both branches and the whole score of every image; a defence without a gate has nothing to add.
        complete = defense if defense.tau is None else replace(defense, lazy=False)
        parts = complete.correct(clf.encoder, pixels, noise.stream_keys(pixels, seed), divergence_of(clf))
        return {
            "closed": clf.logits(parts.closed),
            "opened": clf.logits(parts.opened),
            "defended": clf.logits(parts.features),
            "closed_features": parts.closed,
            "opened_features": parts.opened,
            "defended_features": parts.features,
            "score": parts.score,
            "drift": parts.drift,
            "threshold": parts.threshold,
        }

    def _looked_parts(self, defense: SecondLook, pixels: Tensor, seed: noise.Seed) -> dict[str, Tensor]:
        clf, pixels = self.clf, self.clf.encoder.prepare(pixels)
        keys = noise.stream_keys(pixels, seed)
        parts = defense.replace(lazy=False).correct(clf.encoder, pixels, keys, divergence_of(clf), logits_of(clf))
        return {
            "closed": clf.logits(parts.closed),
            "opened": clf.logits(parts.opened),
            "defended": clf.logits(parts.features),
            "closed_features": parts.closed,
            "opened_features": parts.opened,
            "defended_features": parts.features,
            # Two thresholds must be reached; the score of the one that is further away decides.
            "score": parts.excess,
            "drift": parts.drift,
            "threshold": torch.zeros_like(parts.excess),
        }

    def _other_parts(self, pixels: Tensor, seed: noise.Seed) -> dict[str, Tensor]:
        answer = self.defense(self.clf, pixels, seed=seed)
        plain = self.clf.encoder(pixels)
        closed, logits, features = self.clf.logits(plain), answer.logits, answer.features
        if pixels.requires_grad and torch.is_grad_enabled() and not logits.requires_grad:
            logits, features = straight_through(logits, closed), straight_through(features, plain)
        return {
            "closed": closed,
            "opened": logits,
            "defended": logits,
            "closed_features": plain,
            "opened_features": features,
            "defended_features": features,
            "score": answer.score,
            "drift": answer.drift,
            "threshold": torch.full_like(answer.score, torch.nan),
        }


def with_views(defense: Defense, views: int | None, passes: Passes) -> tuple[Defense, Passes]:
    """A cheaper copy of a defence, with at most ``views`` anchor views, and its passes.

    The mean of fewer views has the same expectation, so its gradients point the same way with more noise. Attackers
    may optimise on the copy; results are judged on the defence itself, whose ``passes`` are given.

    >>> from react_clip.defenses import TTC, ReACT
    >>> with_views(ReACT(), 4, (14, 0))[0].views, with_views(ReACT(), None, (14, 0))[0].views
    (4, 10)
    >>> with_views(TTC(), 4, (4, 2)) == (TTC(), (4, 2))
    True
    """
    if views is None or not isinstance(defense, ReACT) or defense.views <= views:
        return defense, passes
    copy = replace(defense, views=views)
    return copy, copy.cost()


def defense_passes(clf: ZeroShotClassifier, defense: Defense, example: Tensor) -> Passes:
    """Most passes that the defence says it needs, or what one that does not say needs on an example."""
    if isinstance(defense, Priced):
        return defense.cost()
    answer = defense(clf, example)
    return int(answer.passes.max()), int(answer.backward_passes.max())


def draw_passes(defense: Defense, passes: Passes) -> Passes:
    """Passes of one :class:`Draw` without gradients; ``passes`` are those of the defence.

    >>> from react_clip.defenses import TTC, ReACT
    >>> draw_passes(ReACT(), (14, 0)), draw_passes(TTC(), (4, 2))  # the plain answer of TTC is extra
    ((14, 0), (5, 2))
    """
    return passes if isinstance(defense, ReACT | SecondLook) else (passes[0] + 1, passes[1])


def gradient_passes(defense: Defense, passes: Passes, checkpoint: bool) -> Passes:
    """Passes of one :class:`Draw` with its gradient; with ``checkpoint`` the encoder runs again in the backward pass.

    >>> from react_clip.defenses import ReACT
    >>> gradient_passes(ReACT(), (14, 0), checkpoint=True)
    (28, 14)
    """
    forward, backward = draw_passes(defense, passes)
    if backward:
        # A defence that optimises is detached; its gradient is that of one plain pass.
        return forward, backward + 1
    return forward * (2 if checkpoint else 1), forward


def times(passes: Passes, count: int) -> Passes:
    """The passes of ``count`` repetitions."""
    return passes[0] * count, passes[1] * count
