"""The 95 % interval of a share, and tests of two shares of the same photos."""

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
