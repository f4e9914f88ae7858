"""TTC, DOC, MAC, Anti-Adv, HD, CSR, ET3 and TTE equal plain loops, and refuse encoders without gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import literal
import react_clip as rc
from literal import Array, Tower
from react_clip import noise
from react_clip.augment import low_pass
from react_clip.defenses import CSR, DOC, ET3, HD, MAC, TTC, TTE, AntiAdv, Defense, doc, mac, tte
from react_clip.defenses.ttc import START
from toys import ToyEncoder, toy_classifier, toy_images

from .conftest import F64


def literal_tower(clf: rc.ZeroShotClassifier) -> Tower:
    """The encoder as functions of arrays, one image at a time."""

    def raw(flat: Tensor) -> Tensor:
        return clf.encoder.raw(flat.reshape(1, 3, 16, 16))[0]

    def encode(image: Array) -> Array:
        return raw(torch.tensor(image)).numpy()

    def pull_back(image: Array, vector: Array) -> Array:
        return torch.autograd.functional.vjp(raw, torch.tensor(image), torch.tensor(vector))[1].numpy()

    return Tower(encode, pull_back, clf.class_features.numpy())


def branch(keys: Tensor, *path: int) -> Tensor:
    """The stream after several forks."""
    for step in path:
        keys = noise.fork(keys, step)
    return keys


def uniform_draws(keys: Tensor) -> Array:
    """One uniform number per pixel of the toy's only image."""
    return noise.uniform(keys, 3 * 16 * 16)[0].double().numpy()


def normal_draws(keys: Tensor) -> Array:
    """One normal number per pixel of the toy's only image."""
    return noise.normal(keys, (3 * 16 * 16,))[0].double().numpy()


def written_out(guard: Any, clf: rc.ZeroShotClassifier, image: Tensor, key: Tensor) -> dict[str, Any]:
    """What plain loops compute for one image ``[1, 3, 16, 16]`` with the same random numbers."""
    tower, start, flat = literal_tower(clf), uniform_draws(branch(key, START)), image.flatten().numpy()
    if isinstance(guard, TTC):
        return literal.ttc(tower, guard, flat, start)
    if isinstance(guard, DOC):
        detours = [normal_draws(branch(key, doc.DETOUR, step)) for step in range(guard.steps)]
        return literal.doc(tower, guard, flat, start, detours)
    if isinstance(guard, MAC):
        views: list[Any] = []
        for stream in (branch(key, mac.VIEW, number) for number in range(guard.views)):
            view = guard.augmentation(image, stream) if views else image
            probe = guard.augmentation(view, branch(stream, mac.PROBE))
            draws = uniform_draws(branch(stream, mac.START))
            views.append((view.flatten().numpy(), probe.flatten().numpy(), draws))
        return literal.mac(tower, guard, views)
    if isinstance(guard, TTE):
        corner = [int(draw * 2 * guard.padding) for draw in noise.uniform(branch(key, tte.CROPS), 2)[0].tolist()]
        return literal.tte(tower, guard, image[0].numpy(), (corner[0], corner[1]))
    if isinstance(guard, HD):
        return literal.hd(tower, guard, flat, start)
    loop: Any = {"csr": literal.csr, "et3": literal.et3, "anti-adv": literal.anti_adv}[guard.kind]
    return dict(loop(tower, guard, flat))


@pytest.mark.parametrize(
    "guard",
    [
        *[TTC(steps=steps) for steps in (1, 2, 5)],
        DOC(),
        DOC(diversity=0.5, momentum=0.2, beta=0.5, steps=3),
        *[MAC(views=views) for views in (1, 3)],
        AntiAdv(),
        AntiAdv(steps=3, step_size=0.15),
        *[HD(steps=steps) for steps in (1, 5)],
        *[CSR(radius=3.0, steps=steps) for steps in (1, 2, 4)],
        CSR(radius=3.0, eps=0.1, step_size=0.15, steps=5),
        ET3(),
        ET3(steps=5, eps=0.2, step_size=1.0),
        TTE(),
        TTE(crops=2, padding=1),
    ],
    ids=str,
)
def test_it_equals_plain_loops(guard: Any) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    score = guard(clf, images, seed=3).score
    # Between the images, so that both sides of the gate are tried, and with weights between 0 and 1.
    if hasattr(guard, "tau"):
        guard = guard.replace(tau=float(score.mean()))
    if isinstance(guard, CSR):
        guard = guard.replace(threshold=float(score.mean()))
    if isinstance(guard, DOC):
        guard = guard.replace(gamma=1.0 / float(score.std()))
    if isinstance(guard, MAC):
        guard = guard.replace(temperature=float(score.std()))
    out = guard(clf, images, seed=3)
    assert "gate_open" not in out.diagnostics or 0 < out.gate_open.sum() < 4
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        for name, expected in written_out(guard, clf, images[i : i + 1], keys[i : i + 1]).items():
            assert getattr(out, name)[i].tolist() == pytest.approx(expected, abs=1e-7), name


