r"""Algorithm 1 of the paper, and the choice of the threshold.

For each budget: craft adversarial images against plain CLIP, take their mean drift :math:`\bar r_\epsilon`, sweep a
fixed anchor scale and keep the one with the highest defended accuracy, :math:`\sigma_\epsilon^\star`. The pairs
:math:`(\bar r_\epsilon, \sigma_\epsilon^\star)` are fitted by a line, a logistic curve and a power law.

The paper finds the threshold by a sweep over attacked images. Here it follows from clean photos alone: it is the
smallest score that a wanted share of them stays below.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from react_clip.attacks import PGD
from react_clip.config import Configuration
from react_clip.defenses import AOM, ReACT, Undefended
from react_clip.defenses.look_calibration import threshold_for
from react_clip.errors import ReactClipError, first_line
from react_clip.mappings import Constant, Linear, Logistic, PowerLaw
from react_clip.mappings import Mapping as Curve
from react_clip.zeroshot import ZeroShotClassifier

BUDGETS = (1 / 255, 4 / 255, 8 / 255, 16 / 255)
SIGMAS = tuple(round(0.01 * k, 2) for k in range(1, 29))

Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps done and the steps in all."""


class CalibrationPoint(Configuration):
    """One budget: its mean drift, the accuracy at every anchor scale, and the best scale."""

    eps: float
    mean_drift: float
    best_sigma: float
    accuracy: dict[str, float]
    """Defended accuracy by anchor scale."""
    images: int


