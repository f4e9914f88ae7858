"""Every metric against a second implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from react_clip.evaluation import metrics

outcomes = hnp.arrays(bool, st.tuples(st.integers(1, 5), st.integers(1, 12)))


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(case: tuple[int, int]) -> None:
    hits, n = case
    expected = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
    found = metrics.wilson(hits / n, n)
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.high == pytest.approx(expected.high, abs=1e-9)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_mean_over_sets_is_the_textbook_formula() -> None:
    shares, sizes = np.array([0.9, 0.55, 0.0]), np.array([500, 120, 300])
    z = stats.norm.ppf(0.975)
    adjusted = (shares * sizes + z**2 / 2) / (sizes + z**2)
    reach = z * np.sqrt(np.sum(adjusted * (1 - adjusted) / (sizes + z**2))) / 3
    found = metrics.mean_over_sets(list(shares), [int(n) for n in sizes])
    assert found.value == pytest.approx(shares.mean())
    assert found.high - found.value == pytest.approx(reach)


def test_mean_over_sets_covers_the_truth_in_95_percent_of_worlds() -> None:
    rng = np.random.default_rng(0)
    truth, sizes = np.array([0.85, 0.4, 0.02]), [200, 100, 150]
    hits = sum(
        estimate.low <= truth.mean() <= estimate.high
        for estimate in (
            metrics.mean_over_sets([rng.binomial(n, p) / n for p, n in zip(truth, sizes, strict=True)], sizes)
            for _ in range(3000)
        )
    )
    assert 0.94 <= hits / 3000 <= 0.97


@given(outcomes)
def test_draws_by_counting(correct: np.ndarray) -> None:
    draws, images = correct.shape
    columns = [[bool(correct[k, i]) for k in range(draws)] for i in range(images)]
    assert metrics.accuracy(correct) == pytest.approx(sum(map(sum, columns)) / (draws * images))
    assert metrics.worst_of(correct) == pytest.approx(sum(all(column) for column in columns) / images)
    assert metrics.majority(correct) == pytest.approx(sum(sum(c) > draws / 2 for c in columns) / images)
    assert metrics.worst_of(correct) <= min(metrics.accuracy(correct), metrics.majority(correct)) + 1e-12


@given(outcomes.flatmap(lambda c: st.tuples(st.just(c), *[hnp.arrays(bool, c.shape[1])] * 2)))
def test_leakage_and_gates_by_counting(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    correct, clean_correct, attacked = case
    leaked = sum(
        bool(correct[k, i] and attacked[i] and not clean_correct[i])
        for k in range(len(correct))
        for i in range(correct.shape[1])
    )
    assert metrics.leakage(clean_correct, attacked, correct) == pytest.approx(leaked / len(correct))
    opened = [bool(correct[k, i]) for k in range(len(correct)) for i in range(correct.shape[1]) if clean_correct[i]]
    expected = sum(opened) / len(opened) if opened else math.nan
    assert metrics.gate_rate(correct, clean_correct) == pytest.approx(expected, nan_ok=True)
