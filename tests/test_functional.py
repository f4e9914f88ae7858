"""The paper's equations hold what they promise, for any input."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

import literal
from react_clip import functional, mappings

logit_rows = st.integers(2, 6).flatmap(
    lambda n: st.tuples(*(st.lists(st.floats(-100, 100), min_size=n, max_size=n) for _ in range(2)))
)
any_drift = st.floats(allow_nan=False, width=32)


def _as_tensors(rows: tuple[list[float], list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([rows[0]], dtype=torch.float64), torch.tensor([rows[1]], dtype=torch.float64)


@given(logit_rows)
def test_instability_of_a_sigmoid_model_is_that_of_its_least_stable_label(
    rows: tuple[list[float], list[float]],
) -> None:
    p, q = _as_tensors(rows)
    value = functional.Similarity(sigmoid=True).instability(p, q)
    two_outcomes = [(literal.softmax([a, 0.0]), literal.softmax([b, 0.0])) for a, b in zip(*rows, strict=True)]
    expected = max(literal.jensen_shannon(*pair) for pair in two_outcomes)
    assert 0.0 <= value.item() <= math.log(2)
    assert abs(value.item() - expected) < 1e-9


@given(logit_rows)
def test_instability_is_bounded_symmetric_and_equals_the_definition(rows: tuple[list[float], list[float]]) -> None:
    p, q = _as_tensors(rows)
    value = functional.js_divergence(p, q)
    assert 0.0 <= value.item() <= math.log(2)
    assert torch.equal(value, functional.js_divergence(q, p))
    expected = literal.jensen_shannon(literal.softmax(rows[0]), literal.softmax(rows[1]))
    assert abs(value.item() - expected) < 1e-9
    assert functional.js_divergence(p, p).item() < 1e-12


@given(any_drift)
def test_every_mapping_gives_a_finite_scale_that_is_not_negative(drift: float) -> None:
    candidates: list[mappings.Mapping] = [mappings.Linear(), mappings.Linear(a=-1.0, b=-3.0), mappings.Constant(0.1)]
    candidates += [mappings.Logistic(0.15, 2.0, 1.0), mappings.Logistic(0.15, -1e4, 1.0)]
    candidates += [mappings.PowerLaw(0.07, 0.5), mappings.PowerLaw(0.07, 3.0)]
    for mapping in candidates:
        sigma = mapping(torch.tensor([drift]))
        assert torch.isfinite(sigma).all(), mapping
        assert (sigma >= 0).all(), mapping
        assert mappings.Mapping.from_dict(mapping.to_dict()) == mapping


@given(st.floats(0, 2), st.floats(0, 2))
def test_relative_drift_never_divides_by_zero(low: float, high: float) -> None:
    value = functional.relative_drift(torch.tensor([low]), torch.tensor([high]))
    assert torch.isfinite(value).all()
    assert value.item() >= -1 - 1e-6
    if low > 1e-3:
        assert math.isclose(value.item(), (high - low) / low, rel_tol=1e-3, abs_tol=1e-4)
