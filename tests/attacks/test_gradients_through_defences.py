"""Gradients through a defence: right, the same with and without kept activations, and BPDA where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import mappings, noise
from react_clip.defenses.batch import Gradients
from toys import toy_classifier, toy_images

F64 = torch.float64
OPEN = rc.ReACT(tau=None, views=3, mapping=mappings.Linear(0.05, 0.1))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("guard", [OPEN, OPEN.replace(tau=-1e9), rc.SecondLook(threshold=0.0)], ids=str)
def test_gradients_agree_with_finite_differences(guard: rc.defenses.Defense, checkpoint: bool) -> None:
    clf, images = toy_classifier(F64), toy_images(1, dtype=F64)
    keys = noise.stream_keys(images, 3)
    weights = torch.randn(1, 5, dtype=F64, generator=torch.Generator().manual_seed(2))

    def answer(at: Tensor) -> Tensor:
        return (weights * guard.run(clf.encoder, at, keys, clf, how=Gradients(checkpoint)).logits).sum()

    pixels = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(answer(pixels), pixels)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        direction = torch.randn(images.shape, dtype=F64, generator=generator)
        up, down = (float(answer(images + step * direction)) for step in (1e-5, -1e-5))
        assert float((slope * direction).sum()) == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-6)


def test_fresh_noise_differs_per_call_and_repeats_with_the_seed() -> None:
    clf, images = toy_classifier(), toy_images(2)

    def calls(**options: Any) -> list[Tensor]:
        module = rc.as_module(clf, OPEN, differentiable=True, **options)
        return [module(images) for _ in range(3)]

    once, again, other = calls(fresh=True, seed=1), calls(fresh=True, seed=1), calls(fresh=True, seed=2)
    assert not torch.equal(once[0], once[1])
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    fixed = calls(seed=1)
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(fixed[0], OPEN(clf, images, seed=1).logits)


def test_a_defence_without_gradients_gets_those_of_clip() -> None:
    clf, guard, images = toy_classifier(), rc.defenses.CLIPure(graph="none"), toy_images(2)
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
