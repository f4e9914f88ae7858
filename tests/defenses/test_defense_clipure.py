"""CLIPure-Cos: equal to the steps of the released code for one image, its gradients and its prompts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip.defenses import CLIPure
from toys import toy_classifier, toy_images

from .conftest import F64


def released(features: Tensor, prompt: Tensor, steps: int = 10, size: float = 30.0) -> Tensor:
    """The steps as released: polar form, autograd for the direction, one norm for the whole batch, no second order."""
    momentum = torch.zeros_like(features)
    for _ in range(steps):
        length = features.norm(dim=1, keepdim=True)
        unit = features / length
        loss = -F.cosine_similarity(features, prompt.expand_as(features), dim=1)
        slope = torch.autograd.grad(loss, features, torch.ones_like(loss), retain_graph=True)[0]
        slope = length * slope
        momentum = 0.0 * momentum - slope / slope.norm(p=2)
        unit = unit + size * momentum
        features = length * (unit / unit.norm(dim=1, keepdim=True))
    return features


def pixel_gradient(logits: Tensor, pixels: Tensor) -> Tensor:
    weights = torch.arange(1.0, 1 + logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    return torch.autograd.grad((weights * logits).sum(), pixels)[0]


def test_answers_and_gradients_are_those_of_the_released_steps() -> None:
    clf, guard = toy_classifier(F64), CLIPure()
    batch = toy_images(3, dtype=F64)
    for number, image in enumerate(batch.split(1)):
        pixels = image.clone().requires_grad_()
        expected = released(clf.encoder(pixels), clf.empty_prompt())
        assert torch.allclose(guard(clf, batch).features[number], expected[0], atol=1e-6)
        # More steps would make the gradient smaller than the rounding error of doubles.
        ours = pixel_gradient(guard.replace(steps=3)(clf, pixels).logits, pixels)
        theirs = pixel_gradient(clf.logits(released(clf.encoder(pixels), clf.empty_prompt(), steps=3)), pixels)
        assert theirs.abs().max() > 0
        assert torch.allclose(ours / theirs.abs().max(), theirs / theirs.abs().max(), atol=1e-6)


def test_the_full_graph_is_the_derivative_of_the_answer() -> None:
    clf, guard = toy_classifier(F64), CLIPure(steps=3, step_size=0.7, graph="full")
    features = clf.encoder(toy_images(3, dtype=F64)).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: guard.purify(F.normalize(f, dim=1), clf.empty_prompt()[None]), features)