def test_anti_adv_keeps_its_first_label() -> None:
    clf, images = toy_classifier(F64), toy_images(40, dtype=F64)
    labels = clf(images).argmax(1)
    overshot = (AntiAdv(steps=1, step_size=0.15)(clf, images).labels != labels).nonzero().flatten().tolist()
    assert overshot, "some step must leave its class"
    guard = AntiAdv(steps=2, step_size=0.15)
    out = guard(clf, images)
    for i in overshot:
        expected = literal.anti_adv(literal_tower(clf), guard, images[i].flatten().numpy())["features"]
        assert out.features[i].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("side", [15, 16])
def test_the_low_pass_filter_equals_the_centred_mask_at_even_and_odd_sizes(side: int) -> None:
    image = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=F64)
    for filtered, original in zip(low_pass(image, 2.5), image, strict=True):
        assert np.allclose(filtered.numpy(), literal.low_pass(original.numpy(), 2.5), atol=1e-12)


@pytest.mark.parametrize("guard", [TTC(), CSR(radius=3.0)], ids=lambda guard: guard.name)
def test_a_gate_is_open_below_the_threshold_and_closed_at_it(guard: Any) -> None:
    clf, images = toy_classifier(F64), toy_images(5, dtype=F64)
    field = "tau" if isinstance(guard, TTC) else "threshold"
    score = guard(clf, images).score
    for value in score:
        assert torch.equal(guard.replace(**{field: float(value)})(clf, images).gate_open, score < value)


GUARDS: list[Defense] = [TTC(tau=1e9), DOC(), MAC(views=1), AntiAdv(), HD(), CSR(threshold=1.0), ET3()]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


class Watched(ToyEncoder):
    """Keeps every batch of pixels that it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.tower.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0] * self.std + self.mean))


@every_guard
def test_moved_pixels_stay_in_the_ball_and_gradients_are_taken_there(guard: Any) -> None:
    toy, encoder = toy_classifier(), Watched()
    clf = rc.ZeroShotClassifier.from_features(encoder, toy.names, toy.class_features)
    images = toy_images(4).round(decimals=1).requires_grad_()
    rc.as_module(clf, guard)(images)[:, 0].sum().backward()
    moved = encoder.seen[-1].detach()
    beyond = guard.steps * guard.step_size if isinstance(guard, AntiAdv) else 0.0
    assert moved.min() >= -beyond - 1e-6
    assert moved.max() <= 1 + beyond + 1e-6
    assert (bool(moved.min() < -0.01)) == isinstance(guard, AntiAdv), "only Anti-Adv leaves [0, 1], as released"
    assert 1e-3 < (moved - images).abs().max() <= getattr(guard, "eps", beyond) + 1e-6
    moved.requires_grad_()
    clf.logits(toy.encoder.encode(moved))[:, 0].sum().backward()
    assert images.grad is not None
    assert moved.grad is not None
    assert torch.allclose(images.grad, moved.grad, atol=1e-5)


@every_guard
def test_encoders_without_gradients_are_refused(guard: Any) -> None:
    opaque = ToyEncoder()
    opaque.tower.register_forward_hook(lambda _tower, _inputs, features: features.detach())
    clf = rc.ZeroShotClassifier.from_features(opaque, ["a", "b"], torch.eye(2, 12))
    with pytest.raises(rc.ReactClipError, match="'toy' carry no gradient to the pixels"):
        guard(clf, toy_images(1))