class Calibration(Configuration):
    """The measured points, the fitted curves and the resulting defence; ``ReACT.load`` reads the defence alone."""

    config: ReACT
    points: tuple[CalibrationPoint, ...]
    fits: dict[str, Curve]
    """The fitted curves by kind; those that made no sense for these points are left out."""
    clean_pass: float | None
    clean_images: int
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """One line per curve that was left out, and per budget whose best scale may lie beyond those that were tried."""
    calibration_version: Literal[1] = 1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a calibration back, points and all."""
        if data.get("calibration_version") != cls.calibration_version:
            raise ReactClipError(
                f"this is no calibration of version {cls.calibration_version}; run `react-clip calibrate` again"
            )
        return super().from_dict(data)


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
    progress: Progress = lambda stage, done, total: None,
) -> Calibration:
    """Fit sigma(r) on labelled photos and choose tau on the same photos, unattacked.

    Args:
        clf: the classifier, undefended.
        pixels: clean photos ``[N, 3, S, S]`` in [0, 1].
        labels: their classes. Photos that plain CLIP gets wrong are not attacked (there is nothing to correct).
        base: everything that is not calibrated (probe scales, M, alpha, T); the paper's by default.
        mapping: which fit the resulting defence uses: ``linear``, ``logistic`` or ``power_law``.
        budgets: attack strengths, in [0, 1] pixels.
        sigmas: candidate anchor scales.
        steps: PGD iterations.
        clean_pass: share of clean photos to leave alone; ``None`` keeps the threshold of ``base``.
        batch: images at a time.
        seed: of attack and noise.
        provenance: what to write down about model and data.
        progress: called after every batch.
    """
    base = (base or ReACT()).replace(max_batch=max(batch, ReACT().max_batch))
    if mapping not in _FITS:
        raise ReactClipError(f"mapping {mapping!r} is unknown; choose one of {', '.join(_FITS)}")
    if len(set(budgets)) < 2:
        raise ReactClipError(
            f"{len(set(budgets))} budget is too few to fit a curve; give at least two, the paper takes four"
        )
    answers = _in_batches(pixels, batch, lambda part: Undefended()(clf, part).labels)
    right = (answers == labels.to(answers.device)).nonzero().flatten()
    if len(right) < 10:
        raise ReactClipError(
            f"plain CLIP gets {len(right)} of {len(labels)} photos right; calibration needs at least 10 such photos, "
            "better 300: give more photos, or check the labels"
        )
    tau = base.tau if clean_pass is None else choose_tau(clf, pixels, base, clean_pass, batch=batch, seed=seed)
    points = [
        _measure(clf, pixels[right.cpu()], labels[right.cpu()], base, eps, sigmas, steps, batch, seed, progress)
        for eps in budgets
    ]
    fits, notes = fit_mappings([point.mean_drift for point in points], [point.best_sigma for point in points])
    if mapping not in fits:
        reason = next(note for note in notes if note.startswith(mapping))
        raise ReactClipError(f"{reason}; use mapping='linear' or more photos")
    edge_notes = _edge_notes(points, sigmas)
    for note in edge_notes:
        warnings.warn(note, stacklevel=2)
    return Calibration(
        # The calibration's own max_batch suited this machine; it is no property of the encoder.
        config=base.replace(mapping=fits[mapping], tau=tau, max_batch=ReACT().max_batch),
        points=tuple(points),
        fits=fits,
        clean_pass=clean_pass,
        clean_images=len(pixels),
        provenance={**(provenance or {}), "seed": seed, "attack": f"pgd-{steps}", "mapping": mapping},
        notes=(*edge_notes, *notes),
    )


def _edge_notes(points: Sequence[CalibrationPoint], sigmas: Sequence[float]) -> list[str]:
    """One line per budget whose best scale is the smallest or the largest of those that were tried."""
    edges = {min(sigmas): "smaller", max(sigmas): "larger"}
    return [
        f"the best anchor scale at {point.eps * 255:.4g}/255 is {point.best_sigma:g}, at the edge of the scales "
        f"that were tried ({min(sigmas):g} to {max(sigmas):g}); try {edges[point.best_sigma]} ones too"
        for point in points
        if point.best_sigma in edges
    ]


def _measure(
    clf: ZeroShotClassifier,
    pixels: Tensor,
    labels: Tensor,
    base: ReACT,
    eps: float,
    sigmas: Sequence[float],
    steps: int,
    batch: int,
    seed: int,
    progress: Progress,
) -> CalibrationPoint:
    """Phases 1 to 3 at one budget: attack, drift, sweep of the anchor scale."""
    stage = f"eps {eps * 255:g}/255"
    attack = PGD(eps=eps, steps=steps)
    # Only the drift is wanted here: a gate that never opens spends no anchor views.
    probe = base.replace(tau=1e9, instability=False)
    fixed = [
        AOM(views=base.views, alpha=base.alpha, mapping=Constant(sigma), max_batch=base.max_batch) for sigma in sigmas
    ]
    drifts: list[Tensor] = []
    hits = torch.zeros(len(sigmas))
    total = math.ceil(len(pixels) / batch)
    for done, start in enumerate(range(0, len(pixels), batch), start=1):
        part, truth = pixels[start : start + batch].to(clf.device), labels[start : start + batch].to(clf.device)
        images = attack(clf, part, truth, seed=seed).images
        drifts.append(probe(clf, images, seed=seed).drift)
        hits += torch.tensor([float((guard(clf, images, seed=seed).labels == truth).sum()) for guard in fixed])
        progress(stage, done, total)
    accuracy = hits / len(pixels)
    return CalibrationPoint(
        eps=eps,
        mean_drift=float(torch.cat(drifts).mean()),
        best_sigma=best_scale(sigmas, accuracy.tolist()),
        accuracy={f"{sigma:g}": round(float(a), 5) for sigma, a in zip(sigmas, accuracy.tolist(), strict=True)},
        images=len(pixels),
    )


def best_scale(sigmas: Sequence[float], accuracy: Sequence[float]) -> float:
    """The scale of highest accuracy; of several equal ones the middle one, since a plateau has no better edge.

    >>> best_scale([0.02, 0.04, 0.06, 0.08], [0.5, 0.7, 0.7, 0.7])
    0.06
    """
    best = max(accuracy)
    tied = [sigma for sigma, value in zip(sigmas, accuracy, strict=True) if value == best]
    return tied[len(tied) // 2]


def choose_tau(
    clf: ZeroShotClassifier, pixels: Tensor, base: ReACT, clean_pass: float, *, batch: int = 64, seed: int = 0
) -> float:
    """The smallest threshold that leaves at least ``clean_pass`` of these clean photos alone."""
    if not 0 < clean_pass < 1:
        raise ReactClipError(f"clean_pass is {clean_pass}; it is a share of clean photos, such as 0.95")
    # Every J is wanted, no anchor is: one view is the least that the full diagnostics spend.
    scorer = base.replace(lazy=False, views=1, tau=1e9)
    scores = _in_batches(pixels, batch, lambda part: scorer(clf, part, seed=seed).score)
    return threshold_for(scores, clean_pass)


def _in_batches(pixels: Tensor, batch: int, measure: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([measure(pixels[start : start + batch]) for start in range(0, len(pixels), batch)])


# ---------------------------------------------------------------------- phase 4: the fits


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
    centred = r - r.mean()
    b = float(centred @ sigma / (centred @ centred)) if np.ptp(r) > 0 else 0.0
    return Linear(a=round(float(sigma.mean() - b * r.mean()), 5), b=round(b, 5))


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
