"""DOC: the literal algorithm, the two ends of its weight, and the orthogonal detours."""

from __future__ import annotations

import pytest
import torch

from react_clip import noise
from react_clip.defenses import DOC, doc
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, inside, literal_tower, normal_draws, uniform_draws, watched_classifier


@pytest.mark.parametrize("options", [{}, {"diversity": 0.5, "momentum": 0.2, "probes": 2, "steps": 3}], ids=str)
def test_it_is_the_literal_algorithm(options: dict[str, float]) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    guard = DOC(**options)  # type: ignore[arg-type]
    # A threshold among these images, and a slope gentle enough to give every weight between 0 and 1.
    shift = guard(clf, images, seed=3).score
    guard = guard.replace(tau=float(shift.mean()), gamma=1.0 / float(shift.std()))
    out = guard(clf, images, seed=3)
    assert 0 < out.gated.sum() < 4, "both sides must be tried"
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        key = keys[i : i + 1]
        feature, moved = literal.doc(
            literal_tower(clf),
            images[i].flatten().tolist(),
            uniform_draws(branch(key, doc._START)),
            [normal_draws(branch(key, doc._PROBE, probe)) for probe in range(guard.probes)],
            [normal_draws(branch(key, doc._DETOUR, step)) for step in range(guard.steps)],
            eps=guard.eps,
            size=guard.step_size,
            diversity=guard.diversity,
            momentum=guard.momentum,
            tau=guard.tau,
            gamma=guard.gamma,
        )
        assert out.score[i] == pytest.approx(moved, abs=1e-11)
        assert bool(out.gated[i]) == (moved < guard.tau)
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-9)


def test_the_weight_runs_from_the_random_start_to_the_counterattack() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(5)
    views = {}
    for tau in (-1e9, 1e9):
        encoder.seen.clear()
        out = DOC(tau=tau)(clf, x)
        assert out.gated.all() if tau > 0 else not out.gated.any()
        views[tau] = encoder.seen[-1]
        start = encoder.seen[1 + 5]
    assert torch.equal(views[-1e9], start)
    assert inside(views[1e9], x, 4 / 255)
    anchor = encoder.raw_features(x)
    distance = {tau: (encoder.raw_features(view) - anchor).norm(dim=1) for tau, view in views.items()}
    assert (distance[1e9] > distance[-1e9]).all()


def test_detours_are_orthogonal_to_the_gradient_and_of_the_asked_length() -> None:
    slope = toy_images(3, dtype=F64) - 0.5
    step = DOC(diversity=0.05)._diversified(slope, torch.arange(3)).flatten(1)
    unit = torch.nn.functional.normalize(slope.flatten(1))
    detour = step - unit
    assert torch.allclose(detour.norm(dim=1), torch.full((3,), 0.05, dtype=F64))
    assert (detour * unit).sum(1).abs().max() < 1e-12


def test_it_costs_steps_and_probes() -> None:
    assert DOC().cost() == (11, 4)
    assert DOC(steps=2, probes=1).cost() == (5, 2)
