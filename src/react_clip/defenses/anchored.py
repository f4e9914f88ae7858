r"""Noise-anchored feature correction, the operator that ReACT, AOM and Defend-CLIP share.

.. math:: f_{out}(x) = f(x) + g(x)\,\alpha\,[f_{anc}(x) - f(x)], \qquad
          f_{anc}(x) = \tfrac1M \sum_i f(x + \sigma_{corr}(x)\,\eta_i)

Algorithm 2 of the paper, with the gate first: views that cannot change the answer are never encoded. Three stages, each
one large batch and one host synchronisation: clean features and probes; the augmented view of those images whose drift
alone does not decide (J lies in [0, ln 2], so r >= tau opens the gate and r < tau - ln 2 closes it); the M anchor views
of those images whose gate opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import functional, mappings, noise
from react_clip.augment import WeakAugmentation
from react_clip.defenses.base import Defended, encode_in_batches, prepare, unmeasured
from react_clip.defenses.config import Configuration
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.mappings import Constant, Linear, Mapping
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

# Branches of an image's random stream; each role has its own, so that skipping one does not shift another.
_LOW, _HIGH, _AUGMENT, _ANCHOR = range(4)


Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(rows, features, augmented features) -> J``: how far the predictions of these rows differ, each for its classes."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What the correction did, one row per image; the fields are those of :class:`Defended`."""

    plain: Tensor
    """Unit features before the correction."""
    features: Tensor
    """Unit features after it; equal to the plain ones where the gate stayed closed."""
    drift_low: Tensor
    drift_high: Tensor
    drift: Tensor
    instability: Tensor
    score: Tensor
    gated: Tensor
    sigma: Tensor
    passes: Tensor


