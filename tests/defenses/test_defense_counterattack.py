"""What the counterattacks share: the ball, the gradient, the climb, and what happens where gradients cannot be had."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.defenses import DOC, HD, MAC, TTC, AntiAdv
from react_clip.defenses.counterattack import Ball, Counterattack, ascend, distance_from, gradient
from toys import ToyEncoder, toy_classifier, toy_images

from .watching import F64, WatchedEncoder, inside, watched_classifier

GUARDS: list[Counterattack] = [TTC(tau=1e9), DOC(), MAC(), AntiAdv(), HD()]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


@settings(max_examples=30)
@given(eps=st.floats(0, 1), size=st.floats(0, 1), seed=st.integers(0, 99))
def test_nothing_leaves_the_ball_or_the_image_range(eps: float, size: float, seed: int) -> None:
    x = toy_images(2, seed=seed).round(decimals=1)
    keys = noise.stream_keys(x, seed)
    ball = Ball(x, eps)
    start = ball.random_start(keys)
    assert inside(start, x, eps)
    moved = ball.step(start, noise.normal(keys, x.shape[1:]), size)
    assert inside(moved, x, eps)
    assert torch.equal(ball.project(moved), moved)
    assert torch.equal(ball.project(x), x)
    assert inside(ball.take(torch.tensor([1])).random_start(keys[:1]), x[1:], eps)


def test_the_start_fills_the_ball_evenly() -> None:
    x = torch.full((8, 3, 32, 32), 0.5, dtype=F64)
    delta = (Ball(x, 0.1).random_start(torch.arange(8)) - x) / 0.1
    assert delta.abs().max() <= 1 + 1e-9
    assert delta.mean().abs() < 0.02
    assert (delta.square().mean() - 1 / 3).abs() < 0.02


def test_the_gradient_is_that_of_each_image_alone() -> None:
    clf, images = toy_classifier(F64), toy_images(3, dtype=F64)
    anchor = clf.encoder.raw_features(images).detach()
    moved = (images + 0.01).clamp(0, 1)
    features, slope = gradient(clf.encoder, moved, distance_from(anchor))
    assert torch.allclose(features, clf.encoder.raw_features(moved))
    bump = torch.zeros_like(images)
    bump[:, 1, 5, 7] = 1e-6

    def value(at: Tensor) -> Tensor:
        return (clf.encoder.raw_features(at) - anchor).square().sum(1)

    numeric = (value(moved + bump) - value(moved - bump)) / 2e-6
    assert torch.allclose(slope[:, 1, 5, 7], numeric, atol=1e-6)


def test_climbing_increases_the_feature_distance() -> None:
    clf, x = toy_classifier(), toy_images(6)
    with torch.no_grad():
        anchor = clf.encoder.raw_features(x)
    ball = Ball(x, 4 / 255)
    images = ball.random_start(noise.stream_keys(x, 0))
    objective = distance_from(anchor)
    values = [objective(clf.encoder.raw_features(images))]
    for _ in range(4):
        images = ascend(clf.encoder, images, objective, ball, steps=1, step_size=1 / 255)
        values.append(objective(clf.encoder.raw_features(images)))
    assert (torch.stack(values).diff(dim=0) > 0).all()
    assert inside(images, x, 4 / 255)


@every_guard
def test_whatever_is_encoded_is_an_image(guard: Counterattack) -> None:
    clf, encoder = watched_classifier()
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
def test_an_encoder_that_never_moves_is_survived(guard: Counterattack) -> None:
    clf = toy_classifier()
    for parameter in clf.encoder.tower[0].parameters():
        parameter.data.zero_()
    assert torch.isfinite(guard(clf, toy_images(3)).features).all()


class Opaque(ToyEncoder):
    """Features without a way back to the pixels."""

    def _image_features(self, normalised: Tensor) -> Tensor:
        return super()._image_features(normalised).detach()


@every_guard
def test_an_encoder_without_gradients_is_named(guard: Counterattack) -> None:
    clf = rc.ZeroShotClassifier.from_features(Opaque(), ["a", "b"], torch.eye(2, 12))
    with pytest.raises(rc.ReactClipError, match="'toy' carry no gradient to the pixels"):
        guard(clf, toy_images(1))


@every_guard
def test_a_classifier_made_in_inference_mode_is_named(guard: Counterattack) -> None:
    encoder = WatchedEncoder()
    with torch.inference_mode():
        clf = rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], torch.eye(2, 12))
    with pytest.raises(rc.ReactClipError, match="classifier was made inside"):
        guard(clf, toy_images(1))
