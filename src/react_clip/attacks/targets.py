"""Targets of attacks: a plain model, or a classifier behind a defence.

For an attacker who knows the defence, it gives one of two answers, chosen by a gate:

.. math:: z_{def}(x) = z_{closed}(x) + 1[s(x) \\ge \\tau]\\,[z_{open}(x) - z_{closed}(x)]

Defences that correct through an anchor (ReACT, AOM, Defend-CLIP, SecondLook) show all these parts with gradients. Of
any other defence only the answer is known; if it has no gradient, that of undefended CLIP is used (BPDA with the
identity).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.losses import margin
from react_clip.defenses.base import DefendedModule, Defense, derived_seed, gradients, straight_through
from react_clip.defenses.react import ReACT, logits_of
from react_clip.defenses.second_look import SecondLook

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


def with_own_noise(
    defended: DefendedModule, label: str, defense: Defense | None = None, **options: Any
) -> DefendedModule:
    """The defended classifier, or one with another defence, with its own random sequence of noise draws.

    The sequence follows from the label; ``options`` are those of :class:`DefendedModule`.
    """
    chosen, seed = defense or defended.defense, derived_seed(defended.seed, label)
    return DefendedModule(defended.clf, chosen, seed=seed, fresh=True, **options)


@torch.no_grad()
def mean_answer(defended: DefendedModule, images: Tensor, draws: int) -> Tensor:
    """Mean of the defended logits ``[B, K]`` over several draws of the noise."""
    total: Tensor = defended(images)
    for _ in range(draws - 1):
        total = total + defended(images)
    return total / draws


@torch.no_grad()
def judge(defended: DefendedModule, images: Tensor, labels: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Over several draws of the noise, per image ``[B]``: the share of wrong answers and the mean margin."""
    wrong, loss = torch.zeros(2, len(images), device=images.device)
    for _ in range(draws):
        logits = defended(images)
        wrong = wrong + (logits.argmax(1) != labels)
        loss = loss + margin(logits, labels).float()
    return wrong / draws, loss / draws


@dataclass(frozen=True, eq=False)
class Answer:
    """Features ``[B, D]`` and the logits ``[B, K]`` that follow from them."""

    features: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class Draw:
    """Everything an attacker can compute from one draw of the defence's noise; one row per image."""

    labels: Tensor
    clean_features: Tensor
    """Plain features of the images before the attack."""
    closed: Answer
    """With the gate closed: the plain answer, unless the defence corrects there too."""
    opened: Answer
    """With the gate open: the corrected answer; for a defence without a gate, its answer."""
    gated: Tensor
    """Mask ``[B]``: whose gate is open."""
    score: Tensor
    """The gate's score s(x); NaN without a gate."""
    drift: Tensor
    """The part r(x) of the score, without the prediction instability."""
    threshold: Tensor
    """The gate opens where the score is at least this; minus infinity without a gate."""
    targets: Tensor | None = None
    """Class ``[B]`` that a targeted attack wants as the answer."""

    @property
    def defended(self) -> Answer:
        """The answer that the defence gives."""
        opened, closed, gated = self.opened, self.closed, self.gated[:, None]
        features = torch.where(gated, opened.features, closed.features)
        return Answer(features, torch.where(gated, opened.logits, closed.logits))


def take_draw(
    defended: DefendedModule, pixels: Tensor, labels: Tensor, clean_features: Tensor, targets: Tensor | None = None
) -> Draw:
    """One draw with all its parts, differentiable where the pixels require gradients."""
    defense = defended.defense
    with gradients(defended.clf.encoder, defended.how):
        if isinstance(defense, ReACT | SecondLook):
            parts = _anchored_parts(defended, defense, pixels)
        else:
            parts = _other_parts(defended, pixels)
    return Draw(labels, clean_features, targets=targets, **parts)


