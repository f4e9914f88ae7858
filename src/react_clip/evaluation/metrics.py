"""Metrics from per-image outcomes: accuracies with 95 % intervals, worst case and majority over draws, leakage, gates.

Outcomes are boolean arrays ``[K, N]``: K draws of the defence's noise, N images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""The normal quantile behind a two-sided 95 % interval."""

Flags = NDArray[np.bool_]


class Estimate(NamedTuple):
    """A fraction in [0, 1] and its 95 % interval."""

    value: float
    low: float
    high: float


def interval(value: float, low: float, high: float, digits: int = 1) -> str:
    """A number with its interval; both bounds are shown where its two sides differ by more than a tenth.

    >>> interval(61.0, 59.8, 62.2), interval(80.0, 37.6, 96.4)
    ('61.0 ± 1.2', '80.0 [37.6, 96.4]')
    """
    below, above = value - low, high - value
    if abs(below - above) <= max(0.1 * (below + above), 0.5 * 10**-digits):
        return f"{value:.{digits}f} ± {(high - low) / 2:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def wilson(fraction: float, n: int) -> Estimate:
    r"""The Wilson score interval of a fraction measured on ``n`` images.

    .. math:: \frac{\hat p + \frac{z^2}{2n} \pm z\sqrt{\frac{\hat p (1-\hat p)}{n} + \frac{z^2}{4n^2}}}{1 + z^2/n}

    The fraction may be a mean over draws and so need not be a multiple of 1/n; more draws do not make ``n`` larger.

    >>> estimate = wilson(0.5, 100)
    >>> round(estimate.low, 4), round(estimate.high, 4)
    (0.4038, 0.5962)
    """
    shrink = 1.0 + Z_95**2 / n
    centre = (fraction + Z_95**2 / (2 * n)) / shrink
    reach = Z_95 / shrink * math.sqrt(fraction * (1.0 - fraction) / n + Z_95**2 / (4 * n * n))
    # The formula reaches 0 and 1 exactly; rounding must not make the interval miss its own estimate.
    return Estimate(fraction, min(fraction, max(0.0, centre - reach)), max(fraction, min(1.0, centre + reach)))


def mean_over_sets(fractions: Sequence[float], sizes: Sequence[int]) -> Estimate:
    r"""The unweighted mean over data sets, with a stratified normal interval.

    .. math:: \bar p \pm z \frac1S \sqrt{\sum_s \tilde p_s (1 - \tilde p_s) / \tilde n_s}, \qquad
              \tilde n = n + z^2,\ \tilde p = (n \hat p + z^2/2) / \tilde n

    The variance of each set is Agresti and Coull's, so that 0 % on every set does not give an interval of width 0. A
    single set has its Wilson interval.

    >>> estimate = mean_over_sets([0.5, 0.7], [100, 100])
    >>> round(estimate.value, 4), round(estimate.high - estimate.value, 4)
    (0.6, 0.0654)
    """
    if len(fractions) == 1:
        return wilson(fractions[0], sizes[0])
    variance = 0.0
    for fraction, n in zip(fractions, sizes, strict=True):
        adjusted = n + Z_95**2
        moved = (n * fraction + Z_95**2 / 2) / adjusted
        variance += moved * (1.0 - moved) / adjusted
    mean = math.fsum(fractions) / len(fractions)
    reach = Z_95 * math.sqrt(variance) / len(fractions)
    return Estimate(mean, max(0.0, mean - reach), min(1.0, mean + reach))


def worst_of(correct: Flags) -> float:
    """Fraction of images that are correct in every draw: the accuracy against an attacker who may try K times.

    >>> worst_of(np.array([[True, False, True], [True, True, True]]))
    0.6666666666666666
    """
    return float(correct.all(axis=0).mean())


def majority(correct: Flags) -> float:
    """Fraction of images that are correct in more than half of the draws.

    >>> majority(np.array([[True, False], [True, False], [False, True]]))
    0.5
    """
    return float((2 * correct.sum(axis=0) > len(correct)).mean())


def leakage(clean_correct: Flags, attacked: Flags, correct: Flags) -> float:
    """Label leakage: number of attacked images that CLIP gets wrong clean and the defence gets right, mean over draws.

    An untargeted attack moves away from the true label, so a correcting defence that reverses it finds that label, even
    for images that CLIP gets wrong without attack. It is 0 if only images that CLIP gets right are attacked.

    >>> leakage(np.array([True, False, False]), np.array([True, True, True]), np.array([[True, True, False]]))
    1.0
    """
    leaked = correct & attacked & ~clean_correct
    return float(leaked.sum(axis=1).mean())


def gate_rate(gated: Flags, counted: Flags) -> float:
    """Fraction of the images in the mask ``counted`` whose gate opened, mean over draws; NaN if the mask is empty.

    >>> gate_rate(np.array([[True, False, True, True]]), np.array([True, True, False, True]))
    0.6666666666666666
    """
    return float(gated[:, counted].mean()) if counted.any() else math.nan
