"""SecondLook: the algorithm written out for one image, its branches, its limits, and gradients through it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import attacks, functional, noise
from react_clip.augment import smaller_copy
from react_clip.defenses import SecondLook, default_for, look_calibration
from react_clip.defenses.look_calibration import LookCalibration
from react_clip.defenses.react import logits_of
from react_clip.defenses.second_look import BLEND, CORRECT, KEEP
from toys import ToyEncoder, patch_encoder, toy_classifier, toy_images

F64 = torch.float64
SHARE, MOVED_SHARE = ((1 + patches**2) / (1 + 8**2) for patches in (6, 5))
"""Tokens of looks of 24 and 20 pixels, divided by those of an image of 32."""


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
    """A classifier, a defence whose threshold lies in the middle of the distances, and 24 images."""
    clf, images = classifier(), photos(24)
    return clf, SecondLook(threshold=middle_of(SecondLook()(clf, images).drift), moved_look=5 / 8), images


def written_out(clf: rc.ZeroShotClassifier, guard: SecondLook, image: Tensor, seed: int) -> tuple[Tensor, int, float]:
    """The algorithm of the module's docstring for one image: feature, branch and passes."""
    encode = clf.encoder.encode_views
    f, look = encode(image), encode(smaller_copy(image, 24))
    attacked = bool((look - f).norm() >= guard.threshold)
    if not attacked and clf.logits(f).argmax() == clf.logits(look).argmax():
        return f, KEEP, 1 + SHARE
    moved = guard.motion(image, noise.fork(noise.stream_keys(image, seed), 1))
    mean = (look + encode(smaller_copy(moved, 20))) / 2
    if attacked:
        return functional.normalize(f + 2.0 * (mean - f)), CORRECT, 1 + SHARE + MOVED_SHARE
    return functional.normalize(mean), BLEND, 1 + SHARE + MOVED_SHARE


@pytest.mark.parametrize("max_batch", [5, 64])
def test_a_batch_gets_what_the_algorithm_gives_each_image(setting: Any, max_batch: int) -> None:
    clf, guard, images = setting
    out = guard.replace(max_batch=max_batch)(clf, images, seed=3)
    assert set(out.branch.tolist()) == {KEEP, BLEND, CORRECT}
    assert len(set(out.passes.tolist())) == 2
    for i, image in enumerate(images.split(1)):
        feature, branch, passes = written_out(clf, guard, image, seed=3)
        assert out.branch[i] == branch
        assert math.isclose(out.passes[i], passes, rel_tol=1e-6)
        assert torch.allclose(out.features[i], feature[0], atol=1e-9)
    assert torch.equal(out.gated, out.branch != KEEP)
    assert torch.equal(out.disagrees & ~(out.branch == CORRECT), out.branch == BLEND)
    assert (out.look_size, out.look_is_smaller) == (24, True)
    assert torch.equal(out.score, out.drift)


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("gradients", [False, True])
def test_one_image_and_its_look_share_a_pass_with_mkl(
    setting: Any, mkl: bool, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clf, guard, images = setting
    batch, passes = guard(clf, images), []
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    handle = clf.encoder.tower.visual_projection.register_forward_hook(lambda *_: passes.append(1))
    try:
        for i, image in enumerate(images.split(1)):
            passes.clear()
            out = guard(clf, image.clone().requires_grad_(gradients))
            image_and_look = 1 if mkl and not gradients else 2
            assert len(passes) == image_and_look + (batch.branch[i] != KEEP)
            assert torch.equal(out.branch, batch.branch[i : i + 1])
            assert torch.allclose(out.features, batch.features[i : i + 1], rtol=0, atol=1e-12)
            assert torch.equal(out.passes, batch.passes[i : i + 1])
    finally:
        handle.remove()


def test_skipped_views_change_no_answer(setting: Any) -> None:
    clf, guard, images = setting
    one, other = guard(clf, images), guard.replace(lazy=False)(clf, images)
    assert torch.equal(one.branch, other.branch)
    assert torch.allclose(one.features, other.features, atol=1e-9)
    assert torch.allclose(other.passes, torch.full((24,), 1 + SHARE + MOVED_SHARE))


def test_seeds_and_keys_of_any_kind_give_the_same_streams(setting: Any) -> None:
    clf, guard, images = setting
    expected = guard(clf, images, seed=7)
    assert expected.gated.any()
    assert torch.equal(guard(clf, images, seed=np.int64(7)).features, expected.features)
    for seed in (7, b"secret"):
        by_keys = guard.correct(clf.encoder, images, noise.stream_keys(images, seed), logits_of(clf))
        assert torch.equal(by_keys.features, guard(clf, images, seed=seed).features)
    assert not torch.equal(guard(clf, images, seed=8).features, expected.features)


def test_without_classes_the_distances_decide(setting: Any) -> None:
    clf, guard, images = setting
    keys = noise.stream_keys(images, 0)
    out = guard.correct(clf.encoder, images, keys)
    assert out.instability.isnan().all()
    assert not out.disagrees.any()
    assert set(out.branch.tolist()) == {KEEP, CORRECT}


def test_an_encoder_of_one_size_looks_at_a_moved_view_and_the_answer_says_so(setting: Any) -> None:
    toy = toy_classifier()
    out = SecondLook()(toy, toy_images(6))
    assert (out.look_size, out.look_is_smaller) == (16, False)
    assert set(out.passes.tolist()) <= {2.0, 3.0}
    clf, guard, images = setting
    out = guard.replace(look=None)(clf, images)
    assert (out.look_size, out.look_is_smaller) == (32, False)
    keys = noise.fork(noise.stream_keys(images, 0), 0)
    look = clf.encoder.encode_views(guard.motion(images, keys))
    assert torch.allclose(out.drift, (look - clf.encoder(images)).norm(dim=1), atol=1e-9)


@pytest.mark.parametrize(("field", "share", "patches"), [("look", 0.4, 3), ("look", 0.97, 8), ("moved_look", 0.4, 3)])
def test_a_look_of_too_few_patches_or_as_large_as_the_image_is_refused(field: str, share: float, patches: int) -> None:
    guard, encoder = SecondLook().replace(**{field: share}), patch_encoder()
    with pytest.raises(rc.ReactClipError, match=f"has {patches} of the 8 patches a side of 'patches'") as caught:
        guard.check(encoder)
    assert "\n" not in str(caught.value)


def test_a_threshold_is_shipped_for_known_weights_only() -> None:
    assert SecondLook.for_encoder("openai/clip-vit-base-patch16@main") == SecondLook()
    with pytest.raises(rc.ReactClipError, match="no threshold of SecondLook for 'patches': every encoder"):
        SecondLook.for_encoder(patch_encoder())


def test_the_default_is_second_look_where_it_has_a_threshold_and_react_elsewhere() -> None:
    encoder, one_size = patch_encoder(), ToyEncoder()
    encoder.name = one_size.name = "clip-vit-b-16"
    assert default_for(encoder) == default_for(encoder, features=True) == SecondLook()
    assert default_for(one_size) == rc.ReACT.for_encoder("clip-vit-b-16"), "the threshold is that of smaller copies"
    encoder.name = "openai/clip-vit-base-patch32"
    assert default_for(encoder) == rc.ReACT(sequential=0.99)
    assert default_for(encoder, features=True) == rc.ReACT()
    with pytest.raises(rc.ReactClipError, match=r"--calibrate-on PHOTOS.*`react-clip calibrate PHOTOS") as caught:
        default_for(patch_encoder())
    assert "\n" not in str(caught.value)


def test_gradients_pass_through_every_branch(setting: Any) -> None:
    clf, guard, images = setting
    branches = guard(clf, images).branch
    rows = torch.stack([(branches == branch).nonzero()[0, 0] for branch in (KEEP, BLEND, CORRECT)])
    # Motion and noise follow from the pixels' keys; for a derivative they are held fixed.
    keys = noise.stream_keys(images[rows], 0)

    def logits(pixels: Tensor) -> Tensor:
        out = guard.correct(clf.encoder, pixels, keys, logits_of(clf))
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


# ---------------------------------------------------------------------- calibration


def smooth_photos(count: int, seed: int = 0) -> Tensor:
    """Images without detail, whose smaller copies have nearly the same features."""
    coarse = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1)


