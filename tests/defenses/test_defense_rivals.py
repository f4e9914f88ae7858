"""TTC, DOC, MAC, Anti-Adv, HD and TTE: equal to plain loops, and refusals of encoders without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.defenses import DOC, HD, MAC, TTC, TTE, AntiAdv, tte
from react_clip.defenses.counterattack import DETOUR, PROBE, START, VIEW, VIEW_PROBE, VIEW_START, Counterattack
from reference import dot, unit
from toys import ToyEncoder, toy_classifier, toy_images

from . import literal, watching
from .watching import F64, branch, inside, literal_tower, normal_draws, uniform_draws

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


def test_anti_adv_keeps_its_first_label() -> None:
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


def test_the_gate_of_ttc_is_open_below_the_threshold_and_closed_at_it() -> None:
    clf, images = toy_classifier(), toy_images(5)
    rho = TTC()(clf, images).score
    for i in range(len(images)):
        at = TTC(tau=float(rho[i]))(clf, images)
        assert torch.equal(at.gated, rho < rho[i])
        assert TTC(tau=float(rho[i]) * (1 + 1e-5))(clf, images).gated[i]


def test_the_crops_of_tte_reach_both_ends_of_the_padding() -> None:
    corners = TTE(crops=50)._offsets(torch.arange(40), 2)
    assert (corners[0] == 2).all(), "the first is the image itself"
    assert sorted(corners[1:].unique().tolist()) == [0, 1, 2, 3, 4]


def test_gradients_flow_through_tte() -> None:
    images = toy_images(2, dtype=F64).requires_grad_()
    rc.as_module(toy_classifier(F64), TTE())(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


# ---------------------------------------------------------------------- all counterattacks

GUARDS: list[Counterattack] = [TTC(tau=1e9), DOC(), MAC(), AntiAdv(), HD()]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


@every_guard
def test_encoded_pixels_stay_in_range_and_in_the_ball(guard: Counterattack) -> None:
    clf, encoder = watching.watched_classifier()
    x = toy_images(4).round(decimals=1)
    guard(clf, x)
    assert all(pixels.min() >= 0 and pixels.max() <= 1 for pixels in encoder.seen)
    if isinstance(guard, TTC | DOC | HD):
        assert all(inside(pixels, x, guard.eps) for pixels in encoder.seen)


@every_guard
def test_gradients_do_not_flow_through(guard: Counterattack) -> None:
    images = toy_images(2).requires_grad_()
    net = rc.as_module(toy_classifier(), guard)
    assert not net(images).requires_grad
    assert images.grad is None


@every_guard
def test_a_ball_of_no_size_leaves_the_plain_answer(guard: Counterattack) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    if isinstance(guard, MAC):
        guard = guard.replace(views=1)
    still = guard.replace(step_size=0.0) if isinstance(guard, AntiAdv) else guard.replace(eps=0.0)
    assert torch.allclose(still(clf, images).logits, clf(images), atol=1e-9)


@every_guard
def test_a_constant_encoder_gives_finite_features(guard: Counterattack) -> None:
    clf = toy_classifier()
    for parameter in clf.encoder.tower[0].parameters():
        parameter.data.zero_()
    assert torch.isfinite(guard(clf, toy_images(3)).features).all()


class Opaque(ToyEncoder):
    """Features without a way back to the pixels."""

    def _image_features(self, normalised: Tensor) -> Tensor:
        return super()._image_features(normalised).detach()


@every_guard
def test_an_encoder_without_gradients_is_refused(guard: Counterattack) -> None:
    clf = rc.ZeroShotClassifier.from_features(Opaque(), ["a", "b"], torch.eye(2, 12))
    with pytest.raises(rc.ReactClipError, match="'toy' carry no gradient to the pixels"):
        guard(clf, toy_images(1))


@every_guard
def test_a_classifier_made_in_inference_mode_is_refused(guard: Counterattack) -> None:
    encoder = watching.WatchedEncoder()
    with torch.inference_mode():
        clf = rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], torch.eye(2, 12))
    with pytest.raises(rc.ReactClipError, match="classifier was made inside"):
        guard(clf, toy_images(1))
