r"""Noise-anchored feature correction, the operator that ReACT, AOM and Defend-CLIP share.

.. math:: f_{out}(x) = f(x) + g(x)\,\alpha\,[f_{anc}(x) - f(x)], \qquad
          f_{anc}(x) = \tfrac1M \sum_i f(x + \sigma_{corr}(x)\,\eta_i)

Algorithm 2 of the paper, with the gate first: views that cannot change the answer are never encoded. Three stages, each
one large batch and one host synchronisation: clean features and probes; the augmented view of those images whose drift
alone does not decide (J lies in [0, ln 2], so r >= tau opens the gate and r < tau - ln 2 closes it); the M anchor views
of those images whose gate opened, at once or (``sequential``) two first and the others where these settle nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from react_clip import functional, fusing, noise
from react_clip.augment import Choices, WeakAugmentation
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defended, current_gradients, encode_in_batches, look_at
from react_clip.defenses.config import BaseDefense
from react_clip.defenses.lots import Plan
from react_clip.defenses.probing import probe
from react_clip.defenses.sequential import looks, unsettled
from react_clip.defenses.views import GATE, anchor_views
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.mappings import Constant, Linear, Mapping
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

# Options beyond the paper: written out only where they are used, so that configurations without them stay the same.
_BEYOND = {"jitter": 0.0, "alpha_closed": 0.0, "sequential": None}

Keys = Tensor | Callable[[], Tensor]
"""One key an image, or what makes them: they are asked for when a GPU is at work on the clean views already."""

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(rows, features, augmented features) -> J``: how far the predictions of these rows differ, each for its classes."""


def divergence_of(clf: ZeroShotClassifier) -> Divergence:
    """J where all rows are of one classifier."""
    return lambda rows, features, augmented: functional.js_divergence(clf.logits(features), clf.logits(augmented))


Logits = Callable[[Tensor, Tensor], Tensor]
"""``(rows, features [n, k, D]) -> logits [n, k, K]`` of these rows, minus infinity for classes that a row has not."""


def logits_of(clf: ZeroShotClassifier) -> Logits:
    """Logits where all rows are of one classifier."""
    return lambda rows, features: clf.logits(features)


@dataclass(frozen=True, eq=False)
class Decision(functional.PerImage):
    """What the gate decided, one row per image, before any anchor view; the fields are those of :class:`Defended`."""

    plain: Tensor
    """Unit features before the correction."""
    drift_low: Tensor
    drift_high: Tensor
    drift: Tensor
    instability: Tensor
    score: Tensor
    gated: Tensor
    sigma: Tensor
    passes: Tensor
    threshold: Tensor
    """The score from which the gate opens; minus infinity without one."""
    streams: Tensor
    """The keys ``[B, M]`` of the views behind each anchor."""


@dataclass(frozen=True, eq=False)
class Correction(Decision):
    """The decision and what came of it; ``passes`` count the anchor views too."""

    features: Tensor
    """Unit features after the correction; equal to the plain ones where the gate stayed closed."""
    opened: Tensor
    """Unit features as an open gate gives them; the answer's where that was not worked out (``lazy``)."""
    closed: Tensor
    """Unit features as a closed gate gives them; the answer's where that was not worked out."""


