"""SecondLook: its equations written out in numpy for one image, its gate, its limits, and gradients through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import noise
from react_clip.augment import Motion, smaller_copy
from react_clip.defenses import SecondLook, default_for
from toys import ToyEncoder, patch_encoder, toy_classifier, toy_images

F64 = torch.float64
COPY = (1 + 6**2) / (1 + 8**2)
"""Tokens of a copy of 24 pixels, divided by those of an image of 32."""


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
    out = SecondLook()(clf, images, 0)
    return clf, SecondLook(threshold=middle_of(out.score), drift_threshold=middle_of(out.drift)), images


def written_out(clf: rc.ZeroShotClassifier | None, guard: SecondLook, image: Tensor, seed: int) -> tuple[Any, Any, Any]:
    """The docstring's algorithm for one image: feature, lead (NaN without classes) and score."""
    encoder, streams = patch_encoder(F64), noise.fork(noise.stream_keys(image, seed), 0)
    copy = smaller_copy(image, 24) if guard.copy_size else Motion()(image, streams)
    grain = noise.normal(noise.fork(streams, 1), copy.shape[1:])
    f, c, n = (encoder.encode(each)[0].detach().numpy() for each in (image, copy, copy + guard.noise * grain))
    far = f + guard.alpha * ((c + n) / 2 - f)
    e = far / np.linalg.norm(far)
    drift = float(np.linalg.norm(c - f))
    if clf is None:
        return (e if drift >= guard.drift_threshold else f), np.nan, drift
    w = clf.class_features.numpy()
    a, b = (w @ f).argmax(), (w @ e).argmax()
    lead = 0.0 if a == b else (w[b] @ e - w[a] @ e) / np.linalg.norm(w[b] - w[a])
    score = lead + guard.drift_weight * drift
    return (e if score >= guard.threshold else f), lead, score


@pytest.mark.parametrize("classes", ["one", "several", "none"])
@pytest.mark.parametrize("copy_size", [176 / 224, None])
def test_a_batch_gets_what_the_equations_give_each_image(setting: Any, classes: str, copy_size: float | None) -> None:
    clf, guard, images = setting
    guard = guard.replace(copy_size=copy_size)
    own = {"one": [clf], "several": [clf, classifier(3, seed=2)], "none": [None]}[classes] * 24
    given = None if classes == "none" else own[: len(images)]
    out = guard.run(clf.encoder, images, noise.stream_keys(images, 3), given)
    expected = [written_out(*each, seed=3) for each in zip(own, [guard] * 24, images.split(1), strict=False)]
    for measured, values in zip((out.features, out.lead, out.score), zip(*expected, strict=True), strict=True):
        assert np.allclose(measured.numpy(), np.array(values), atol=1e-6, equal_nan=True)
    assert 0 < int(out.gated.sum()) < 24
    assert torch.equal(out.gated, out.gate_open)
    assert np.allclose(out.passes.numpy(), 3 if copy_size is None else 1 + 2 * COPY)


def test_sigmoid_similarities_and_equal_classes_have_leads(setting: Any) -> None:
    """A lead is a distance between features: it knows no scale and no bias; a class given twice leads by nothing."""
    clf, guard, images = setting
    encoder = patch_encoder(F64)
    encoder.similarity = rc.functional.Similarity(scale=11.0, bias=-3.0, sigmoid=True)
    other = rc.ZeroShotClassifier.from_features(encoder, clf.names, clf.class_features)
    assert torch.allclose(guard(other, images, 0).lead, guard(clf, images, 0).lead)
    twice = rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], clf.class_features[[0, 0]])
    assert torch.equal(guard(twice, images).lead, torch.zeros(24, dtype=F64))


@pytest.mark.parametrize(("fraction", "patches"), [(0.4, 3), (0.97, 8)])
def test_a_copy_of_too_few_patches_or_as_large_as_the_image_is_refused(fraction: float, patches: int) -> None:
    with pytest.raises(rc.ReactClipError, match=f"has {patches} of the 8 patches a side of 'patches'"):
        SecondLook(copy_size=fraction).check(patch_encoder())
    assert SecondLook().size(ToyEncoder()) is None, "an encoder of one size takes moved views"


def test_a_threshold_without_classes_does_not_serve_with_classes() -> None:
    guard = SecondLook(threshold=None)
    assert len(guard.run(ToyEncoder(), toy_images(2), 0)) == 2
    with pytest.raises(rc.ReactClipError, match="was calibrated without classes, and here are some; calibrate with"):
        guard(toy_classifier(), toy_images(2))


def test_the_default_is_second_look_where_it_has_a_threshold_and_react_elsewhere() -> None:
    def known_as(name: str, encoder: Any) -> Any:
        encoder.name = encoder.weights = name
        return encoder

    assert SecondLook.for_encoder("openai/clip-vit-base-patch16@main") == SecondLook()
    with pytest.raises(rc.ReactClipError, match="no calibration for 'patches' of SecondLook, and every encoder"):
        SecondLook.for_encoder(patch_encoder())
    assert default_for(known_as("clip-vit-b-16", patch_encoder())) == SecondLook()
    assert default_for(known_as("clip-vit-b-16", ToyEncoder())) == rc.ReACT.for_encoder("clip-vit-b-16")
    assert default_for(known_as("openai/clip-vit-base-patch32", patch_encoder())) == rc.ReACT()
    with pytest.raises(rc.ReactClipError, match="`react-clip calibrate PHOTOS"):
        default_for(patch_encoder())


@pytest.mark.parametrize("size", ["look", "copy_size"])
def test_a_file_of_the_older_rule_can_be_read(size: str) -> None:
    old = {"kind": "second_look", size: 0.75, "moved_copy_size": 0.5, "threshold": 0.4, "alpha": 2.0, "blend": 1.0}
    with pytest.warns(UserWarning, match=r"older rule: its threshold, 0\.4, now decides only without classes"):
        assert rc.defenses.from_dict({**old, "lazy": True}) == SecondLook(copy_size=0.75, drift_threshold=0.4)
