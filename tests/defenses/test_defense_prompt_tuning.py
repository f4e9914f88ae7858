"""R-TPT and SS-TPT: soft prompts equal hard ones, tuning equals a literal copy of it, and images share nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import react_clip as rc
from react_clip import Encoder, noise
from react_clip.defenses import RTPT, SSTPT, prompt_tuning
from react_clip.defenses.prompt_tuning import PromptTuning, SoftPrompts
from toys import toy_classifier, toy_images

from .conftest import F64, NAMES, SMALL_RTPT, WORDS, both, classifier, photos

# ---------------------------------------------------------------------- a second way to read soft prompts


@contextmanager
def words_replaced(tower: Any, context: Tensor) -> Iterator[None]:
    """The library's own text tower, with the embeddings of the first words swapped on their way in."""
    table = next(module for name, module in tower.named_modules() if name.endswith("token_embedding"))
    count = len(context)

    def swap(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :1], context.expand(len(output), -1, -1), output[:, 1 + count :]], 1)

    handle = table.register_forward_hook(swap)
    try:
        yield
    finally:
        handle.remove()


def hooked_features(encoder: Encoder, context: Tensor) -> Tensor:
    with words_replaced(encoder.text, context):
        features = encoder.text._features([f"{WORDS} {name}." for name in NAMES])
    return features / features.norm(dim=1, keepdim=True)


