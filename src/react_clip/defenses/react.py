r"""ReACT-CLIP: response-aware correction at test time, Algorithm 2 of the paper.

.. math::
    r = \frac{d_{high} - d_{low}}{d_{low}}, \quad \sigma = a + b r, \quad s = r + J, \quad
    f_{out} = f + 1[s \ge \tau]\,\alpha\,(f_{anc} - f), \quad
    f_{anc} = \tfrac1M \sum_i f(x + \sigma\,\eta_i)

:meth:`ReACT.decide` encodes the images and their probes, takes the drift r, measures the instability J and sets the
gate. :meth:`ReACT.act` encodes the anchor views and extrapolates. Views that cannot change the answer are not encoded:

- J lies in [0, ln 2], so the augmented view is needed only where r < tau and r >= tau - ln 2;
- anchor views are needed only where the gate is open, and with ``sequential`` only two of them where these settle the
  answer.

AOM and Defend-CLIP are settings of the same operator, with one anchor scale for all images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from react_clip import functional, noise
from react_clip.augment import WeakAugmentation
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import MEASUREMENTS, Defended, Defense, answer
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.mappings import Constant, Linear, Mapping
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

LOW, HIGH, AUGMENT, ANCHOR, GATE = range(5)
"""Branches of an image's random stream: weak probe, strong probe, T(x), anchor views, threshold. Each purpose has its
own, so that skipping one does not change the others."""

FIRST_VIEWS = 2
"""Anchor views before ``sequential`` tests whether the answer is settled: the fewest that show a spread. Testing more
often would save half a pass for an attacked image, but for each test the host waits for a batch too small for a GPU."""

SETTLED = 0.99
"""The ``sequential`` we ship: less than half of the passes of an attacked image, and the same accuracy to a few
hundredths of a point on ten data sets (``benchmarks/results/sequential``)."""

# The calibration of each encoder: None is the paper's own, a name is a file of ours.
_CALIBRATIONS = {
    **dict.fromkeys(("openai/clip-vit-base-patch32", "open_clip:ViT-B-32/openai"), None),
    "open_clip:ViT-B-32-quickgelu/openai": None,
    **dict.fromkeys(("clip-vit-b-16", "openai/clip-vit-base-patch16"), "clip-vit-b-16"),
    **dict.fromkeys(("open_clip:ViT-B-16/openai", "open_clip:ViT-B-16-quickgelu/openai"), "clip-vit-b-16"),
}

# Options beyond the paper: written to files only where they are used, so that other configurations stay the same.
_BEYOND = {"jitter": 0.0, "alpha_closed": 0.0, "sequential": None}

Logits = Callable[[Tensor, Tensor], Tensor]
"""``(rows [n], features [n, ..., D]) -> logits [n, ..., K]``, each row over its own classes; minus infinity for those
that a row does not have."""

Mask = Tensor | bool
"""One value for all images, or one per image ``[B]``."""


def logits_of(clf: ZeroShotClassifier) -> Logits:
    """Logits where all images are of one classifier."""
    return lambda rows, features: clf.logits(features)


@dataclass(frozen=True, eq=False)
class Decision:
    """Features, scores and the gate, one row per image, before any anchor view; fields as in :class:`Defended`."""

    plain: Tensor
    """Unit features before the correction, ``[B, D]``."""
    drift_low: Tensor
    drift_high: Tensor
    drift: Tensor
    instability: Tensor
    score: Tensor
    gated: Tensor
    sigma: Tensor
    passes: Tensor
    threshold: Tensor
    """The score from which the gate opens; minus infinity without a gate."""
    streams: Tensor
    """Keys ``[B, M]`` of the anchor views."""


@dataclass(frozen=True, eq=False)
class Correction(Decision):
    """The decision and the corrected features; ``passes`` count the anchor views too."""

    features: Tensor
    """Unit features after the correction; the plain ones where the gate stayed closed."""
    opened: Tensor
    """Unit features as an open gate gives them; equal to ``features`` where ``lazy`` skipped them."""
    closed: Tensor
    """Unit features as a closed gate gives them; equal to ``features`` where ``lazy`` skipped them."""


class ReACT(Defense):
    """The paper's defence; the defaults are its constants (calibrated for ViT-B/32).

    Costs 3, 4, 13 or 14 encoder passes an image, no gradients. With ``sequential=0.99``, as :meth:`for_encoder` ships
    it, an open gate encodes two views first and the others only where these do not settle the answer: 5, 6, 13 or 14.

    >>> guard = ReACT(tau=0.4)
    >>> guard.views, guard.alpha, guard.tau, guard.mapping
    (10, 2.0, 0.4, Linear(a=0.03, b=0.042))
    >>> ReACT.from_dict(guard.to_dict()) == guard
    True
    """

    kind = "react"
    colour = "#0072B2"

    sigma_low: float = 0.02
    """Noise scale of the weak probe."""
    sigma_high: float = 0.05
    """Noise scale of the strong probe."""
    probe_samples: Count = 1
    """Noisy views per probe, averaged before the drift is taken. The paper counts one; Defend-CLIP's code ten."""
    views: Count = 10
    """M, the views behind the anchor."""
    alpha: NonNegative = 2.0
    """Strength of the correction."""
    tau: float | None = 0.7
    """Score from which the gate opens; ``None`` corrects every image."""
    mapping: Mapping = field(default_factory=Linear)
    """From the drift r to the anchor's noise scale sigma."""
    instability: bool = True
    """Add J(x) to the score (ReACT); ``False`` lets the drift decide alone (Defend-CLIP)."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    """T(x), the augmentation behind J."""
    lazy: bool = True
    """Skip views that cannot change the answer. ``False`` runs every pass and measures every diagnostic."""
    max_batch: Count = 64
    """Most views in one encoder call."""
    jitter: NonNegative = 0.0
    """Half-width of a random shift of tau, drawn per image, so that an attacker cannot aim just below the threshold."""
    alpha_closed: NonNegative = 0.0
    """Strength of the correction where the gate is closed; 0 leaves the feature alone."""
    sequential: Annotated[float, Field(ge=0.5, lt=1)] | None = None
    """Encode anchor views only until the best class is final with this confidence (:func:`functional.settled`).
    ``None`` encodes all M, as suits features for retrieval; so do ``lazy=False`` and callers without classes."""

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

    @classmethod
    def for_encoder(cls, encoder: Encoder | str) -> Self:
        """The configuration we ship for an encoder: its constants, and anchor views until the answer is settled.

        For features rather than answers take :meth:`constants_for`, whose anchors have all M views.

        >>> ReACT.for_encoder("openai/clip-vit-base-patch32") == ReACT(sequential=0.99)
        True
        """
        return cls.constants_for(encoder).replace(sequential=SETTLED)

    @classmethod
    def constants_for(cls, encoder: Encoder | str) -> Self:
        """The constants of an encoder: the paper's for ViT-B/32, ours for ViT-B/16.

        >>> ReACT.constants_for("openai/clip-vit-base-patch32") == ReACT()
        True
        """
        name = encoder if isinstance(encoder, str) else encoder.original
        name = name.partition("@")[0]
        if name not in _CALIBRATIONS:
            raise ReactClipError(
                f"there is no calibration for {name!r}: the drift of every encoder has its own scale; run `react-clip "
                f"calibrate --defense react folder:PHOTOS --model {name}` and load its result, or take the paper's "
                "constants knowingly (rc.ReACT(), --config paper)"
            )
        calibration = _CALIBRATIONS[name]
        if calibration is None:
            return cls()
        return cls.load(Path(str(files("react_clip") / "assets" / "calibrations" / f"{calibration}.json")))

    # ------------------------------------------------------------------ the algorithm

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        ``seed`` is a number, or a secret as ``bytes``. The noise depends on it and on the image alone.
        """
        encoder = clf.encoder
        pixels, check = encoder.start_prepare(images)
        check.start()
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            keys = noise.stream_keys(pixels, seed)
            decision = self.decide(encoder, pixels, keys, logits_of(clf))
            check.wait()
            # Computed while a GPU is still at work on J: most images keep their features.
            logits = clf.logits(decision.plain)
            out = self.act(encoder, pixels, decision, logits_of(clf))
            if out.features is not decision.plain:
                logits = clf.logits(out.features)
            measured = {name: getattr(out, name) for name in MEASUREMENTS}
            return answer(clf, out.features, logits=logits, passes=(out.passes, 0), **measured)

    def correct(
        self, encoder: Encoder, pixels: Tensor, keys: Tensor, logits: Logits, may_stop: Mask = True
    ) -> Correction:
        """The defence of images that may have different class lists: :meth:`decide`, then :meth:`act`.

        Args:
            encoder: the image encoder.
            pixels: ``[B, 3, S, S]`` in [0, 1], checked, on the encoder's device.
            keys: random stream of each image, ``[B]``, from :func:`react_clip.noise.stream_keys`.
            logits: the logits of rows over their own classes.
            may_stop: mask ``[B]`` of the images for which ``sequential`` may leave out views; ``False`` encodes all.
        """
        return self.act(encoder, pixels, self.decide(encoder, pixels, keys, logits), logits, may_stop)

    def decide(self, encoder: Encoder, pixels: Tensor, keys: Tensor, logits: Logits) -> Decision:
        """Encode, probe, gate: the part of Algorithm 2 that needs no anchor view; arguments as in :meth:`correct`."""
        streams = noise.fork(keys, torch.arange(GATE + 1, device=keys.device)[:, None])  # one row per purpose: [5, B]
        plain, low, high = self._probe(encoder, pixels, streams[LOW : HIGH + 1])
        drift_low, drift_high = functional.drift(plain, low), functional.drift(plain, high)
        drift = functional.relative_drift(drift_low, drift_high)
        sigma = self.mapping(drift.detach() if encoder.gradients.detach_sigma else drift).to(pixels.dtype)
        threshold = self._threshold(streams[GATE], drift)
        instability = self._instability(encoder, pixels, streams[AUGMENT], plain, drift, threshold, logits)
        score = functional.intervention_score(drift, instability.nan_to_num(0.0))
        encoded = 1 + 2 * self.probe_samples if self._needs_drift else 1
        return Decision(
            plain=plain,
            drift_low=drift_low,
            drift_high=drift_high,
            drift=drift,
            instability=instability,
            score=score,
            gated=torch.ones_like(drift, dtype=torch.bool) if self.tau is None else score >= threshold,
            sigma=sigma,
            passes=encoded + (~instability.isnan()).long(),
            threshold=threshold,
            streams=noise.fork(streams[ANCHOR][:, None], torch.arange(self.views, device=keys.device)),
        )

    def act(
        self, encoder: Encoder, pixels: Tensor, decision: Decision, logits: Logits, may_stop: Mask = True
    ) -> Correction:
        """Anchor and extrapolate: the correction of the images that the gate lets through."""
        plain, gated, passes = decision.plain, decision.gated, decision.passes
        if self.lazy and not self.alpha_closed:
            needed = gated.nonzero().flatten()
        else:
            needed = torch.arange(len(plain), device=plain.device)
        features = opened = closed = plain
        for rows, views in self._anchor_views(encoder, pixels, decision, needed, logits, may_stop):
            anchors = functional.anchor(views)
            if_open = functional.extrapolate(plain[rows], anchors, self.alpha)
            if_closed = functional.extrapolate(plain[rows], anchors, self.alpha_closed)
            features = features.index_copy(0, rows, torch.where(gated[rows, None], if_open, if_closed))
            opened, closed = opened.index_copy(0, rows, if_open), closed.index_copy(0, rows, if_closed)
            passes = passes.index_copy(0, rows, decision.passes[rows] + views.shape[1])
        values = vars(decision) | {"passes": passes}
        return Correction(**values, features=features, opened=opened, closed=closed)

    # ------------------------------------------------------------------ steps of the algorithm

    def _probe(self, encoder: Encoder, pixels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of the images, and mean features of their noisy views at sigma_low and at sigma_high: ``[B, D]``.

        ``keys`` ``[2, B]`` are the streams of both probes. Images and noisy views share encoder calls. Without need for
        the drift the means are NaN.
        """
        count, samples = len(pixels), self.probe_samples if self._needs_drift else 0
        # Order of the noisy views: scale by scale, sample by sample, image by image.
        streams = noise.fork(keys[:, None], torch.arange(samples, device=keys.device)[:, None]).flatten()
        # Filled on the device: sending numbers there would make the host wait.
        sigmas = torch.cat([pixels.new_full((samples * count,), scale) for scale in (self.sigma_low, self.sigma_high)])

        def views(start: int, stop: int) -> Tensor:
            if stop <= count:
                return pixels[start:stop]
            first, last = max(start - count, 0), stop - count
            image = torch.arange(first, last, device=pixels.device) % count
            noisy = encoder.backend.noisy_view(pixels[image], streams[first:last], sigmas[first:last])
            return noisy if start >= count else torch.cat([pixels[start:], noisy])

        features = encoder.encode_in_batches(count * (1 + 2 * samples), self.max_batch, views)
        plain = features[:count]
        if not samples:
            return plain, torch.full_like(plain, torch.nan), torch.full_like(plain, torch.nan)
        low, high = features[count:].reshape(2, samples, count, -1).mean(1)
        return plain, low, high

    def _threshold(self, keys: Tensor, drift: Tensor) -> Tensor:
        """The score from which the gate of each image opens: tau, or tau with its random shift."""
        if self.tau is None:
            return torch.full_like(drift, -torch.inf)
        if not self.jitter:
            return torch.full_like(drift, self.tau)
        draw = noise.uniform(keys, 1).squeeze(1)
        return (self.tau + self.jitter * (2.0 * draw - 1.0)).to(drift.dtype)

    def _instability(
        self,
        encoder: Encoder,
        pixels: Tensor,
        keys: Tensor,
        plain: Tensor,
        drift: Tensor,
        threshold: Tensor,
        logits: Logits,
    ) -> Tensor:
        """J(x) where it can still change the gate, NaN elsewhere."""
        result = torch.full_like(drift, torch.nan)
        if not self._needs_instability:
            return result
        if self.lazy and self.tau is not None:
            # The margin covers rounding in r + J: a view that is skipped must not matter.
            least = threshold - functional.MAX_INSTABILITY - 1e-6 * (1.0 + abs(self.tau))
            rows = ((drift < threshold) & (drift >= least)).nonzero().flatten()
            if not len(rows):
                return result
        else:
            rows = torch.arange(len(pixels), device=pixels.device)

        def views(start: int, stop: int) -> Tensor:
            chosen = rows[start:stop]
            return encoder.backend(self.augmentation, pixels[chosen], keys[chosen])

        augmented = encoder.encode_in_batches(len(rows), self.max_batch, views)
        temperature = encoder.gradients.instability_temperature
        divergence = encoder.similarity.instability(logits(rows, plain[rows]), logits(rows, augmented), temperature)
        return result.index_copy(0, rows, divergence.to(result.dtype))

    def _anchor_views(
        self, encoder: Encoder, pixels: Tensor, decision: Decision, rows: Tensor, logits: Logits, may_stop: Mask
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and features ``[n, k, D]`` of their anchor views: all M, or with ``sequential`` two and then all.

        A row that two views do not settle is yielded again with all of its views.
        """
        if not len(rows):
            return

        def encode(rows: Tensor, start: int, stop: int) -> Tensor:
            keys, sigma = decision.streams[rows, start:stop], decision.sigma[rows]
            return anchor_views(encoder, pixels[rows], keys, sigma, self.max_batch)

        if self.sequential is None or not self.lazy or may_stop is False or self.views <= FIRST_VIEWS:
            yield rows, encode(rows, 0, self.views)
            return
        views = encode(rows, 0, FIRST_VIEWS)
        yield rows, views
        with torch.no_grad():
            alpha = torch.where(decision.gated[rows], self.alpha, self.alpha_closed)
            moved = torch.lerp(decision.plain[rows, None], views, alpha[:, None, None].to(views.dtype))
            final = functional.settled(logits(rows, moved), self.views, self.sequential)
            left = (~(final if may_stop is True else final & may_stop[rows])).nonzero().flatten()
        if len(left):
            rows, views = rows[left], views[left]
            yield rows, torch.cat([views, encode(rows, FIRST_VIEWS, self.views)], 1)

    @property
    def _needs_drift(self) -> bool:
        return not self.lazy or self.tau is not None or not isinstance(self.mapping, Constant)

    @property
    def _needs_instability(self) -> bool:
        return self.instability and (self.tau is not None or not self.lazy)

    # ------------------------------------------------------------------ configuration

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values; options beyond the paper only where they are used."""
        values = super().to_dict()
        unused = {name for name, default in _BEYOND.items() if values[name] == default}
        return {name: value for name, value in values.items() if name not in unused}


def anchor_views(encoder: Encoder, pixels: Tensor, keys: Tensor, sigma: Tensor, max_batch: int) -> Tensor:
    """Unit features ``[B, k, D]`` of noisy views of each image: one per key ``[B, k]``, at scale ``sigma`` ``[B]``."""
    count = keys.shape[1]
    streams = keys.flatten()

    def views(start: int, stop: int) -> Tensor:
        image = torch.arange(start, stop, device=pixels.device) // count
        return encoder.backend.noisy_view(pixels[image], streams[start:stop], sigma[image])

    return encoder.encode_in_batches(len(streams), max_batch, views).reshape(*keys.shape, -1)


class AOM(ReACT):
    r"""Correct every image: :math:`f + 1.2\,(f_{anc}(0.1) - f)`, 11 passes.

    >>> AOM().tau is None, AOM().mapping, AOM().alpha
    (True, Constant(sigma=0.1), 1.2)
    """

    kind = "aom"
    colour = "#E69F00"
    alpha: NonNegative = 1.2
    tau: float | None = None
    mapping: Mapping = field(default_factory=Constant)
    instability: bool = False


class DefendCLIP(AOM):
    r"""AOM's correction only where :math:`r(x) \ge 0.35`, with r from ten draws per probe scale, as its code does.

    21 passes for an image it leaves alone, 31 for one it corrects.

    >>> DefendCLIP().tau, DefendCLIP().probe_samples
    (0.35, 10)
    """

    kind = "defend-clip"
    label = "Defend-CLIP"
    colour = "#56B4E9"
    tau: float | None = 0.35
    probe_samples: Count = 10
