r"""What an attacker sees of a defended classifier: both answers it may give, and what decides between them.

.. math:: z_{def}(x) = z_{closed}(x) + 1[s(x) \ge \tau]\,[z_{open}(x) - z_{closed}(x)]

Every look draws new noise. For defences that correct through an anchor (ReACT, AOM, Defend-CLIP) all parts are worked
out and differentiable; of any other defence only the answer is known, and where that carries no gradient it lends that
of undefended CLIP (BPDA with the identity).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from react_clip import noise
from react_clip.attacks.losses import Loss
from react_clip.defenses.base import Defense, Priced, derived_seed, gradients, straight_through
from react_clip.defenses.react import ReACT, divergence_of
from react_clip.encoders.base import Gradients
from react_clip.zeroshot import ZeroShotClassifier

Price = tuple[int, int]
"""Encoder passes of one image: forward, backward."""


@dataclass(frozen=True, eq=False)
class Look:
    """One draw of the noise, one row per image."""

    closed: Tensor
    """Logits while the gate is closed: those of the plain feature, unless the defence corrects there too."""
    opened: Tensor
    """Logits of the corrected feature; for a defence without a gate simply its answer."""
    defended: Tensor
    """Logits that the defence answers with."""
    closed_features: Tensor
    opened_features: Tensor
    defended_features: Tensor
    score: Tensor
    """What the gate looks at; NaN where there is none."""
    drift: Tensor
    """Its part r(x) without the prediction instability."""
    threshold: Tensor
    """From where on it opens."""


@dataclass(frozen=True, eq=False)
class Tally:
    """How some images fare over several draws."""

    broken: Tensor
    """Share of the draws in which the answer is wrong."""
    loss: Tensor
    """Mean loss of the defended answer."""

    def beats(self, other: Tally) -> Tensor:
        """Where these images are worse for the defence: wrong more often or, as often, by more."""
        return (self.broken > other.broken) | ((self.broken == other.broken) & (self.loss > other.loss))

    def where(self, mask: Tensor, other: Tally) -> Tally:
        """The other's values where ``mask``, these elsewhere."""
        return Tally(
            torch.where(mask, other.broken, self.broken),
            torch.where(mask, other.loss, self.loss),
        )


class Pipeline:
    """A defended classifier under attack; calls are counted, and each draws its own noise from the seed.

    Only :meth:`answer` is what a deployed defence shows; :meth:`look` is what its owner could compute.
    """

    def __init__(
        self, clf: ZeroShotClassifier, defense: Defense, seed: noise.Seed, how: Gradients | None = None
    ) -> None:
        self.clf = clf
        self.defense = defense
        self.seed = seed
        self.how = how or Gradients()
        self.calls = 0

    def next_seed(self) -> noise.Seed:
        """The seed of the next draw."""
        self.calls += 1
        return derived_seed(self.seed, f"draw {self.calls}")

    def answer(self, pixels: Tensor) -> Tensor:
        """Defended logits of a fresh draw, as cheap as the defence is."""
        with torch.no_grad():
            return self.defense(self.clf, pixels, seed=self.next_seed()).logits

    def judge(self, pixels: Tensor, labels: Tensor, loss: Loss, draws: int) -> Tally:
        """How images fare over fresh draws."""
        broken, total = torch.zeros(2, len(pixels), device=pixels.device)
        for _ in range(draws):
            logits = self.answer(pixels)
            broken = broken + (logits.argmax(1) != labels)
            total = total + loss(logits, labels).float()
        return Tally(broken / draws, total / draws)

    def look(self, pixels: Tensor) -> Look:
        """Everything about a fresh draw."""
        seed = self.next_seed()
        with gradients(self.clf.encoder, self.how):
            if isinstance(self.defense, ReACT):
                return self._look_inside(self.defense, pixels, seed)
            return self._look_from_outside(pixels, seed)

    def _look_inside(self, guard: ReACT, pixels: Tensor, seed: noise.Seed) -> Look:
        clf, pixels = self.clf, self.clf.encoder.prepare(pixels)
        # Both branches and the whole score of every image; a defence without a gate has nothing to add.
        complete = guard if guard.tau is None else replace(guard, lazy=False)
        found = complete.correct(clf.encoder, pixels, noise.stream_keys(pixels, seed), divergence_of(clf))
        return Look(
            closed=clf.logits(found.closed),
            opened=clf.logits(found.opened),
            defended=clf.logits(found.features),
            closed_features=found.closed,
            opened_features=found.opened,
            defended_features=found.features,
            score=found.score,
            drift=found.drift,
            threshold=found.threshold,
        )

    def _look_from_outside(self, pixels: Tensor, seed: noise.Seed) -> Look:
        found = self.defense(self.clf, pixels, seed=seed)
        plain = self.clf.encoder(pixels)
        logits, features = found.logits, found.features
        if pixels.requires_grad and torch.is_grad_enabled() and not logits.requires_grad:
            logits = straight_through(logits, self.clf.logits(plain))
            features = straight_through(features, plain)
        return Look(
            closed=self.clf.logits(plain),
            opened=logits,
            defended=logits,
            closed_features=plain,
            opened_features=features,
            defended_features=features,
            score=found.score,
            drift=found.drift,
            threshold=torch.full_like(found.score, torch.nan),
        )


def sketch(defense: Defense, views: int | None) -> Defense:
    """An attacker's own, cheaper copy of a defence: the same with at most that many anchor views.

    The mean of fewer views has the same expectation, so gradients point the same way with more noise. Only what is
    optimised on may be a copy; what counts is judged on the defence itself.

    >>> from react_clip.defenses import TTC, ReACT
    >>> sketch(ReACT(), 4).views, sketch(ReACT(), None).views, sketch(TTC(), 4) == TTC()
    (4, 10, True)
    """
    if views is None or not isinstance(defense, ReACT) or defense.views <= views:
        return defense
    return replace(defense, views=views)


def sketch_passes(defense: Defense, views: int | None, passes: Price) -> Price:
    """Passes of such a copy; ``passes`` are those of the defence itself."""
    copy = sketch(defense, views)
    return passes if copy is defense or not isinstance(copy, Priced) else copy.cost()


def look_price(defense: Defense, passes: Price) -> Price:
    """Passes of one look without gradients; ``passes`` are the defence's own, at most.

    >>> from react_clip.defenses import TTC, ReACT
    >>> look_price(ReACT(), (14, 0)), look_price(TTC(), (4, 2))  # the plain answer of TTC is extra
    ((14, 0), (5, 2))
    """
    return passes if isinstance(defense, ReACT) else (passes[0] + 1, passes[1])


def gradient_price(defense: Defense, passes: Price, checkpoint: bool) -> Price:
    """Passes of one look with its gradient; what is not kept is encoded twice.

    >>> from react_clip.defenses import ReACT
    >>> gradient_price(ReACT(), (14, 0), checkpoint=True)
    (28, 14)
    """
    forward, backward = look_price(defense, passes)
    if isinstance(defense, ReACT):
        return forward * (2 if checkpoint else 1), forward
    # A defence that optimises is detached and lends the gradient of one plain pass.
    return (forward, backward + 1) if backward else (forward * (2 if checkpoint else 1), forward)
