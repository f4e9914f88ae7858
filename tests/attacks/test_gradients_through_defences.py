"""Gradients through the whole correction: right, cheap in memory, and with fresh noise on demand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import mappings, noise
from react_clip.defenses.base import answer, gradients
from react_clip.defenses.react import logits_of
from react_clip.encoders.base import Gradients
from toys import toy_classifier, toy_images

F64 = torch.float64
OPEN = rc.ReACT(tau=None, views=3, mapping=mappings.Linear(0.05, 0.1))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("detach_sigma", [False, True])
@pytest.mark.parametrize("tau", [None, -1e9])
def test_gradients_agree_with_finite_differences(tau: float | None, detach_sigma: bool, checkpoint: bool) -> None:
    clf, images = toy_classifier(F64), toy_images(2, dtype=F64)
    guard = OPEN.replace(tau=tau)
    keys = noise.stream_keys(images, 3)
    weights = torch.randn(2, 5, dtype=F64, generator=torch.Generator().manual_seed(2))
    pixels = images.clone().requires_grad_()
    with gradients(clf.encoder, Gradients(checkpoint, detach_sigma)):
        found = guard.correct(clf.encoder, pixels, keys, logits_of(clf))
    (slope,) = torch.autograd.grad((weights * clf.logits(found.features)).sum(), pixels)
    # A detached scale is a constant: the difference quotient must hold it fixed too.
    scale = found.sigma.detach()

    def value(at: Tensor) -> float:
        if detach_sigma:
            constant = [guard.replace(mapping=mappings.Constant(float(s))) for s in scale]
            parts = [
                g.correct(clf.encoder, at[i : i + 1], keys[i : i + 1], logits_of(clf)).features
                for i, g in enumerate(constant)
            ]
            features = torch.cat(parts)
        else:
            features = guard.correct(clf.encoder, at, keys, logits_of(clf)).features
        return float((weights * clf.logits(features)).sum())

    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        direction = torch.randn(images.shape, dtype=F64, generator=generator)
        step = 1e-5
        numeric = (value(images + step * direction) - value(images - step * direction)) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(numeric, rel=1e-4, abs=1e-6)


def test_checkpointed_gradients_are_the_plain_ones_and_memory_stays_bounded() -> None:
    clf = toy_classifier()
    encoder: Any = clf.encoder
    guard = rc.ReACT(tau=0.1, views=5, lazy=False, max_batch=4)
    sizes: list[int] = []
    encode = encoder._image_features
    encoder._image_features = lambda views: (sizes.append(len(views)), encode(views))[1]

    def run(**options: Any) -> tuple[Tensor, Tensor, int]:
        sizes.clear()
        pixels = toy_images(3).requires_grad_()
        logits = rc.as_module(clf, guard, seed=4, differentiable=True, **options)(pixels)
        logits[:, 1].sum().backward()
        assert pixels.grad is not None
        return logits.detach(), pixels.grad, sum(sizes)

    kept, recomputed = run(checkpoint=False), run()
    assert torch.equal(kept[0], recomputed[0])
    assert torch.allclose(kept[1], recomputed[1], atol=1e-6)
    assert max(sizes) <= 4
    # 3 images: 1 clean, 2 probes, 1 augmented and 5 anchor views; the augmented one only decides the gate.
    assert (kept[2], recomputed[2]) == (3 * 9, 3 * (9 + 8)), "what was not kept is encoded again"


def test_fresh_noise_differs_per_call_and_repeats_with_the_seed() -> None:
    clf, images = toy_classifier(), toy_images(2)

    def calls(**options: Any) -> list[Tensor]:
        module = rc.as_module(clf, OPEN, differentiable=True, **options)
        return [module(images) for _ in range(3)]

    once, again, other = calls(fresh=True, seed=1), calls(fresh=True, seed=1), calls(fresh=True, seed=2)
    assert not torch.equal(once[0], once[1])
    assert not torch.equal(once[1], once[2])
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    fixed = calls(seed=1)
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(fixed[0], OPEN(clf, images, seed=1).logits)
    secret = calls(fresh=True, seed=b"secret")
    assert not torch.equal(secret[0], secret[1])


class Mirror(rc.Undefended):
    """Answers for the mirror image, without gradients; without a kind of its own it is not registered."""

    def __call__(self, clf: rc.ZeroShotClassifier, images: Any, seed: Any = 0) -> rc.Defended:
        return answer(clf, clf.encoder(images.flip(3)).detach(), passes=(1, 0))


def test_a_defence_without_gradients_gets_those_of_clip() -> None:
    clf, guard, images = toy_classifier(), Mirror(), toy_images(2)
    pixels = images.clone().requires_grad_()
    logits = rc.as_module(clf, guard, differentiable=True)(pixels)
    assert torch.equal(logits.detach(), guard(clf, images).logits)
    logits[:, 0].sum().backward()
    plain = images.clone().requires_grad_()
    clf(plain)[:, 0].sum().backward()
    assert torch.equal(pixels.grad, plain.grad)  # type: ignore[arg-type]
    assert not rc.as_module(clf, guard)(images.clone().requires_grad_()).requires_grad
    with torch.no_grad():
        assert not rc.as_module(clf, guard, differentiable=True)(pixels).requires_grad
