"""SecondLook: the algorithm written out for one image, its branches, its limits, and gradients through it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import attacks, functional, noise
from react_clip.augment import smaller_copy
from react_clip.defenses import SecondLook
from react_clip.defenses.react import divergence_of, logits_of
from react_clip.defenses.second_look import BLEND, CORRECT, KEEP
from toys import patch_encoder, toy_classifier, toy_images

F64 = torch.float64
SHARE = (1 + 6 * 6) / (1 + 8 * 8)
"""Tokens of a look of 24 pixels, divided by those of an image of 32."""


def classifier(classes: int = 5, seed: int = 1) -> rc.ZeroShotClassifier:
    features = torch.randn(classes, 12, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return rc.ZeroShotClassifier.from_features(patch_encoder(F64), [f"class {i}" for i in range(classes)], features)


def photos(count: int) -> Tensor:
    """Smooth random images, so that small changes move their features a little."""
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
    return torch.nn.functional.interpolate(coarse, 32, mode="bilinear")


def middle_of(scores: Tensor) -> float:
    """A threshold in the widest gap of the middle half, so that no rounding decides."""
    ordered = scores.sort().values
    quarter = len(ordered) // 4
    gaps = ordered[quarter + 1 : -quarter] - ordered[quarter : -quarter - 1]
    at = quarter + int(gaps.argmax())
    return float(ordered[at] + ordered[at + 1]) / 2


@pytest.fixture(scope="module")
def setting() -> tuple[rc.ZeroShotClassifier, SecondLook, Tensor]:
    """A classifier, a defence whose thresholds lie in the middle of the scores, and 24 images."""
    clf, images = classifier(), photos(24)
    everything = SecondLook(lazy=False)(clf, images)
    guard = SecondLook(look_threshold=middle_of(everything.score), moved_threshold=middle_of(everything.moved_score))
    return clf, guard, images


def written_out(clf: rc.ZeroShotClassifier, guard: SecondLook, image: Tensor, seed: int) -> tuple[Tensor, int, float]:
    """The algorithm of the module's docstring for one image: feature, branch and passes."""
    encode = clf.encoder.encode_views
    keys = noise.stream_keys(image, seed)
    stream = [noise.fork(keys, i) for i in range(4)]

    def score(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm() + 0.2 * functional.js_divergence(clf.logits(one), clf.logits(other)))

    f, look = encode(image), encode(smaller_copy(image, 24))
    disagree = clf.logits(f).argmax() != clf.logits(look).argmax()
    if score(f, look) < guard.look_threshold and not disagree:
        return f, KEEP, 1 + SHARE
    moved = encode(guard.motion(image, stream[1]))
    if score(f, look) >= guard.look_threshold and score(f, moved) >= guard.moved_threshold:
        grain = noise.normal(stream[3], image.shape[1:]).to(F64)
        noisy = encode(guard.motion(image, stream[2]) + 0.05 * grain)
        return functional.normalize(f + 2.0 * ((look + moved + noisy) / 3 - f)), CORRECT, 3 + SHARE
    if disagree:
        return functional.normalize(f + 0.7 * ((look + moved) / 2 - f)), BLEND, 2 + SHARE
    return f, KEEP, 2 + SHARE


@pytest.mark.parametrize("max_batch", [5, 64])
def test_a_batch_gets_what_the_algorithm_gives_each_image(setting: Any, max_batch: int) -> None:
    clf, guard, images = setting
    out = guard.replace(max_batch=max_batch)(clf, images, seed=3)
    assert set(out.branch.tolist()) == {KEEP, BLEND, CORRECT}
    assert len(set(out.passes.tolist())) == 3
    for i, image in enumerate(images.split(1)):
        feature, branch, passes = written_out(clf, guard, image, seed=3)
        assert out.branch[i] == branch
        assert math.isclose(out.passes[i], passes, rel_tol=1e-6)
        assert torch.allclose(out.features[i], feature[0], atol=1e-9)
    assert torch.equal(out.gated, out.branch != KEEP)
    assert torch.equal(out.disagrees & ~(out.branch == CORRECT), out.branch == BLEND)
    assert (out.look_size, out.look_is_smaller) == (24, True)
    assert out.moved_score.isnan().equal(out.passes < 2)


def test_skipped_views_change_no_answer(setting: Any) -> None:
    clf, guard, images = setting
    one, other = guard(clf, images), guard.replace(lazy=False)(clf, images)
    assert torch.equal(one.branch, other.branch)
    assert torch.allclose(one.features, other.features, atol=1e-9)
    assert torch.allclose(other.passes, torch.full((24,), 3 + SHARE))
    assert not other.moved_score.isnan().any()


