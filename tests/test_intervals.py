"""Intervals against another implementation and against simulated data; other metrics are recounted in the runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from react_clip import intervals


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(case: tuple[int, int]) -> None:
    hits, n = case
    expected = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    found = intervals.wilson(hits / n, n)
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.high == pytest.approx(expected.high, abs=1e-9)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_mean_over_sets_covers_the_truth_in_95_percent_of_worlds() -> None:
    rng = np.random.default_rng(0)
    truth, sizes = np.array([0.85, 0.4, 0.02]), [200, 100, 150]
    hits = sum(
        estimate.low <= truth.mean() <= estimate.high
        for estimate in (
            intervals.mean_over_sets([rng.binomial(n, p) / n for p, n in zip(truth, sizes, strict=True)], sizes)
            for _ in range(3000)
        )
    )
    assert 0.94 <= hits / 3000 <= 0.97
