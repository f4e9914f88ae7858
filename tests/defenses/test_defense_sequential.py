"""Sequential views: the stopping rule equals a literal one, and views and passes are counted as encoded."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, variance

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.defenses.react import ANCHOR, FIRST_VIEWS, logits_of
from react_clip.functional import settled
from toys import toy_classifier, toy_images

from .watching import F64

GUARD = rc.ReACT(tau=-1e9, views=9, sequential=0.9)


# ---------------------------------------------------------------------- a second implementation


def literally_settled(logits: list[list[float]], total: int, confidence: float) -> bool:
    """The rule in plain loops, for one image; ``logits[i][c]`` are those of view i."""
    drawn, classes = len(logits), range(len(logits[0]))
    mean = [fmean(view[c] for view in logits) for c in classes]
    top = max(classes, key=lambda c: mean[c])
    rivals = [c for c in classes if c != top]
    margin = min(mean[top] - mean[c] for c in rivals)
    pooled = fmean(variance([view[top] - view[c] for view in logits]) for c in rivals)
    t = margin / math.sqrt(pooled * (1 / drawn - 1 / total))
    freedom = (drawn - 1) * len(rivals)
    deviate = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log(1 + t * t / freedom))
    return deviate >= NormalDist().inv_cdf(confidence)


def test_drawing_equals_one_image_and_one_view_at_a_time() -> None:
    clf, images = toy_classifier(F64), toy_images(12, dtype=F64)
    out = GUARD(clf, images, seed=4)
    keys = noise.fork(noise.stream_keys(images, 4), ANCHOR)
    counts = set()
    for i, image in enumerate(images):
        plain = clf.encoder(image[None])[0]
        seen: list[Tensor] = []
        for count in (FIRST_VIEWS, GUARD.views):
            while len(seen) < count:
                grain = noise.normal(noise.fork(keys[i : i + 1], len(seen)), (3, 16, 16)).double()[0]
                seen.append(clf.encoder.encode_views((image + out.sigma[i] * grain)[None])[0])
            logits = [clf.logits(plain + GUARD.alpha * (view - plain)).tolist() for view in seen]
            if len(seen) < GUARD.views and literally_settled(logits, GUARD.views, 0.9):
                break
        corrected = plain + GUARD.alpha * (torch.stack(seen).mean(0) - plain)
        assert torch.allclose(out.features[i], corrected / corrected.norm(), atol=1e-9)
        assert int(out.passes[i]) == 3 + len(seen)
        counts.add(len(seen))
    assert counts == {FIRST_VIEWS, GUARD.views}, "some images must stop early, others not"


def test_features_for_retrieval_have_all_views_without_sequential() -> None:
    name = "openai/clip-vit-base-patch32"
    assert rc.ReACT.for_encoder(name) == rc.ReACT.constants_for(name).replace(sequential=0.99)
    assert rc.ReACT.constants_for(name).sequential is None
    clf, images = toy_classifier(F64), toy_images(12, dtype=F64)
    answers, features = GUARD(clf, images, seed=4), GUARD.replace(sequential=None)(clf, images, seed=4)
    assert (features.passes == 3 + GUARD.views).all()
    stopped = answers.passes < features.passes
    assert 0 < stopped.sum() < len(images)
    apart = (answers.features - features.features).norm(dim=1)
    assert (apart[stopped] > 1e-6).all(), "two views are another anchor"
    assert torch.equal(answers.features[~stopped], features.features[~stopped])


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_bound_is_at_least_that_of_student(confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs scipy")
    for drawn, classes in [(2, 2), (3, 2), (2, 4), (4, 5), (8, 10)]:
        spread = torch.randn(drawn, classes, generator=torch.Generator().manual_seed(classes), dtype=F64)
        spread = spread - spread.mean(0)  # so that the margin is what is added to the first class
        pooled = (spread[:, :1] - spread[:, 1:]).var(0).mean() * (1 / drawn - 1 / 10)
        student = float(stats.t.ppf(confidence, (drawn - 1) * (classes - 1)))

        def stops(t: float, spread: Tensor = spread, pooled: Tensor = pooled) -> bool:
            ahead = torch.eye(spread.shape[1], dtype=F64)[0] * t * pooled.sqrt()
            return bool(settled((spread + ahead)[None], 10, confidence))

        assert not stops(0.99 * student), f"{drawn} views of {classes} classes"
        small = (drawn - 1) * (classes - 1) < 3
        assert stops((2.0 if small else 1.05) * student), f"{drawn} views of {classes} classes"


def test_missing_classes_change_nothing() -> None:
    logits = 3 * torch.randn(50, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = settled(logits, 10, 0.7)
    assert 0 < int(expected.sum()) < 50
    padded = torch.nn.functional.pad(logits, (0, 3), value=-torch.inf)
    assert torch.equal(settled(padded, 10, 0.7), expected)
    assert not bool(settled(logits[..., :1], 10, 0.5).any()), "a lone class says nothing about its feature"
    assert not bool(settled(logits * math.nan, 10, 0.5).any()), "what is not a number settles nothing"


# ---------------------------------------------------------------------- drawing


def test_images_that_may_not_stop_and_complete_runs_encode_all_views() -> None:
    clf, images = toy_classifier(), toy_images(6)
    keys = noise.stream_keys(images, 0)
    whole = GUARD.replace(sequential=None)(clf, images)
    with torch.no_grad():
        whole_anchor = GUARD.correct(clf.encoder, images, keys, logits_of(clf), may_stop=False)
        some = torch.arange(6) < 3
        mixed = GUARD.correct(clf.encoder, images, keys, logits_of(clf), may_stop=some)
    assert torch.equal(whole_anchor.features, whole.features)
    expected = torch.where(some[:, None], GUARD(clf, images).features, whole.features)
    assert torch.allclose(mixed.features, expected, atol=1e-6)
    assert set(GUARD.replace(lazy=False)(clf, images).passes.tolist()) == {GUARD.cost()[0]}


def test_gradients_are_those_of_the_views_that_were_drawn() -> None:
    clf, images = toy_classifier(F64), toy_images(8, dtype=F64)
    drawn = GUARD(clf, images).passes - 3

    def slope(guard: rc.ReACT) -> Tensor:
        pixels = images.clone().requires_grad_()
        guard(clf, pixels).logits.square().sum().backward()
        assert pixels.grad is not None
        return pixels.grad

    found = slope(GUARD)
    for count in set(drawn.tolist()):
        fixed = slope(GUARD.replace(sequential=None, views=count))
        assert torch.allclose(found[drawn == count], fixed[drawn == count], rtol=1e-6)
    assert len(set(drawn.tolist())) >= 2