class AnchoredDefense(BaseDefense):
    """Fields shared by the defences that correct a feature through a noise anchor; see :class:`ReACT`."""

    sigma_low: float = 0.02
    sigma_high: float = 0.05
    probe_samples: Count = 1
    """Noisy views per probe scale, averaged before the drift is taken. The paper counts one; Defend-CLIP's code ten."""
    views: Count = 10
    """M, the views behind the anchor."""
    alpha: NonNegative = 2.0
    tau: float | None = 0.7
    """Intervention threshold; ``None`` corrects every image."""
    mapping: Mapping = field(default_factory=Linear)
    instability: bool = True
    """Whether J(x) enters the score (ReACT) or the drift decides alone (Defend-CLIP)."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    lazy: bool = True
    """Skip views that cannot change the answer. ``False`` runs every pass and measures every diagnostic."""
    max_batch: Count = 64
    """Most views in one encoder call."""
    jitter: NonNegative = 0.0
    """Half-width of a keyed random shift of tau, image by image: nobody can aim just below the threshold."""
    alpha_closed: NonNegative = 0.0
    """Strength of the correction where the gate is closed; 0 leaves the feature alone."""
    sequential: Annotated[float, Field(ge=0.5, lt=1)] | None = None
    """Draw views only until the best class is final with this confidence (:func:`unsettled`), at most M. ``None`` draws
    all, as suits features for retrieval; so do ``lazy=False`` and callers without classes."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma_low < self.sigma_high <= 1:
            raise ReactClipError(
                f"sigma_low is {self.sigma_low} and sigma_high {self.sigma_high}; they need 0 < sigma_low < "
                "sigma_high <= 1 (the paper's are 0.02 and 0.05)"
            )

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes that one image can need."""
        probes = 2 * self.probe_samples if self._needs_drift else 0
        return 1 + probes + int(self._needs_instability) + self.views, 0

    # ------------------------------------------------------------------ the algorithm

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        ``seed`` is a number, or a secret as ``bytes``. The noise depends on it and on the image alone.
        """
        pixels, refuse = look_at(clf, images)

        def keys() -> Tensor:
            refuse()
            return noise.stream_keys(pixels, seed)

        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            decision = self.decide(clf.encoder, pixels, keys, divergence_of(clf))
            # Before the wait for the gate: most images keep their features, and a GPU is still at work on J.
            logits, backward_passes = clf.logits(decision.plain), torch.zeros_like(decision.passes)
            found = self.act(clf.encoder, pixels, decision, logits_of(clf))
            return Defended(
                features=found.features,
                logits=logits if found.features is decision.plain else clf.logits(found.features),
                drift_low=found.drift_low,
                drift_high=found.drift_high,
                drift=found.drift,
                instability=found.instability,
                score=found.score,
                gated=found.gated,
                sigma=found.sigma,
                passes=found.passes,
                backward_passes=backward_passes,
                class_names=clf.names,
            )

    def correct(
        self, encoder: Encoder, pixels: Tensor, keys: Keys, divergence: Divergence, logits: Logits | None = None
    ) -> Correction:
        """The defence before any class list: images of different classifiers may share a batch.

        Classes enter through J, which ``divergence`` measures for the rows it is given, and, where views are drawn one
        after the other, through the ``logits`` that say when to stop.
        """
        return self.act(encoder, pixels, self.decide(encoder, pixels, keys, divergence), logits)

    def decide(self, encoder: Encoder, pixels: Tensor, keys: Keys, divergence: Divergence) -> Decision:
        """The first half of :meth:`correct`: everything that needs no anchor view."""
        augmentation = self.augmentation if self._needs_instability else None
        plan = Plan(self.probe_samples, self.views, augmentation, pixels.dtype)
        made = cache(lambda: keys if isinstance(keys, Tensor) else keys())
        lots = cache(lambda: plan.draw(made(), recorded=encoder.graphed))
        plain, *probed = self._probe(encoder, pixels, lambda: lots().probes)
        low, high = (functional.drift(plain, mean) for mean in probed)
        drift = functional.relative_drift(low, high)
        threshold = self._threshold(made())
        # What does not depend on J is asked for before the wait for its rows: a GPU is still at work on the probes.
        sigma = self.mapping(drift.detach() if current_gradients().detach_sigma else drift).to(pixels.dtype)
        least = torch.zeros_like(drift) + (-torch.inf if threshold is None else threshold)
        instability = self._measure_instability(encoder, pixels, lots().choices, plain, drift, threshold, divergence)
        score = functional.intervention_score(drift, instability.nan_to_num(0.0))
        probes = 1 + 2 * self.probe_samples if self._needs_drift else 1
        return Decision(
            plain=plain,
            drift_low=low,
            drift_high=high,
            drift=drift,
            instability=instability,
            score=score,
            gated=torch.ones_like(drift, dtype=torch.bool) if threshold is None else score >= threshold,
            sigma=sigma,
            passes=probes + (~instability.isnan()).long(),
            threshold=least,
            streams=lots().anchors,
        )

    def act(self, encoder: Encoder, pixels: Tensor, decision: Decision, logits: Logits | None = None) -> Correction:
        """The second half of :meth:`correct`: the anchor of those images whose feature is to move."""
        plain, gated = decision.plain, decision.gated
        moving = (gated if self.lazy and not self.alpha_closed else torch.ones_like(gated)).nonzero().flatten()
        features = opened = closed = plain
        passes = decision.passes
        with fusing.part_of(pixels):
            for rows, seen in self._rounds(encoder, pixels, decision, moving, logits):
                anchors = functional.anchor(seen)
                moved = functional.extrapolate(plain[rows], anchors, self.alpha)
                still = functional.extrapolate(plain[rows], anchors, self.alpha_closed)
                features = features.index_copy(0, rows, torch.where(gated[rows, None], moved, still))
                opened, closed = opened.index_copy(0, rows, moved), closed.index_copy(0, rows, still)
                passes = passes.index_copy(0, rows, decision.passes[rows] + seen.shape[1])
        found = vars(decision) | {"passes": passes}
        return Correction(**found, features=features, opened=opened, closed=closed)

    def _rounds(
        self, encoder: Encoder, pixels: Tensor, decision: Decision, rows: Tensor, logits: Logits | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and all their anchor views so far: M at once, or two first and all where these settle nothing."""
        stops = self.sequential if self.lazy and logits is not None else None
        counts = [self.views] if stops is None else looks(self.views)
        seen = decision.plain.new_empty(len(rows), 0, decision.plain.shape[1])
        for drawn, count in pairwise([0, *counts]):
            if drawn and stops is not None and logits is not None:
                alpha = torch.where(decision.gated[rows], self.alpha, self.alpha_closed)
                left = unsettled(decision.plain[rows], seen, alpha, partial(logits, rows), self.views, stops)
                rows, seen = rows[left], seen[left]
            if not len(rows):
                return
            chosen = decision.streams[rows, drawn:count]
            fresh = anchor_views(encoder, pixels[rows], chosen, decision.sigma[rows], self.max_batch)
            seen = torch.cat([seen, fresh], 1)
            yield rows, seen

    @property
    def _needs_drift(self) -> bool:
        return not self.lazy or self.tau is not None or not isinstance(self.mapping, Constant)

    @property
    def _needs_instability(self) -> bool:
        return self.instability and (self.tau is not None or not self.lazy)

    def _threshold(self, keys: Tensor) -> float | Tensor | None:
        """The score from which the gate opens: tau, or tau moved at random for each image."""
        if self.tau is None or not self.jitter:
            return self.tau
        draw = noise.uniform(noise.fork(keys, GATE), 1).squeeze(1)
        return self.tau + self.jitter * (2.0 * draw - 1.0)

    def _probe(self, encoder: Encoder, pixels: Tensor, streams: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Clean features and the mean feature of either probe, NaN where nobody looks at the drift."""
        if self._needs_drift:
            scales = self.sigma_low, self.sigma_high
            return probe(encoder, pixels, streams, scales, self.probe_samples, self.max_batch)
        features = encode_in_batches(encoder, len(pixels), self.max_batch, lambda i, j: pixels[i:j])
        unknown = torch.full_like(features, torch.nan)
        return features, unknown, unknown

    def _measure_instability(
        self,
        encoder: Encoder,
        pixels: Tensor,
        choices: Choices | None,
        features: Tensor,
        drift: Tensor,
        threshold: float | Tensor | None,
        divergence: Divergence,
    ) -> Tensor:
        """J(x) where it can still change the gate, NaN elsewhere."""
        result = torch.full_like(drift, torch.nan)
        if choices is None:
            return result
        undecided = torch.ones_like(drift, dtype=torch.bool)
        if self.lazy and self.tau is not None and threshold is not None:
            # The margin covers rounding in r + J: what is skipped must be certain.
            margin = 1e-6 * (1.0 + abs(self.tau))
            undecided = (drift < threshold) & (drift >= threshold - functional.MAX_INSTABILITY - margin)
        rows = undecided.nonzero().flatten()
        if not len(rows):
            return result
        with fusing.part_of(pixels):
            augmented = encode_in_batches(
                encoder,
                len(rows),
                self.max_batch,
                lambda i, j: choices(pixels, rows[i:j], recorded=encoder.graphed),
            )
        return result.index_copy(0, rows, divergence(rows, features[rows], augmented))

    # ------------------------------------------------------------------ configuration

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values; options beyond the paper only where they are used."""
        values = super().to_dict()
        unused = {name for name, default in _BEYOND.items() if values[name] == default}
        return {name: value for name, value in values.items() if name not in unused}