def test_images_with_their_own_classes_are_corrected_together(setting: Any) -> None:
    first, guard, images = setting
    second = classifier(classes=3, seed=2)
    mine = torch.arange(len(images)) % 2 == 0

    def divergence(rows: Tensor, features: Tensor, views: Tensor) -> Tensor:
        both = [divergence_of(clf)(rows, features, views) for clf in (first, second)]
        return torch.where(mine[rows], *both)

    def logits(rows: Tensor, features: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(logits_of(second)(rows, features), (0, 2), value=-torch.inf)
        return torch.where(mine[rows, None, None], logits_of(first)(rows, features), padded)

    keys = noise.stream_keys(images, 0)
    together = guard.correct(first.encoder, images, keys, divergence, logits)
    for clf, rows in ((first, mine), (second, ~mine)):
        alone = guard(clf, images[rows])
        assert torch.equal(alone.branch, together.branch[rows])
        assert torch.allclose(alone.features, together.features[rows], atol=1e-9)


def test_without_classes_the_distances_decide(setting: Any) -> None:
    clf, guard, images = setting
    keys = noise.stream_keys(images, 0)
    out = guard.correct(clf.encoder, images, keys)
    assert out.instability.isnan().all()
    assert torch.equal(out.score, out.drift)
    assert not out.disagrees.any()
    assert set(out.branch.tolist()) == {KEEP, CORRECT}


def test_an_encoder_of_one_size_looks_at_a_moved_view_and_the_answer_says_so(setting: Any) -> None:
    toy = toy_classifier()
    out = SecondLook()(toy, toy_images(6))
    assert (out.look_size, out.look_is_smaller) == (16, False)
    assert set(out.passes.tolist()) <= {2.0, 3.0, 4.0}
    clf, guard, images = setting
    out = guard.replace(look=None)(clf, images)
    assert (out.look_size, out.look_is_smaller) == (32, False)
    keys = noise.fork(noise.stream_keys(images, 0), 0)
    look = clf.encoder.encode_views(guard.motion(images, keys))
    assert torch.allclose(out.drift, (look - clf.encoder(images)).norm(dim=1), atol=1e-9)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"look_threshold": 2.2}, "look_threshold is 2.2; unit features are at most 2 apart"),
        ({"moved_threshold": -0.1}, "moved_threshold is -0.1; it must be >= 0"),
        ({"look": 1.0}, "look is 1.0; it must be < 1"),
        ({"sigma": 5}, "so write 5/255"),
    ],
)
def test_impossible_values_are_refused_in_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        SecondLook(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("look", "patches"), [(0.4, 3), (0.97, 8)])
def test_a_look_of_too_few_patches_or_as_large_as_the_image_is_refused(look: float, patches: int) -> None:
    guard, encoder = SecondLook(look=look), patch_encoder()
    with pytest.raises(rc.ReactClipError, match=f"has {patches} of the 8 patches a side of 'patches'") as caught:
        guard.check(encoder)
    assert "\n" not in str(caught.value)


def test_thresholds_are_shipped_for_known_weights_only() -> None:
    assert SecondLook.for_encoder("openai/clip-vit-base-patch16@main") == SecondLook()
    with pytest.raises(rc.ReactClipError, match="no thresholds of SecondLook for 'patches': every encoder"):
        SecondLook.for_encoder(patch_encoder())


def test_gradients_pass_through_every_branch(setting: Any) -> None:
    clf, guard, images = setting
    branches = guard(clf, images).branch
    rows = torch.stack([(branches == branch).nonzero()[0, 0] for branch in (KEEP, BLEND, CORRECT)])
    # Motion and noise follow from the pixels' keys; for a derivative they are held fixed.
    keys = noise.stream_keys(images[rows], 0)

    def logits(pixels: Tensor) -> Tensor:
        out = guard.correct(clf.encoder, pixels, keys, divergence_of(clf), logits_of(clf))
        return clf.logits(out.features)

    pixels = images[rows].clone().requires_grad_()
    (slope,) = torch.autograd.grad(logits(pixels)[:, 0].sum(), pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    step = 1e-6
    ahead, behind = logits(images[rows] + step * direction), logits(images[rows] - step * direction)
    expected = (ahead - behind)[:, 0] / (2 * step)
    assert torch.allclose((slope * direction).flatten(1).sum(1), expected, rtol=1e-4)
    assert (slope.flatten(1).norm(dim=1) > 0).all()
    module = rc.as_module(clf, guard, differentiable=True)
    assert torch.autograd.grad(module(pixels).sum(), pixels)[0].isfinite().all()


def test_attackers_see_both_answers_and_the_gate_between_them(setting: Any) -> None:
    clf, guard, images = setting
    draw = attacks.targets.take_draw(
        rc.as_module(clf, guard), images, torch.zeros(24, dtype=torch.long), clf.encoder(images)
    )
    opens = draw.score >= draw.threshold
    assert 0 < opens.sum() < 24
    assert torch.equal(draw.gated, opens)
    assert torch.allclose(draw.defended.features, guard(clf, images).features, atol=1e-6)
    labels = guard(clf, images[:4]).labels
    for attack in (attacks.Evade(eps=8 / 255, steps=2, eot=1), attacks.BPDA(eps=8 / 255, steps=2, eot=1)):
        result = attack(rc.as_module(clf, guard), images[:4], labels, seed=0)
        assert (result.images - images[:4]).abs().max() <= 8 / 255 + 1e-6
        assert (result.broken > 0.5).any()


def test_a_configuration_survives_json() -> None:
    guard = SecondLook(look_threshold=0.5, look=None)
    assert SecondLook.from_dict(json.loads(json.dumps(guard.to_dict()))) == guard