def test_a_calibration_leaves_the_wanted_share_of_clean_photos_alone(tmp_path: Path) -> None:
    encoder, images = patch_encoder(), smooth_photos(200)
    result = SecondLook.calibrate(encoder, images, clean_pass=0.9)
    guard = result.config
    drift = (encoder(images) - encoder.encode_views(smaller_copy(images, 24))).norm(dim=1)
    assert (drift >= guard.threshold).sum() == 20
    low, high = result.interval
    assert low < guard.threshold < high
    assert result.notes == ()
    result.save(tmp_path / "look.json")
    assert SecondLook.load(tmp_path / "look.json") == guard
    assert LookCalibration.load(tmp_path / "look.json") == result
    assert SecondLook.calibrate(encoder, images[:100], clean_pass=0.9).interval[1] > low


def test_a_bootstrap_interval_holds_the_true_quantile() -> None:
    draws, exact = torch.Generator().manual_seed(0), 0.9
    held = 0
    for trial in range(40):
        low, high = look_calibration._bootstrap(torch.rand(200, generator=draws), exact, trial)
        held += low <= exact <= high
    assert held >= 32, "95 % of the intervals should; 32 of 40 or fewer have a chance below 1 in 1,000"


def test_few_photos_give_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"50 photos are few for clean_pass 0\.97: 200 or more"):
        result = SecondLook.calibrate(patch_encoder(), smooth_photos(50))
    assert len(result.notes) == 1


def test_photos_that_cannot_calibrate_are_refused() -> None:
    encoder = patch_encoder()
    alike = smooth_photos(1).expand(40, -1, -1, -1) + torch.linspace(0, 0.001, 40)[:, None, None, None]
    noisy = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for photos_given, share, says in (
        (alike.clamp(0, 1), 0.97, "the photos are all alike"),
        (noisy, 0.97, "differ from their smaller copies as attacked ones do"),
        (smooth_photos(19), 0.97, "19 photos are too few to calibrate on; give at least 20"),
        (smooth_photos(40), 97.0, r"clean_pass is 97\.0; it is a share"),
        ("photos", 0.97, "photos are of type str; give a list"),
    ):
        with pytest.raises(rc.ReactClipError, match=says) as caught:
            SecondLook.calibrate(encoder, photos_given, clean_pass=share)
        assert "\n" not in str(caught.value)
