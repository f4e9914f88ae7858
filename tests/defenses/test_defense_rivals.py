"""TTC, DOC, MAC, Anti-Adv, HD and TTE: equal to plain loops, and refusals of encoders without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.defenses import CSR, DOC, ET3, HD, MAC, TTC, TTE, AntiAdv, tte
from react_clip.defenses.counterattack import DETOUR, START, VIEW, VIEW_PROBE, VIEW_START, Counterattack
from toys import ToyEncoder, toy_classifier, toy_images

from . import literal, watching
from .watching import F64, branch, inside, literal_tower, normal_draws, uniform_draws

# ---------------------------------------------------------------------- equal to plain loops


def flat(image: Tensor) -> literal.Array:
    return image.flatten().numpy()


def written_out(guard: Any, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> dict[str, Any]:
    """What plain loops compute for one image ``[1, 3, 16, 16]`` with the same random numbers."""
    tower, start = literal_tower(clf), uniform_draws(branch(key, START))
    if isinstance(guard, TTC):
        return literal.ttc(tower, guard, flat(image), start)
    if isinstance(guard, DOC):
        detours = [normal_draws(branch(key, DETOUR, step)) for step in range(guard.steps)]
        return literal.doc(tower, guard, flat(image), start, detours)
    if isinstance(guard, MAC):
        views = []
        for stream in (branch(key, VIEW, number) for number in range(guard.views)):
            view = guard.augmentation(image, stream) if views else image
            probe = guard.augmentation(view, branch(stream, VIEW_PROBE))
            views.append((flat(view), flat(probe), uniform_draws(branch(stream, VIEW_START))))
        return literal.mac(tower, guard, views)
    if isinstance(guard, AntiAdv):
        return literal.anti_adv(tower, guard, flat(image))
    if isinstance(guard, HD):
        return literal.hd(tower, guard, flat(image), start)
    drawn = guard.crops if guard.different else min(guard.crops, 1)
    corners = [int(draw * 2 * guard.padding) for draw in noise.uniform(branch(key, tte.CROPS), 2 * drawn)[0].tolist()]
    return literal.tte(tower, guard, image[0].numpy(), list(zip(corners[::2], corners[1::2], strict=True)))


@pytest.mark.parametrize(
    "guard",
    [
        *[TTC(steps=steps) for steps in (1, 2, 5)],
        DOC(),
        DOC(diversity=0.5, momentum=0.2, beta=0.5, steps=3),
        DOC(steps=1),
        *[MAC(views=views) for views in (1, 2, 3)],
        AntiAdv(),
        AntiAdv(steps=3, step_size=0.15),
        *[HD(steps=steps) for steps in (1, 5)],
        *[TTE(crops=crops, padding=padding) for crops, padding in ((4, 4), (2, 1), (0, 4))],
        TTE(different=True),
    ],
    ids=str,
)
def test_it_equals_plain_loops(guard: Any) -> None:
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
        for name, expected in written_out(guard, clf, images[i : i + 1], keys[i : i + 1]).items():
            assert getattr(out, name)[i].tolist() == pytest.approx(expected, abs=1e-8), name


def test_anti_adv_keeps_its_first_label() -> None:
    clf, images = toy_classifier(F64), toy_images(40, dtype=F64)
    labels = clf(images).argmax(1)
    overshot = (AntiAdv(steps=1, step_size=0.15)(clf, images).labels != labels).nonzero().flatten().tolist()
    assert overshot, "some step must leave its class"
    guard = AntiAdv(steps=2, step_size=0.15)
    out = guard(clf, images)
    for i in overshot:
        expected = literal.anti_adv(literal_tower(clf), guard, flat(images[i]))["features"]
        assert out.features[i].tolist() == pytest.approx(expected, abs=1e-9)


# ---------------------------------------------------------------------- costs and limits


def test_the_gate_of_ttc_is_open_below_the_threshold_and_closed_at_it() -> None:
    clf, images = toy_classifier(), toy_images(5)
    rho = TTC()(clf, images).score
    for i in range(len(images)):
        at = TTC(tau=float(rho[i]))(clf, images)
        assert torch.equal(at.gated, rho < rho[i])
        assert TTC(tau=float(rho[i]) * (1 + 1e-5))(clf, images).gated[i]


def test_the_crops_of_tte_start_at_every_pixel_but_the_last() -> None:
    corners = TTE(crops=50, different=True, padding=2)._offsets(torch.arange(40))
    assert (corners[0] == 2).all(), "the first is the image itself"
    assert sorted(corners[1:].unique().tolist()) == [0, 1, 2, 3]


def test_gradients_flow_through_tte() -> None:
    images = toy_images(2, dtype=F64).requires_grad_()
    rc.as_module(toy_classifier(F64), TTE())(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


# ---------------------------------------------------------------------- all counterattacks

GUARDS: list[Counterattack] = [TTC(tau=1e9), DOC(), MAC(), AntiAdv(), HD(), CSR(threshold=1.0), ET3()]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


@every_guard
def test_encoded_pixels_stay_in_range_and_in_the_ball_except_those_of_anti_adv(guard: Counterattack) -> None:
    clf, encoder = watching.watched_classifier()
    x = toy_images(4).round(decimals=1)
    guard(clf, x)
    low, high = min(pixels.min() for pixels in encoder.seen), max(pixels.max() for pixels in encoder.seen)
    # Anti-Adv moves pixels that lie at the ends of the range by up to two steps beyond them.
    beyond = guard.steps * guard.step_size + 1e-6 if isinstance(guard, AntiAdv) else 0.0
    assert -beyond <= low
    assert high <= 1 + beyond
    assert (low < 0 and high > 1) == isinstance(guard, AntiAdv)
    if isinstance(guard, TTC | DOC | HD):
        assert all(inside(pixels, x, guard.eps) for pixels in encoder.seen)


@every_guard
def test_gradients_are_those_at_the_moved_pixels(guard: Counterattack) -> None:
    clf, encoder = watching.watched_classifier()
    images = toy_images(2).requires_grad_()
    # One view: those of MAC are moved after an augmentation.
    rc.as_module(clf, guard.replace(views=1) if isinstance(guard, MAC) else guard)(images)[:, 0].sum().backward()
    moved = encoder.seen[-1].detach().requires_grad_()
    clf.logits(encoder.encode_views(moved))[:, 0].sum().backward()
    assert images.grad is not None
    assert moved.grad is not None
    assert images.grad.abs().sum() > 0
    assert torch.allclose(images.grad, moved.grad, atol=1e-6)
    assert not torch.allclose(images.detach(), moved.detach(), atol=1e-3)


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
