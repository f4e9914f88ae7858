"""95 % intervals of shares, on one data set or as the mean over several, and tests of two shares of the same photos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""The normal quantile behind a two-sided 95 % interval."""


class Estimate(NamedTuple):
    """A fraction in [0, 1] and its 95 % interval."""

    value: float
    low: float
    high: float


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


def interval(value: float, low: float, high: float, digits: int = 1) -> str:
    """A number with its interval; both bounds are shown where its two sides differ by more than a tenth.

    >>> interval(61.0, 59.8, 62.2), interval(80.0, 37.6, 96.4)
    ('61.0 ± 1.2', '80.0 [37.6, 96.4]')
    """
    below, above = value - low, high - value
    if abs(below - above) <= max(0.1 * (below + above), 0.5 * 10**-digits):
        return f"{value:.{digits}f} ± {(high - low) / 2:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def share_in_words(part: int, count: int) -> str:
    """How many of ``count`` there are, with the interval of the share.

    >>> share_in_words(6, 500)
    '6 of 500 (1.2 %, 95 % interval 0.6 to 2.6 %)'
    """
    value, low, high = (100 * each for each in wilson(part / count, count))
    return f"{part} of {count} ({value:.1f} %, 95 % interval {low:.1f} to {high:.1f} %)"


def mcnemar(first: int, second: int) -> float:
    """McNemar's exact test, two-sided: how likely is a split at least this uneven if both answers are equally good?

    Args:
        first: photos that only the first answer gets right.
        second: photos that only the second answer gets right.

    >>> mcnemar(8, 1), mcnemar(3, 3)
    (0.0390625, 1.0)
    """
    term = tail = 1
    for k in range(min(first, second)):
        term = term * (first + second - k) // (k + 1)
        tail += term
    return float(min(1.0, 2 * tail / 2 ** (first + second)))


def bootstrap_difference(differences: Sequence[NDArray[np.float64]], draws: int = 10_000) -> Estimate:
    """The mean over data sets of the mean difference per photo, with the interval of a bootstrap within each set.

    Args:
        differences: one array per data set, a number per photo.
        draws: resamples.
    """
    import numpy as np

    generator, means = np.random.default_rng(0), np.zeros(draws)
    for each in differences:
        # Photos with equal differences are exchangeable, so their number is drawn and not each photo.
        values, counts = np.unique(each, return_counts=True)
        means += generator.multinomial(len(each), counts / len(each), size=draws) @ values / len(each)
    low, high = np.percentile(means / len(differences), [2.5, 97.5])
    return Estimate(float(np.mean([each.mean() for each in differences])), float(low), float(high))
