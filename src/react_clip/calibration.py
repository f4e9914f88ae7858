r"""Calibration of a defence: thresholds from clean photos, and Algorithm 1 of the paper.

Every threshold is found in the same way: score clean photos, and take the smallest threshold that a wanted fraction of
them stays below. No labels and no attack are needed; the paper's own way is a sweep over attacked images.

Algorithm 1 fits ReACT's noise scale. For each budget: craft adversarial images against plain CLIP, take their mean
drift ratio :math:`\bar r_\epsilon`, sweep a fixed anchor scale and keep the one with the highest defended accuracy,
:math:`\sigma_\epsilon^\star`. The pairs :math:`(\bar r_\epsilon, \sigma_\epsilon^\star)` are fitted by a line, a
logistic curve and a power law.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from react_clip.attacks import PGD
from react_clip.config import Configuration
from react_clip.defenses import AOM, Defended, Defense, ReACT, SecondLook, Undefended
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError, first_line
from react_clip.intervals import wilson
from react_clip.mappings import Constant, Linear, Logistic, PowerLaw
from react_clip.mappings import Mapping as Curve
from react_clip.preprocess import Images, listed
from react_clip.zeroshot import ZeroShotClassifier

BUDGETS = (1 / 255, 4 / 255, 8 / 255, 16 / 255)
SIGMAS = tuple(round(0.01 * k, 2) for k in range(1, 29))

LEAST_PHOTOS = 20
"""Fewer clean photos are refused."""
BEYOND = 6
"""Photos that should lie beyond the threshold: with fewer, chance decides where it is."""
ALIKE = 0.15
"""Median distance between the features of two photos below which they count as all alike."""
FAR = 0.8
"""Photos count as attacked if SecondLook's threshold would exceed this fraction of the median distance between two of
them. For clean photos of ViT-B/16 it is at 0.5 (Caltech101) to 0.7 (EuroSAT), for photos attacked at 4/255 above 1."""

CLEAN_PASS, DRIFT_CLEAN_PASS = 0.995, 0.97
"""Fractions of clean photos that SecondLook leaves as they are, with classes and without, unless told otherwise."""
FINE_GRAINED = 2 / 3
"""Classes are fine-grained for an encoder if on more than this fraction of clean photos SecondLook's e has another best
class than the photo, however small its lead. Train photos, ViT-B/16: 0.77 for models of cars and 0.75 for satellite
photos, at most 0.63 for nine other vocabularies (pets 0.34, ImageNet 0.52)."""

NEVER = 1e9
"""A threshold that no score reaches."""


class CalibrationPoint(Configuration):
    """One budget: its mean drift ratio, the accuracy at every anchor scale, and the best scale."""

    eps: float
    mean_drift: float
    best_sigma: float
    accuracy: dict[str, float]
    """Defended accuracy by anchor scale."""
    images: int


class Calibration(Configuration):
    """A calibrated defence and what it was calibrated from; the ``load`` of the defence reads its file too."""

    removed = {"interval": ..., "median": ...}  # noqa: RUF012
    config: Defense
    """The calibrated defence."""
    threshold: float | None
    """Its threshold; ``None`` for SecondLook without classes, whose numbers are then those of ``drift_threshold``."""
    photos: int
    """Number of clean photos."""
    clean_pass: float | None = None
    """Fraction of them that should stay below the threshold; ``None`` if it was given, not measured."""
    drift_threshold: float | None = None
    """SecondLook's threshold without classes."""
    changed: tuple[int, ...] | None = None
    """Numbers of the photos whose answer changes; ``None`` without classes."""
    changed_share: tuple[float, float, float] | None = None
    """Expected share of honest photos whose answer changes, and its 95 % interval (Wilson)."""
    points: tuple[CalibrationPoint, ...] = ()
    """Measurements of Algorithm 1, one for each budget."""
    fits: dict[str, Curve] = field(default_factory=dict)
    """The fitted curves by kind; those that make no sense for the points are left out."""
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Warnings, one line each."""
    calibration_version: Literal[3] = 3


# ---------------------------------------------------------------------- thresholds from clean photos


def clean_threshold(scores: Tensor, clean_pass: float) -> float:
    """The smallest number, to four digits, above ``clean_pass`` of the scores ``[N]``.

    >>> clean_threshold(torch.arange(100) / 100, 0.95)
    0.9401
    """
    largest_below = scores.float().kthvalue(math.ceil(clean_pass * len(scores) - 1e-9)).values
    # One fp32 step above it, then up to four digits: casting it to fp32 can no longer round it back onto the score.
    return math.ceil(float(torch.nextafter(largest_below, torch.tensor(torch.inf))) * 1e4) / 1e4


def check_clean_pass(clean_pass: float) -> None:
    """Refuse what is no fraction."""
    if not 0 < clean_pass < 1:
        raise ReactClipError(f"clean_pass is {clean_pass}; it is a fraction of clean photos, such as 0.95")


def defend_photos(
    defend: Callable[[Tensor], Defended],
    encoder: Encoder,
    photos: Images,
    *,
    batch: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """Diagnostics of a defence for photos ``[N]``, and their ``features`` ``[N, D]``, in fp32 on the CPU."""
    photos = photos if isinstance(photos, Tensor) else listed(photos)
    if (count := len(photos)) < LEAST_PHOTOS:
        raise ReactClipError(f"{count} photos are too few to calibrate on; give at least {LEAST_PHOTOS}, better 300")
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, count, batch):
        with torch.no_grad():
            out = defend(encoder.prepare(photos[start : start + batch]))
        for name, values in {**out.diagnostics, "features": out.features}.items():
            parts.setdefault(name, []).append(values.float().cpu())
        progress(min(start + batch, count), count)
    return {name: torch.cat(each) for name, each in parts.items()}


def measure_threshold(scores: Tensor, clean_pass: float, beyond: int = BEYOND) -> tuple[dict[str, Any], list[str]]:
    """Fields of a :class:`Calibration`, and notes, from the scores of clean photos ``[N]``.

    A note says so if fewer than ``beyond`` of them should lie beyond the threshold.
    """
    count, needed = len(scores), math.ceil(beyond / (1.0 - clean_pass) - 1e-9)
    fields = {"threshold": clean_threshold(scores, clean_pass), "photos": count, "clean_pass": clean_pass}
    few = f"{count} photos are few for clean_pass {clean_pass:g}: {needed} or more give a steadier threshold"
    return fields, [] if count >= needed else [few]


def calibrate_threshold(
    clip: ZeroShotClassifier | Encoder,
    photos: Images,
    *,
    base: SecondLook | None = None,
    clean_pass: float | None = None,
    batch: int = 32,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Choose the thresholds of SecondLook from clean photos.

    Args:
        clip: a classifier, or an encoder alone: then only the threshold without classes is found.
        photos: some hundred clean photos like those that will be defended: a folder, paths, images, bytes or pixels.
        base: everything but the thresholds.
        clean_pass: fraction of clean photos to leave as they are; by default 0.995, and 0.97 without classes.
        batch: photos at a time.
        seed: of the noise.
        provenance: what to write down about model and photos.
        progress: called as ``progress(done_photos, total_photos)`` after every batch.
    """
    base = base or SecondLook()
    classifier, encoder = (clip, clip.encoder) if isinstance(clip, ZeroShotClassifier) else (None, clip)
    if clean_pass is None:
        clean_pass = DRIFT_CLEAN_PASS if classifier is None else CLEAN_PASS
    check_clean_pass(clean_pass)
    # With thresholds that no photo reaches, the features are the plain ones.
    idle = base.replace(threshold=NEVER, drift_threshold=2.0)
    measured = defend_photos(
        lambda pixels: idle.run(encoder, pixels, seed, classifier), encoder, photos, batch=batch, progress=progress
    )
    # So few answers may change that the threshold is that of the largest scores; the interval of their share says more.
    found, notes = measure_threshold(measured["score"], clean_pass, BEYOND if classifier is None else 1)
    if classifier is None:
        found |= {"drift_threshold": found["threshold"], "threshold": None}
    else:
        drift_threshold = clean_threshold(measured["drift"], min(clean_pass, DRIFT_CLEAN_PASS))
        far = measured["lead"] > 0
        changed = (far & (measured["score"] >= found["threshold"])).nonzero().flatten().tolist()
        interval = tuple(round(each, 4) for each in wilson(len(changed) / found["photos"], found["photos"]))
        found |= {"drift_threshold": drift_threshold, "changed": tuple(changed), "changed_share": interval}
        if (doubtful := float(far.float().mean())) > FINE_GRAINED:
            share = f"beyond the small copies {doubtful:.0%} of the photos have another best class"
            notes.append(f"these classes are fine-grained for {encoder.name!r}: {share}, and attacks have it easier")
    _check_photos(measured["features"], found["drift_threshold"])
    if base.copy_size is not None and base.size(encoder) is None:
        notes.append(f"{encoder.name!r} takes one image size only: copies are moved views of full size, 3 passes")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    provenance = {"model": encoder.name, "seed": seed, **(provenance or {})}
    config = base.replace(threshold=found["threshold"], drift_threshold=found["drift_threshold"])
    return Calibration(config, **found, provenance=provenance, notes=tuple(notes))


