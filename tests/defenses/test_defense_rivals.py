"""TTC, DOC, MAC, Anti-Adv, HD and TTE: equal to plain loops, with the published costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.defenses import DOC, HD, MAC, TTC, TTE, AntiAdv, Defense, tte
from react_clip.defenses.counterattack import DETOUR, PROBE, START, VIEW, VIEW_PROBE, VIEW_START
from reference import dot, unit
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, inside, literal_tower, normal_draws, uniform_draws, watched_classifier

# ---------------------------------------------------------------------- equal to plain loops

Expected = dict[str, Any]
"""Fields of ``Defended`` for one image."""


def literal_ttc(guard: TTC, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    draw, flat = uniform_draws(branch(key, START)), image.flatten().tolist()
    sizes = {"eps": guard.eps, "steps": guard.steps, "size": guard.step_size}
    feature, rho = literal.ttc(literal_tower(clf), flat, draw, **sizes, tau=guard.tau, beta=guard.beta)
    return {"features": feature, "score": rho, "gated": rho < guard.tau}


def literal_doc(guard: DOC, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    feature, shift = literal.doc(
        literal_tower(clf),
        image.flatten().tolist(),
        uniform_draws(branch(key, START)),
        [normal_draws(branch(key, PROBE, probe)) for probe in range(guard.probes)],
        [normal_draws(branch(key, DETOUR, step)) for step in range(guard.steps)],
        eps=guard.eps,
        size=guard.step_size,
        diversity=guard.diversity,
        momentum=guard.momentum,
        tau=guard.tau,
        gamma=guard.gamma,
    )
    return {"features": feature, "score": shift, "gated": shift < guard.tau}


def literal_mac(guard: MAC, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    features, ratios = [], []
    for number in range(guard.views):
        stream = branch(key, VIEW, number)
        view = guard.augmentation(image, stream) if number else image
        feature, ratio = literal.mac_view(
            literal_tower(clf),
            view.flatten().tolist(),
            guard.augmentation(view, branch(stream, VIEW_PROBE)).flatten().tolist(),
            uniform_draws(branch(stream, VIEW_START)),
            eps=guard.eps,
            steps=guard.steps,
            size=guard.step_size,
            tau=guard.tau,
            temperature=guard.temperature,
        )
        features.append(feature)
        ratios.append(ratio)
    mean = [sum(column) / guard.views for column in zip(*features, strict=True)]
    logits = [100.0 * dot(mean, c) for c in clf.class_features.tolist()]
    return {"features": unit(mean), "logits": logits, "score": max(ratios), "gated": max(ratios) >= guard.tau}


def literal_anti_adv(guard: AntiAdv, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    classes, flat = clf.class_features.tolist(), image.flatten().tolist()
    return {"features": literal.anti_adv(literal_tower(clf), classes, flat, steps=guard.steps, size=guard.step_size)}


def literal_hd(guard: HD, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    classes, flat, draw = clf.class_features.tolist(), image.flatten().tolist(), uniform_draws(branch(key, START))
    sizes = {"eps": guard.eps, "steps": guard.steps, "size": guard.step_size}
    return {"features": literal.hd(literal_tower(clf), classes, flat, draw, **sizes)}


def literal_tte(guard: TTE, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> Expected:
    margin = round(16 * guard.padding)
    draws = noise.uniform(branch(key, tte._CROPS), 2 * guard.crops)[0].tolist()
    corners = [int(draw * (2 * margin + 1)) for draw in draws]
    pairs = list(zip(corners[::2], corners[1::2], strict=True))
    classes, flat = clf.class_features.tolist(), image.flatten().tolist()
    logits, feature = literal.tte(literal_tower(clf), classes, flat, pairs, size=16, margin=margin)
    return {"features": feature, "logits": logits}


@pytest.mark.parametrize(
    ("guard", "loops"),
    [
        *[(TTC(steps=steps), literal_ttc) for steps in (1, 2, 5)],
        (DOC(), literal_doc),
        (DOC(diversity=0.5, momentum=0.2, probes=2, steps=3), literal_doc),
        *[(MAC(views=views), literal_mac) for views in (1, 2, 3)],
        (AntiAdv(), literal_anti_adv),
        (AntiAdv(steps=3, step_size=0.15), literal_anti_adv),
        *[(HD(steps=steps), literal_hd) for steps in (1, 5)],
        *[(TTE(crops=crops, padding=padding), literal_tte) for crops, padding in ((4, 1 / 8), (2, 1 / 4), (0, 1 / 8))],
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_it_equals_plain_loops(guard: Any, loops: Callable[..., Expected]) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    score = guard(clf, images, seed=3).score
    if hasattr(guard, "tau"):
        # Between the images, so that both sides of the gate are tried, and with weights between 0 and 1.
        guard = guard.replace(tau=float(score.mean()))
    if isinstance(guard, DOC):
        guard = guard.replace(gamma=1.0 / float(score.std()))
    if isinstance(guard, MAC):
        guard = guard.replace(temperature=float(score.std()))
    out = guard(clf, images, seed=3)
    assert not hasattr(guard, "tau") or 0 < out.gated.sum() < 4
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        for name, expected in loops(guard, clf, images[i : i + 1], keys[i : i + 1]).items():
            assert getattr(out, name)[i].tolist() == pytest.approx(expected, abs=1e-8), name


def test_anti_adv_keeps_the_first_label_when_a_step_overshoots() -> None:
    clf, images = toy_classifier(F64), toy_images(40, dtype=F64)
    labels = clf(images).argmax(1)
    overshot = (AntiAdv(steps=1, step_size=0.15)(clf, images).labels != labels).nonzero().flatten().tolist()
    assert overshot, "some step must leave its class"
    guard = AntiAdv(steps=2, step_size=0.15)
    out = guard(clf, images)
    for i in overshot:
        expected = literal_anti_adv(guard, clf, images[i], torch.empty(0))["features"]
        assert out.features[i].tolist() == pytest.approx(expected, abs=1e-9)


# ---------------------------------------------------------------------- costs and limits


@pytest.mark.parametrize(
    ("guard", "forward", "backward"),
    [
        (TTC(tau=-1.0), 2, 1),
        (TTC(tau=1e9), 4, 2),
        (TTC(tau=1e9, steps=5), 7, 5),
        (DOC(), 11, 4),
        (MAC(), 14, 8),
        (AntiAdv(), 3, 2),
        (HD(), 21, 20),
        (TTE(), 10, 0),
    ],
    ids=str,
)
def test_the_passes_are_the_published_ones(guard: Defense, forward: int, backward: int) -> None:
    out = guard(toy_classifier(), toy_images(3))
    assert (out.passes.tolist(), out.backward_passes.tolist()) == ([forward] * 3, [backward] * 3)
    most = guard.cost()
    assert most[0] >= forward
    assert most[1] >= backward


def test_the_gate_of_ttc_is_open_below_the_threshold_and_closed_at_it() -> None:
    clf, images = toy_classifier(), toy_images(5)
    rho = TTC()(clf, images).score
    for i in range(len(images)):
        at = TTC(tau=float(rho[i]))(clf, images)
        assert torch.equal(at.gated, rho < rho[i])
        assert TTC(tau=float(rho[i]) * (1 + 1e-5))(clf, images).gated[i]


@pytest.mark.parametrize("guard", [TTC(tau=1e9), DOC(tau=1e9), MAC(tau=-1e9, views=1)], ids=str)
def test_a_full_counterattack_goes_further_than_a_random_start(guard: Any) -> None:
    clf, encoder = watched_classifier()
    x = toy_images(5)
    anchor = encoder.raw_features(x)
    assert guard(clf, x).gated.all()
    moved = encoder.seen[-1]
    assert inside(moved, x, guard.eps)
    TTC(eps=guard.eps, tau=-1.0)(clf, x)
    start = encoder.seen[-1]
    far, near = ((encoder.raw_features(view) - anchor).norm(dim=1) for view in (moved, start))
    assert (far > near).all()


def test_mac_leaves_views_alone_that_augmentation_hardly_moves() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(5)
    assert not MAC(tau=1e9, views=1)(clf, x).gated.any()
    assert torch.equal(encoder.seen[-1], x)


def test_the_noise_of_doc_is_orthogonal_to_the_gradient_and_of_the_given_length() -> None:
    slope = toy_images(3, dtype=F64) - 0.5
    step = DOC(diversity=0.05)._diversified(slope, torch.arange(3)).flatten(1)
    direction = torch.nn.functional.normalize(slope.flatten(1))
    added = step - direction
    assert torch.allclose(added.norm(dim=1), torch.full((3,), 0.05, dtype=F64))
    assert (added * direction).sum(1).abs().max() < 1e-12


def test_tte_of_equal_views_is_the_plain_answer() -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    symmetric = (images + images.flip(-1)) / 2
    assert torch.allclose(TTE(padding=0.0)(clf, symmetric).logits, clf(symmetric), atol=1e-9)
    assert not torch.allclose(TTE()(clf, images).logits, clf(images), atol=1e-3)


def test_the_crops_of_tte_reach_both_ends_of_the_padding() -> None:
    corners = TTE(crops=50)._offsets(torch.arange(40), 2)
    assert (corners[0] == 2).all(), "the first is the image itself"
    assert sorted(corners[1:].unique().tolist()) == [0, 1, 2, 3, 4]


def test_gradients_flow_through_tte() -> None:
    images = toy_images(2, dtype=F64).requires_grad_()
    rc.as_module(toy_classifier(F64), TTE())(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
