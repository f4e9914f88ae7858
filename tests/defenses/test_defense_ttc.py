"""TTC: the literal algorithm, its gate on both sides, and what each side costs."""

from __future__ import annotations

import pytest
import torch

from react_clip import noise
from react_clip.defenses import TTC, ttc
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, literal_tower, uniform_draws, watched_classifier


def middle(images: torch.Tensor, seed: int = 0) -> float:
    """A threshold between these images' changes."""
    return float(TTC()(toy_classifier(images.dtype), images, seed=seed).score.median()) + 1e-6


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_is_the_literal_algorithm(steps: int) -> None:
    clf, images = toy_classifier(F64), toy_images(6, dtype=F64)
    guard = TTC(steps=steps, tau=middle(images, seed=3))
    out = guard(clf, images, seed=3)
    assert 0 < out.gated.sum() < 6, "both sides of the gate must be tried"
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        feature, rho = literal.ttc(
            literal_tower(clf),
            images[i].flatten().tolist(),
            uniform_draws(branch(keys[i : i + 1], ttc._START)),
            eps=guard.eps,
            steps=steps,
            size=guard.step_size,
            tau=guard.tau,
            beta=guard.beta,
        )
        assert out.score[i] == pytest.approx(rho, abs=1e-12)
        assert bool(out.gated[i]) == (rho < guard.tau)
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-11)


def test_the_gate_is_open_below_the_threshold_and_closed_at_it() -> None:
    clf, images = toy_classifier(), toy_images(5)
    rho = TTC()(clf, images).score
    for i in range(len(images)):
        at = TTC(tau=float(rho[i]))(clf, images)
        assert not at.gated[i], "rho = tau keeps the random start"
        assert torch.equal(at.gated, rho < rho[i])
        assert TTC(tau=float(rho[i]) * (1 + 1e-5))(clf, images).gated[i]


def test_the_counterattack_goes_further_than_the_random_start() -> None:
    clf, encoder = watched_classifier()
    images = toy_images(6)
    anchor = encoder.raw_features(images)
    closed = TTC(tau=0.0)(clf, images)
    start = encoder.seen[-1]
    assert not closed.gated.any()
    assert torch.allclose(closed.features, encoder.encode_views(start), atol=1e-6)
    TTC(tau=1e9)(clf, images)
    moved = encoder.seen[-1]
    distance = [(encoder.raw_features(view) - anchor).norm(dim=1) for view in (start, moved)]
    assert (distance[1] > distance[0]).all()


def test_later_iterates_count_more() -> None:
    clf, encoder = watched_classifier(F64)
    x = toy_images(3, dtype=F64)
    seen = {}
    for beta in (-100.0, 0.0, 100.0):
        encoder.seen.clear()
        TTC(tau=1e9, beta=beta)(clf, x)
        _, *iterates, seen[beta] = encoder.seen
        assert len(iterates) == 2, "the start and the first step are encoded, the last step is only mixed in"
    start, first = iterates
    assert torch.allclose(seen[-100.0], start)
    last = 3 * seen[0.0] - start - first
    assert torch.allclose(seen[100.0], last)


def test_an_open_gate_costs_what_is_published_and_a_closed_one_less() -> None:
    clf, encoder = watched_classifier()
    images = toy_images(6)
    guard = TTC(tau=middle(images), steps=5)
    out = guard(clf, images)
    assert 0 < out.gated.sum() < 6
    assert encoder.encoded == int(out.passes.sum())
    assert encoder.reversed == int(out.backward_passes.sum())
    assert out.passes.tolist() == [7 if gated else 2 for gated in out.gated]
    assert out.backward_passes.tolist() == [5 if gated else 1 for gated in out.gated]
    assert guard.cost() == (7, 5)
    assert TTC().cost() == (4, 2)