def _check_photos(features: Tensor, threshold: float) -> None:
    """Refuse photos that are all alike or look attacked."""
    # The number of pairs grows with the square of the photos; some hundred are enough.
    apart = float(torch.pdist(features[:: max(1, len(features) // 500)]).median())
    if apart < ALIKE:
        raise ReactClipError(f"the photos are all alike (median distance {apart:.2g}); give different ones")
    if threshold > FAR * apart:
        raise ReactClipError(f"the photos look attacked (threshold {threshold:.3g} of {apart:.3g}); give clean ones")


# ---------------------------------------------------------------------- Algorithm 1


def calibrate(
    clf: ZeroShotClassifier,
    pixels: Tensor,
    labels: Tensor,
    *,
    base: ReACT | None = None,
    mapping: str = "linear",
    budgets: Sequence[float] = BUDGETS,
    sigmas: Sequence[float] = SIGMAS,
    steps: int = 10,
    clean_pass: float | None = 0.95,
    batch: int = 64,
    seed: int = 0,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Calibration:
    """Fit sigma(r) of ReACT on labelled photos (Algorithm 1), and choose tau on the same photos, unattacked.

    Args:
        clf: the classifier, undefended.
        pixels: clean photos ``[N, 3, S, S]`` in [0, 1].
        labels: their classes. Photos that plain CLIP gets wrong are not attacked (there is nothing to correct).
        base: everything that is not calibrated (probe scales, M, alpha, T); the paper's by default.
        mapping: which fit the resulting defence uses: ``linear``, ``logistic`` or ``power_law``.
        budgets: attack strengths, in [0, 1] pixels.
        sigmas: candidate anchor scales.
        steps: PGD iterations.
        clean_pass: fraction of clean photos to leave alone; ``None`` keeps the threshold of ``base``.
        batch: images at a time.
        seed: of attack and noise.
        provenance: what to write down about model and data.
        progress: called as ``progress(stage, done_batches, total_batches)``.
    """
    base = base or ReACT()
    if mapping not in _FITS:
        raise ReactClipError(f"mapping {mapping!r} is unknown; choose one of {', '.join(_FITS)}")
    answers = torch.cat([Undefended()(clf, part).labels.cpu() for part in torch.split(pixels, batch)])
    right = (answers == labels.cpu()).nonzero().flatten()
    if len(right) < 10:
        raise ReactClipError(f"plain CLIP gets {len(right)} of {len(labels)} photos right, and needs 10; give others")
    parts = [(pixels[rows].to(clf.device), labels[rows].to(clf.device)) for rows in torch.split(right, batch)]
    points = [_measure(clf, parts, base, PGD(eps=eps, steps=steps), sigmas, seed, progress) for eps in budgets]
    fits, left_out = fit_mappings([point.mean_drift for point in points], [point.best_sigma for point in points])
    if mapping not in fits:
        reason = next(note for note in left_out if note.startswith(mapping))
        raise ReactClipError(f"{reason}; use mapping='linear' or more photos")
    found: dict[str, Any] = {"threshold": base.tau, "photos": len(pixels)}
    notes: list[str] = []
    if clean_pass is not None:
        # All J are wanted and no anchor, of which one view is the least.
        check_clean_pass(clean_pass)
        idle = base.replace(views=1, tau=NEVER)
        measured = defend_photos(
            lambda part: idle.run(clf.encoder, part, seed, clf, skip_unneeded=False), clf.encoder, pixels, batch=batch
        )
        found, notes = measure_threshold(measured["score"], clean_pass)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    about = {**(provenance or {}), "seed": seed, "attack": f"pgd-{steps}", "mapping": mapping}
    config = base.replace(mapping=fits[mapping], tau=found["threshold"])
    return Calibration(config, **found, points=tuple(points), fits=fits, provenance=about, notes=(*notes, *left_out))


def _measure(
    clf: ZeroShotClassifier,
    parts: Sequence[tuple[Tensor, Tensor]],
    base: ReACT,
    attack: PGD,
    sigmas: Sequence[float],
    seed: int,
    progress: Callable[[str, int, int], None],
) -> CalibrationPoint:
    """One budget: attack batches of photos, take their drift ratio, sweep the anchor scale."""
    # Only the drift ratio is wanted: a gate that never opens spends no anchor views.
    probe = base.replace(tau=NEVER, instability=False)
    anchors = [AOM(views=base.views, alpha=base.alpha, mapping=Constant(sigma)) for sigma in sigmas]
    drifts: list[Tensor] = []
    hits = torch.zeros(len(sigmas))
    for done, (photos, labels) in enumerate(parts, start=1):
        attacked = attack(clf, photos, labels, seed=seed).images
        drifts.append(probe(clf, attacked, seed=seed).drift)
        hits += torch.tensor([float((guard(clf, attacked, seed=seed).labels == labels).sum()) for guard in anchors])
        progress(f"eps {attack.eps * 255:g}/255", done, len(parts))
    count = sum(len(labels) for _, labels in parts)
    accuracy = (hits / count).tolist()
    return CalibrationPoint(
        eps=attack.eps,
        mean_drift=float(torch.cat(drifts).mean()),
        best_sigma=best_scale(sigmas, accuracy),
        accuracy={f"{sigma:g}": round(share, 5) for sigma, share in zip(sigmas, accuracy, strict=True)},
        images=count,
    )


def best_scale(sigmas: Sequence[float], accuracy: Sequence[float]) -> float:
    """The scale of highest accuracy; of several equal ones the middle one, since a plateau has no better edge.

    >>> best_scale([0.02, 0.04, 0.06, 0.08], [0.5, 0.7, 0.7, 0.7])
    0.06
    """
    best = max(accuracy)
    tied = [sigma for sigma, value in zip(sigmas, accuracy, strict=True) if value == best]
    return tied[len(tied) // 2]


def fit_mappings(drifts: Sequence[float], sigmas: Sequence[float]) -> tuple[dict[str, Curve], tuple[str, ...]]:
    """Curves fitted to the points by least squares, and one line per curve that makes no sense for them.

    >>> fits, notes = fit_mappings([0.0, 1.0], [0.03, 0.072])
    >>> fits, notes[0]
    ({'linear': Linear(a=0.03, b=0.042)}, 'logistic left out: 2 points are too few for its three parameters')
    """
    r, sigma = np.asarray(drifts, float), np.asarray(sigmas, float)
    fits: dict[str, Curve] = {}
    notes = []
    for kind, fit in _FITS.items():
        try:
            fits[kind] = fit(r, sigma)
        except (ValueError, RuntimeError) as error:
            notes.append(f"{kind} left out: {first_line(error)}")
    return fits, tuple(notes)


def _fit_linear(r: np.ndarray[Any, Any], sigma: np.ndarray[Any, Any]) -> Linear:
    """Budgets that all drift equally give a constant."""
    b, a = np.polyfit(r, sigma, 1) if np.ptp(r) else (0.0, sigma.mean())
    return Linear(a=round(float(a), 5), b=round(float(b), 5))


def _fit_power_law(r: np.ndarray[Any, Any], sigma: np.ndarray[Any, Any]) -> PowerLaw:
    if (r <= 0).any() or (sigma <= 0).any():
        raise ReactClipError("it needs drifts and scales > 0")
    if not np.ptp(r):
        raise ReactClipError("all drifts are equal")
    exponent, log_coefficient = np.polyfit(np.log(r), np.log(sigma), 1)
    return PowerLaw(coefficient=round(float(np.exp(log_coefficient)), 5), exponent=round(float(exponent), 5))


def _fit_logistic(r: np.ndarray[Any, Any], sigma: np.ndarray[Any, Any]) -> Logistic:
    """The ceiling is at most twice the largest scale: four points do not bound it from above."""
    from scipy.optimize import curve_fit

    if len(r) < 3:
        raise ReactClipError(f"{len(r)} points are too few for its three parameters")

    def curve(x: Any, ceiling: float, steepness: float, midpoint: float) -> Any:
        return ceiling / (1.0 + np.exp(-steepness * (x - midpoint)))

    top = float(sigma.max())
    start = (1.2 * top, 1.0, float(np.clip(np.median(r), -10.0, 20.0)))
    values, _ = curve_fit(curve, r, sigma, p0=start, bounds=([top / 2, 0.0, -10.0], [2 * top, 20.0, 20.0]))
    return Logistic(*(round(float(value), 5) for value in values))


_FITS: dict[str, Callable[[Any, Any], Curve]] = {
    "linear": _fit_linear,
    "logistic": _fit_logistic,
    "power_law": _fit_power_law,
}