def random_contexts(encoder: Encoder, count: int) -> Tensor:
    start = SoftPrompts(encoder, WORDS, NAMES).start
    shift = torch.randn(count, *start.shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    return start + 0.02 * shift.to(start.dtype)


@pytest.mark.parametrize("library", ["hf", "open_clip"])
def test_embedded_prompts_are_the_prompts_however_long(places: dict[str, str], library: str) -> None:
    encoder = rc.load(places[library], device="cpu")
    sentences = ["x", "a very long sentence about nothing " * 30, "two words", "a photo of a cat."]
    embedded = encoder.text.encode_embedded(*encoder.text.embed(sentences))
    assert (embedded - encoder.encode_text(sentences)).abs().max() < 1e-5
    assert torch.pdist(embedded).min() > 1e-2


@pytest.mark.parametrize("most", [5, 1000])
def test_the_gradient_of_the_context_agrees_with_finite_differences(
    encoder: Encoder, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_tuning, "PROMPTS", most)
    contexts = random_contexts(encoder, 2).requires_grad_()
    prompts = SoftPrompts(encoder, WORDS, NAMES)
    assert torch.autograd.gradcheck(prompts, (contexts,), fast_mode=True, eps=1e-6)
    assert all(parameter.grad is None for parameter in encoder.parameters())


# ---------------------------------------------------------------------- the algorithms once more, image by image


def literal_views(guard: PromptTuning, image: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Each view of the image, cut to 8 bits, and its stream, drawn alone."""
    key = noise.fork(noise.stream_keys(image[None], seed), prompt_tuning.VIEWS)
    image = image.mul(255).byte().to(F64) / 255
    streams = [noise.fork(key, number) for number in range(guard.views)]
    return [(image[None] if i == 0 else guard.augmix(image[None], stream), stream) for i, stream in enumerate(streams)]


def step_of_adamw(context: Tensor, slope: Tensor, rate: float) -> Tensor:
    """The first step from rest: decay by 1 %, then a step whose length hardly depends on the slope."""
    return context * (1 - rate * 0.01) - rate * slope / (slope.abs() + 1e-8)


def literal_entropy(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return -sum((p[k] * p[k].log() for k in range(len(p))), torch.zeros((), dtype=F64))


def mean_of(values: list[Any]) -> Any:
    return sum(values[1:], values[0]) / len(values)


Loss = Callable[[list[Tensor], list[int]], Tensor]
"""From the logits of all views and the numbers of the surest ones to the value that the prompt is tuned on."""


def literal_answer(
    guard: PromptTuning, clf: rc.ZeroShotClassifier, f: list[Tensor], weights: list[float], loss: Loss
) -> tuple[Tensor, Tensor]:
    """Logits and feature: the weighted mean of the views' features, scored with prompts after one step."""
    context = clf.encoder.text.embed([WORDS])[0][0, 1:5].clone().requires_grad_()
    text = hooked_features(clf.encoder, context)
    logits = [100 * text @ feature for feature in f]
    surest = sorted(range(len(f)), key=lambda v: float(literal_entropy(logits[v].detach())))[: guard.selected]
    (slope,) = torch.autograd.grad(loss(logits, surest), [context])
    text = hooked_features(clf.encoder, step_of_adamw(context.detach(), slope, guard.learning_rate))
    mean = sum((w * feature for w, feature in zip(weights, f, strict=True)), torch.zeros(clf.encoder.dim))
    return 100 * text @ mean, mean / mean.norm()


def literal_rtpt(guard: RTPT, clf: rc.ZeroShotClassifier, image: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    f = [clf.encoder.encode(view)[0] for view, _ in literal_views(guard, image, seed)]
    trust = []
    for v in range(guard.views):
        cosines = sorted((float(f[v] @ f[u]) for u in range(guard.views) if u != v), reverse=True)
        trust.append(math.exp(mean_of(cosines[: guard.neighbours]) / guard.temperature))
    weights = [t / sum(trust) for t in trust]
    return literal_answer(
        guard, clf, f, weights, lambda logits, surest: mean_of([literal_entropy(logits[v]) for v in surest])
    )


def released_divergence(p: Tensor, q: Tensor) -> Tensor:
    """torch's kl_div takes the logarithm of what is compared first: this is KL(m || p)."""
    m = 0.5 * (p + q)
    each = [F.kl_div((one + 1e-8).log(), m + 1e-8, reduction="none").sum(-1) for one in (p, q)]
    return 0.5 * (each[0] + each[1])


def literal_sstpt(guard: SSTPT, clf: rc.ZeroShotClassifier, image: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    views = literal_views(guard, image, seed)
    f = [clf.encoder.encode(view)[0] for view, _ in views]
    text = hooked_features(clf.encoder, clf.encoder.text.embed([WORDS])[0][0, 1:5])
    suit, stab = [], []
    for v, (view, stream) in enumerate(views):
        suit.append(1 / (mean_of([2 - 2 * float(f[v] @ f[u]) for u in range(guard.views) if u != v]) + 1e-8))
        own = noise.fork(stream, prompt_tuning.VARIANTS)
        shared = noise.fork(noise.stream_keys(image[None], seed), prompt_tuning.VARIANTS)
        moved = clf.encoder.encode(guard.augmentation(view, own, shared))[0]
        p, q = (100 * text @ f[v]).softmax(0), (100 * text @ moved).softmax(0)
        stab.append(1 / (float(released_divergence(p, q)) + 1e-8))

    def weigh(numbers: list[int]) -> dict[int, float]:
        def scaled(values: list[float], v: int) -> float:
            low, high = min(values[u] for u in numbers), max(values[u] for u in numbers)
            return (values[v] - low) / (high - low + 1e-8)

        scores = {v: 0.4 * scaled(suit, v) + 0.6 * scaled(stab, v) for v in numbers}
        total = sum(math.exp(score / 0.25) for score in scores.values())
        return {v: math.exp(score / 0.25) / total for v, score in scores.items()}

    def loss(logits: list[Tensor], surest: list[int]) -> Tensor:
        weights, terms = weigh(surest), []
        for v in surest:
            rest = [u for u in surest if u != v]
            p = {u: logits[u].softmax(0).clamp_min(1e-8) for u in surest}
            target = sum((weights[u] * p[u] for u in rest), torch.zeros(len(NAMES)))
            target = (target / sum(weights[u] for u in rest)).detach()
            terms.append(literal_entropy(logits[v]) + F.kl_div(p[v].log(), target, reduction="sum"))
        return mean_of(terms)

    return literal_answer(guard, clf, f, list(weigh(list(range(guard.views))).values()), loss)


@both
@pytest.mark.parametrize("most", [4, 64])
def test_the_batched_algorithm_equals_the_literal_one(
    encoder: Encoder, guard: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_tuning, "PROMPTS", most)
    clf, images = classifier(encoder), photos(3)
    out = guard(clf, images, seed=5)
    assert (out.passes == guard.views * (1 if isinstance(guard, RTPT) else 2)).all()
    assert (out.backward_passes == guard.steps).all()
    literal: Callable[..., Any] = literal_rtpt if isinstance(guard, RTPT) else literal_sstpt
    for i, image in enumerate(images):
        logits, feature = literal(guard, clf, image, 5)
        assert torch.allclose(out.logits[i], logits.detach(), atol=1e-6), i
        assert torch.allclose(out.features[i], feature.detach(), atol=1e-9), i


# ---------------------------------------------------------------------- gradients, costs and refusals


def test_encoders_without_text_and_classes_that_differ_are_refused(clf: rc.ZeroShotClassifier) -> None:
    with pytest.raises(rc.ReactClipError, match="r-tpt tunes prompt tokens and 'toy' has no text tower; use a"):
        RTPT()(toy_classifier(), toy_images(1))
    other = rc.ZeroShotClassifier.from_features(clf.encoder, ["a"], torch.ones(1, clf.encoder.dim))
    for classes in (None, [clf, other]):
        with pytest.raises(rc.ReactClipError, match="needs the classes, the same for all images of a batch"):
            SMALL_RTPT.run(clf.encoder, photos(2), 0, classes)


def test_unsupported_text_towers_are_refused(places: dict[str, str]) -> None:
    encoder = rc.load(places["open_clip"], device="cpu")
    encoder.text.model.text_pool_type = "last"
    with pytest.raises(rc.ReactClipError, match="takes no token embeddings"):
        RTPT()(classifier(encoder), photos(1, torch.float32))
