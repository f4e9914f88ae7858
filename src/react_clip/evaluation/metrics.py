"""95 % intervals of fractions, on one data set or as the mean over several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from react_clip.intervals import Z_95 as Z_95
from react_clip.intervals import Estimate as Estimate
from react_clip.intervals import wilson as wilson


def interval(value: float, low: float, high: float, digits: int = 1) -> str:
    """A number with its interval; both bounds are shown where its two sides differ by more than a tenth.

    >>> interval(61.0, 59.8, 62.2), interval(80.0, 37.6, 96.4)
    ('61.0 ± 1.2', '80.0 [37.6, 96.4]')
    """
    below, above = value - low, high - value
    if abs(below - above) <= max(0.1 * (below + above), 0.5 * 10**-digits):
        return f"{value:.{digits}f} ± {(high - low) / 2:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


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
