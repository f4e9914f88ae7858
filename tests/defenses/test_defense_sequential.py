"""Sequential views: the stopping rule equals a literal one, and views and passes are counted as encoded."""

from __future__ import annotations

import math
import threading
from statistics import NormalDist, fmean, variance

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import functional, noise
from react_clip.defenses import AOM, DefendCLIP
from react_clip.defenses.react import ANCHOR, FIRST_VIEWS, logits_of
from react_clip.functional import settled
from react_clip.serve.engine import Engine, Photo
from react_clip.serve.settings import Settings
from toys import ToyEncoder, toy_classifier, toy_images

from .watching import F64

GUARD = rc.ReACT(tau=-1e9, views=9, sequential=0.9)
NEVER = 1 - 2**-53
"""No confidence lies closer to one, and two views of five classes cannot give it."""


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


def test_an_unreachable_confidence_draws_all_views() -> None:
    clf, images = toy_classifier(), toy_images(20)
    guard = rc.ReACT(tau=2.0, views=4)
    whole, drawn = guard(clf, images), guard.replace(sequential=NEVER)(clf, images)
    assert 0 < int(whole.gated.sum()) < 20, "both sides of the gate must be tried"
    assert torch.equal(drawn.passes, whole.passes)
    assert torch.equal(drawn.labels, whole.labels)
    assert torch.allclose(drawn.features, whole.features, atol=1e-6)


@pytest.mark.parametrize(
    "guard", [GUARD, AOM(sequential=0.9), DefendCLIP(tau=-1e9, sequential=0.9)], ids=lambda g: g.name
)
def test_settled_images_stop_and_passes_are_counted(guard: rc.ReACT) -> None:
    clf, images = toy_classifier(), toy_images(20)
    encoder = clf.encoder
    assert isinstance(encoder, ToyEncoder)
    out = guard(clf, images)
    assert encoder.encoded == int(out.passes.sum())
    most = guard.cost()[0] - (guard.instability and guard.tau is not None)
    assert set(out.passes.tolist()) == {most - guard.views + FIRST_VIEWS, most}, "some must stop early, others not"


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


def test_a_closed_gate_stops_by_its_own_strength() -> None:
    clf, images = toy_classifier(), toy_images(12)
    closed = rc.ReACT(tau=1e9, views=9, alpha_closed=0.5, sequential=0.9)
    expected = rc.ReACT(tau=-1e9, views=9, alpha=0.5, sequential=0.9)
    assert torch.equal(closed(clf, images).passes, expected(clf, images).passes)
    assert torch.allclose(closed(clf, images).features, expected(clf, images).features, atol=1e-6)


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


def test_lists_of_different_lengths_share_a_batch() -> None:
    encoder, images = ToyEncoder(), toy_images(12)
    features = functional.normalize(torch.randn(7, 12, generator=torch.Generator().manual_seed(2)))
    lists = [rc.ZeroShotClassifier.from_features(encoder, [*"abcdefg"[:size]], features[:size]) for size in (7, 3, 1)]
    keys = noise.stream_keys(images, b"secret")
    engine = Engine(encoder, GUARD, lists[0], secret=b"secret", settings=Settings(deadline=1e6))
    release = threading.Event()
    engine.run(release.wait)  # until it ends, images wait, so that they share a batch
    futures = [engine.submit([Photo(images[i], keys[i])], lists[i % 3])[0] for i in range(12)]
    release.set()
    answers = [future.result() for future in futures]
    engine.stop()
    for i, answer in enumerate(answers):
        alone = GUARD(lists[i % 3], images[i : i + 1], seed=b"secret")
        assert answer.diagnostics["passes"] == int(alone.passes[0])
        assert torch.allclose(answer.feature, alone.features[0], atol=1e-5)
    assert len({answer.diagnostics["passes"] for answer in answers}) >= 2