def _anchored_parts(defended: DefendedModule, defense: ReACT | SecondLook, pixels: Tensor) -> dict[str, Any]:
    clf, pixels = defended.clf, defended.clf.encoder.prepare(pixels)
    keys = noise.stream_keys(pixels, defended.next_seed())
    # Without `lazy` both branches and the whole score of every image are computed.
    parts: Any
    if isinstance(defense, SecondLook):
        parts = defense.replace(lazy=False).correct(clf.encoder, pixels, keys, logits_of(clf))
        # `closed` holds the answer of images below the threshold, blended ones included.
        gate = {"threshold": torch.full_like(parts.score, defense.threshold), "gated": parts.attacked}
    else:
        # Without a gate every image is corrected, so `lazy` skips only views that do not enter the answer.
        complete = defense if defense.tau is None else defense.replace(lazy=False)
        parts = complete.correct(clf.encoder, pixels, keys, logits_of(clf), may_stop=False)
        gate = {"threshold": parts.threshold, "gated": parts.gated}
    return {
        "closed": Answer(parts.closed, clf.logits(parts.closed)),
        "opened": Answer(parts.opened, clf.logits(parts.opened)),
        "score": parts.score,
        "drift": parts.drift,
        **gate,
    }


def _other_parts(defended: DefendedModule, pixels: Tensor) -> dict[str, Any]:
    out, plain = defended.defense(defended.clf, pixels, seed=defended.next_seed()), defended.clf.encoder(pixels)
    closed, opened = Answer(plain, defended.clf.logits(plain)), Answer(out.features, out.logits)
    if pixels.requires_grad and torch.is_grad_enabled() and not out.logits.requires_grad:
        features = straight_through(opened.features, closed.features)
        opened = Answer(features, straight_through(opened.logits, closed.logits))
    return {
        "closed": closed,
        "opened": opened,
        "gated": torch.ones_like(out.gated),
        "score": out.score,
        "drift": out.drift,
        "threshold": torch.full_like(out.score, -torch.inf),
    }


# ---------------------------------------------------------------------- passes


def with_views(defense: Defense, views: int | None) -> Defense:
    """A cheaper copy of a defence, with at most ``views`` anchor views.

    The mean of fewer views has the same expectation, so its gradients point the same way with more noise. Attackers
    may optimise on the copy; results are judged on the defence itself.

    >>> from react_clip.defenses import TTC, ReACT
    >>> with_views(ReACT(), 4).views, with_views(ReACT(), None).views, with_views(TTC(), 4) == TTC()
    (4, 10, True)
    """
    if views is None or not isinstance(defense, ReACT):
        return defense
    return defense.replace(views=min(views, defense.views))


def draw_passes(defense: Defense) -> Passes:
    """Passes of one :class:`Draw` without gradients.

    >>> from react_clip.defenses import TTC, ReACT
    >>> draw_passes(ReACT()), draw_passes(TTC())  # the plain answer of TTC is extra
    ((14, 0), (5, 2))
    """
    forward, backward = defense.cost()
    return (forward, backward) if isinstance(defense, ReACT | SecondLook) else (forward + 1, backward)


def gradient_passes(defense: Defense, checkpoint: bool) -> Passes:
    """Passes of one :class:`Draw` with its gradient; with ``checkpoint`` the encoder runs again in the backward pass.

    >>> from react_clip.defenses import ReACT
    >>> gradient_passes(ReACT(), checkpoint=True)
    (28, 14)
    """
    forward, backward = draw_passes(defense)
    if backward:
        # A defence that optimises is differentiated at its last pass alone.
        return forward, backward + 1
    return forward * (2 if checkpoint else 1), forward


def total(*costs: tuple[Passes, int]) -> Passes:
    """The sum of passes, each with its number of repetitions.

    >>> total(((14, 0), 10), ((1, 1), 2))
    (142, 2)
    """
    return sum(passes[0] * count for passes, count in costs), sum(passes[1] * count for passes, count in costs)