@dataclass(frozen=True)
class AnchoredDefense(Configuration):
    """Fields shared by the defences that correct a feature through a noise anchor; see :class:`ReACT`."""

    name: ClassVar[str] = "anchored"

    sigma_low: float = 0.02
    sigma_high: float = 0.05
    probe_samples: int = 1
    """Noisy views per probe scale, averaged before the drift is taken. The paper counts one; Defend-CLIP's code ten."""
    views: int = 10
    """M, the views behind the anchor."""
    alpha: float = 2.0
    tau: float | None = 0.7
    """Intervention threshold; ``None`` corrects every image."""
    mapping: Mapping = field(default_factory=Linear)
    instability: bool = True
    """Whether J(x) enters the score (ReACT) or the drift decides alone (Defend-CLIP)."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    lazy: bool = True
    """Skip views that cannot change the answer. ``False`` runs every pass and measures every diagnostic."""
    max_batch: int = 64
    """Most views in one encoder call."""

    def __post_init__(self) -> None:
        self._check_numbers("sigma_low", "sigma_high", "alpha", *(["tau"] if self.tau is not None else []))
        if not 0 < self.sigma_low < self.sigma_high <= 1:
            raise ReactClipError(
                f"sigma_low is {self.sigma_low} and sigma_high {self.sigma_high}; they need 0 < sigma_low < "
                "sigma_high <= 1 (the paper's are 0.02 and 0.05)"
            )
        self._check_counts("probe_samples", "views", "max_batch")
        if self.alpha < 0:
            raise ReactClipError(f"alpha is {self.alpha}; it must be >= 0 (0 corrects nothing, the paper's is 2.0)")

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes that one image can need."""
        probes = 2 * self.probe_samples if self._needs_drift else 0
        augmented = int(self.instability and (self.tau is not None or not self.lazy))
        return 1 + probes + augmented + self.views, 0

    # ------------------------------------------------------------------ the algorithm

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        ``seed`` is a number, or a secret as ``bytes``. The noise depends on it and on the image alone.
        """
        pixels = prepare(clf, images)

        def divergence(rows: Tensor, features: Tensor, augmented: Tensor) -> Tensor:
            return functional.js_divergence(clf.logits(features), clf.logits(augmented))

        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            found = self.correct(clf.encoder, pixels, noise.stream_keys(pixels, seed), divergence)
            return Defended(
                features=found.features,
                logits=clf.logits(found.features),
                drift_low=found.drift_low,
                drift_high=found.drift_high,
                drift=found.drift,
                instability=found.instability,
                score=found.score,
                gated=found.gated,
                sigma=found.sigma,
                passes=found.passes,
                backward_passes=torch.zeros_like(found.passes),
                class_names=clf.names,
            )

    def correct(self, encoder: Encoder, pixels: Tensor, keys: Tensor, divergence: Divergence) -> Correction:
        """The defence before any class list: images of different classifiers may share a batch.

        Classes enter through J alone, which ``divergence`` measures for the rows it is given.
        """
        plain, low, high = self._probe(encoder, pixels, keys)
        drift = functional.relative_drift(low, high)
        instability = self._measure_instability(encoder, pixels, keys, plain, drift, divergence)
        score = functional.intervention_score(drift, instability.nan_to_num(0.0))
        gated = torch.ones_like(drift, dtype=torch.bool) if self.tau is None else functional.gate(score, self.tau)
        sigma = self.mapping(drift).to(pixels.dtype)

        corrected = gated if self.lazy else torch.ones_like(gated)
        rows = corrected.nonzero().flatten()
        features = plain
        if len(rows):
            anchors = functional.anchor(self._anchor_views(encoder, pixels, keys, sigma, rows))
            moved = functional.extrapolate(plain[rows], anchors, self.alpha)
            features = plain.index_copy(0, rows, torch.where(gated[rows, None], moved, plain[rows]))
        probes = 1 + 2 * self.probe_samples if self._needs_drift else 1
        return Correction(
            plain=plain,
            features=features,
            drift_low=low,
            drift_high=high,
            drift=drift,
            instability=instability,
            score=score,
            gated=gated,
            sigma=sigma,
            passes=probes + (~instability.isnan()).long() + self.views * corrected.long(),
        )

    @property
    def _needs_drift(self) -> bool:
        return not self.lazy or self.tau is not None or not isinstance(self.mapping, Constant)

    def _probe(self, encoder: Encoder, pixels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Clean features and their drift at both scales: the clean views first, then the probes of each scale."""
        images, samples = len(pixels), self.probe_samples
        if not self._needs_drift:
            nan = unmeasured(pixels)
            return encode_in_batches(encoder, images, self.max_batch, lambda i, j: pixels[i:j]), nan, nan
        streams = [noise.fork(noise.fork(keys, scale), i) for scale in (_LOW, _HIGH) for i in range(samples)]
        probe_keys = torch.cat(streams)
        sigma = pixels.new_tensor([self.sigma_low, self.sigma_high]).repeat_interleave(samples * images)
        image_of = torch.arange(images, device=pixels.device).repeat(2 * samples)

        def views(start: int, stop: int) -> Tensor:
            clean = pixels[start : min(stop, images)]
            at = slice(max(start - images, 0), max(stop - images, 0))
            return torch.cat([clean, _noisy(pixels[image_of[at]], probe_keys[at], sigma[at])])

        unit = encode_in_batches(encoder, images * (1 + 2 * samples), self.max_batch, views)
        features = unit[:images]
        low, high = unit[images:].reshape(2, samples, images, -1).mean(1)
        return features, functional.drift(features, low), functional.drift(features, high)

    def _measure_instability(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor,
        features: Tensor,
        drift: Tensor,
        divergence: Divergence,
    ) -> Tensor:
        """J(x) where it can still change the gate, NaN elsewhere."""
        result = torch.full_like(drift, torch.nan)
        if not self.instability or (self.lazy and self.tau is None):
            return result
        undecided = torch.ones_like(drift, dtype=torch.bool)
        if self.lazy and self.tau is not None:
            # The margin covers rounding in r + J: what is skipped must be certain.
            margin = 1e-6 * (1.0 + abs(self.tau))
            undecided = (drift < self.tau) & (drift >= self.tau - functional.MAX_INSTABILITY - margin)
        rows = undecided.nonzero().flatten()
        if not len(rows):
            return result
        streams = noise.fork(keys, _AUGMENT)[rows]
        augmented = encode_in_batches(
            encoder, len(rows), self.max_batch, lambda i, j: self.augmentation(pixels[rows[i:j]], streams[i:j])
        )
        return result.index_copy(0, rows, divergence(rows, features[rows], augmented))

    def _anchor_views(self, encoder: Encoder, pixels: Tensor, keys: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Unit features ``[len(rows), M, D]`` of the noisy views behind the anchor."""
        stream = noise.fork(keys[rows], _ANCHOR)
        view_keys = torch.stack([noise.fork(stream, i) for i in range(self.views)], 1).flatten()
        image_of = rows.repeat_interleave(self.views)
        unit = encode_in_batches(
            encoder,
            len(image_of),
            self.max_batch,
            lambda i, j: _noisy(pixels[image_of[i:j]], view_keys[i:j], sigma[image_of[i:j]]),
        )
        return unit.reshape(len(rows), self.views, -1)

    # ------------------------------------------------------------------ configuration

    def _write_field(self, name: str) -> Any:
        if name == "mapping":
            return mappings.to_dict(self.mapping)
        return dataclasses.asdict(self.augmentation) if name == "augmentation" else getattr(self, name)

    @classmethod
    def _read_field(cls, name: str, value: Any) -> Any:
        if name == "mapping" and isinstance(value, dict):
            return mappings.from_dict(value)
        if name == "augmentation" and isinstance(value, dict):
            try:
                return WeakAugmentation(**value)
            except TypeError as error:
                raise ReactClipError(f"augmentation is not understood: {error}") from None
        return value


def _noisy(pixels: Tensor, keys: Tensor, sigma: Tensor) -> Tensor:
    """Views ``x + sigma * eta``; not clamped, as published."""
    grain = noise.normal(keys, pixels.shape[1:]).to(pixels.dtype)
    return pixels + sigma[:, None, None, None] * grain
