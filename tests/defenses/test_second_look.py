"""SecondLook: the algorithm written out for one image, its branches, its limits, and gradients through it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import functional, noise
from react_clip.augment import smaller_copy
from react_clip.defenses import SecondLook, default_for
from react_clip.defenses.second_look import BLEND, CORRECT, KEEP
from toys import ToyEncoder, patch_encoder, toy_classifier, toy_images

F64 = torch.float64
COPY, MOVED_COPY = ((1 + patches**2) / (1 + 8**2) for patches in (6, 5))
"""Tokens of copies of 24 and 20 pixels, divided by those of an image of 32."""


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
    return clf, SecondLook(threshold=middle_of(SecondLook()(clf, images).drift), moved_copy_size=5 / 8), images


def written_out(clf: rc.ZeroShotClassifier, guard: SecondLook, image: Tensor, seed: int) -> tuple[Tensor, int, float]:
    """The algorithm of the module's docstring for one image: feature, branch and passes."""
    encode = clf.encoder.encode
    f, copy = encode(image), encode(smaller_copy(image, 24))
    attacked = bool((copy - f).norm() >= guard.threshold)
    if not attacked and clf.logits(f).argmax() == clf.logits(copy).argmax():
        return f, KEEP, 1 + COPY
    moved = guard.motion(image, noise.fork(noise.stream_keys(image, seed), 1))
    mean = (copy + encode(smaller_copy(moved, 20))) / 2
    if attacked:
        return functional.normalize(f + 2.0 * (mean - f)), CORRECT, 1 + COPY + MOVED_COPY
    return functional.normalize(mean), BLEND, 1 + COPY + MOVED_COPY


def test_a_batch_gets_what_the_algorithm_gives_each_image(setting: Any) -> None:
    clf, guard, images = setting
    out = guard(clf, images, seed=np.int64(3))
    assert set(out.branch.tolist()) == {KEEP, BLEND, CORRECT}
    for i, image in enumerate(images.split(1)):
        feature, branch, passes = written_out(clf, guard, image, seed=3)
        assert out.branch[i] == branch
        assert math.isclose(out.passes[i], passes, rel_tol=1e-6)
        assert torch.allclose(out.features[i], feature[0], atol=1e-9)
    assert torch.equal(out.gated, out.branch != KEEP)
    assert torch.equal(out.gate_open, out.branch == CORRECT)
    assert torch.equal(out.disagrees & ~out.gate_open, out.branch == BLEND)
    assert torch.equal(out.score, out.drift)


def test_without_classes_the_distances_decide(setting: Any) -> None:
    clf, guard, images = setting
    out = guard.run(clf.encoder, images, noise.stream_keys(images, 0))
    assert out.instability.isnan().all()
    assert not out.disagrees.any()
    assert set(out.branch.tolist()) == {KEEP, CORRECT}


def test_an_encoder_of_one_size_compares_with_a_moved_view(setting: Any) -> None:
    assert SecondLook().sizes(ToyEncoder()) == (16, 16)
    assert set(SecondLook()(toy_classifier(), toy_images(6)).passes.tolist()) <= {2.0, 3.0}
    clf, guard, images = setting
    assert guard.sizes(clf.encoder) == (24, 20)
    out = guard.replace(copy_size=None)(clf, images)
    copy = clf.encoder.encode(guard.motion(images, noise.fork(noise.stream_keys(images, 0), 0)))
    assert torch.allclose(out.drift, (copy - clf.encoder(images)).norm(dim=1), atol=1e-9)


@pytest.mark.parametrize(
    ("field", "fraction", "patches"), [("copy_size", 0.4, 3), ("copy_size", 0.97, 8), ("moved_copy_size", 0.4, 3)]
)
def test_a_copy_of_too_few_patches_or_as_large_as_the_image_is_refused(
    field: str, fraction: float, patches: int
) -> None:
    guard, encoder = SecondLook().replace(**{field: fraction}), patch_encoder()
    with pytest.raises(rc.ReactClipError, match=f"has {patches} of the 8 patches a side of 'patches'"):
        guard.check(encoder)


def test_the_default_is_second_look_where_it_has_a_threshold_and_react_elsewhere() -> None:
    def known_as(name: str, encoder: Any) -> Any:
        encoder.name = encoder.weights = name
        return encoder

    assert SecondLook.for_encoder("openai/clip-vit-base-patch16@main") == SecondLook()
    with pytest.raises(rc.ReactClipError, match="no threshold of SecondLook for 'patches': every encoder"):
        SecondLook.for_encoder(patch_encoder())
    assert default_for(known_as("clip-vit-b-16", patch_encoder())) == SecondLook()
    assert default_for(known_as("clip-vit-b-16", ToyEncoder())) == rc.ReACT.for_encoder("clip-vit-b-16")
    assert default_for(known_as("openai/clip-vit-base-patch32", patch_encoder())) == rc.ReACT()
    with pytest.raises(rc.ReactClipError, match=r"--calibrate-on PHOTOS.*`react-clip calibrate PHOTOS"):
        default_for(patch_encoder())


def test_gradients_pass_through_every_branch(setting: Any) -> None:
    clf, guard, images = setting
    branches = guard(clf, images).branch
    rows = torch.stack([(branches == branch).nonzero()[0, 0] for branch in (KEEP, BLEND, CORRECT)])
    # The motion follows from the pixels' keys; for a derivative it is held fixed.
    keys = noise.stream_keys(images[rows], 0)
    pixels = images[rows].clone().requires_grad_()

    def logits(at: Tensor) -> Tensor:
        return guard.run(clf.encoder, at, keys, clf).logits

    (slope,) = torch.autograd.grad(logits(pixels)[:, 0].sum(), pixels)
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    ahead, behind = logits(images[rows] + 1e-6 * direction), logits(images[rows] - 1e-6 * direction)
    assert torch.allclose((slope * direction).flatten(1).sum(1), (ahead - behind)[:, 0] / 2e-6, rtol=1e-4)


def test_a_file_of_the_last_release_can_be_read() -> None:
    old = {"kind": "second_look", "look": 0.75, "moved_look": 0.5, "threshold": 0.4, "lazy": True, "max_batch": 64}
    assert SecondLook.from_dict(old) == SecondLook(copy_size=0.75, moved_copy_size=0.5, threshold=0.4)
    with pytest.raises(rc.ReactClipError, match="second_look no longer has 'lazy'"):
        SecondLook.from_dict({**old, "lazy": False})
