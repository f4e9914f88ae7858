"""MAC: the literal algorithm, its weight on both sides, and its fourteen passes."""

from __future__ import annotations

import pytest
import torch

from react_clip import noise
from react_clip.augment import WeakAugmentation
from react_clip.defenses import MAC, from_dict, mac
from reference import dot, unit
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, inside, literal_tower, uniform_draws, watched_classifier


@pytest.mark.parametrize("views", [1, 2, 3])
def test_it_is_the_literal_algorithm(views: int) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    ratios = MAC(views=views)(clf, images, seed=3).score
    guard = MAC(views=views, tau=float(ratios.mean()), temperature=float(ratios.std()))
    out = guard(clf, images, seed=3)
    assert 0 < out.gated.sum() < 4, "both sides must be tried"
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        features, moved = [], []
        for number in range(views):
            stream = branch(keys[i : i + 1], mac._VIEW, number)
            view = guard.augmentation(images[i : i + 1], stream) if number else images[i : i + 1]
            feature, ratio = literal.mac_view(
                literal_tower(clf),
                view.flatten().tolist(),
                guard.augmentation(view, branch(stream, mac._PROBE)).flatten().tolist(),
                uniform_draws(branch(stream, mac._START)),
                eps=guard.eps,
                steps=guard.steps,
                size=guard.step_size,
                tau=guard.tau,
                temperature=guard.temperature,
            )
            features.append(feature)
            moved.append(ratio)
        assert out.score[i] == pytest.approx(max(moved), abs=1e-11)
        assert bool(out.gated[i]) == (max(moved) >= guard.tau)
        classes = clf.class_features.tolist()
        logits = [sum(100.0 * dot(feature, c) for feature in features) / views for c in classes]
        assert out.logits[i].tolist() == pytest.approx(logits, abs=1e-8)
        mean = [sum(feature[d] for feature in features) / views for d in range(12)]
        assert out.features[i].tolist() == pytest.approx(unit(mean), abs=1e-10)


def test_views_that_augmentation_hardly_moves_are_left_alone_and_others_counterattacked() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(5)
    calm = MAC(tau=1e9, views=1)(clf, x)
    assert not calm.gated.any()
    assert torch.equal(encoder.seen[-1], x)
    assert torch.allclose(calm.logits, clf(x), atol=1e-4)
    stirred = MAC(tau=-1e9, views=1)(clf, x)
    assert stirred.gated.all()
    moved = encoder.seen[-1]
    assert inside(moved, x, 8 / 255)
    start = encoder.seen[-5]
    anchor, near, far = (encoder.raw_features(view) for view in (x, start, moved))
    assert ((far - anchor).norm(dim=1) > (near - anchor).norm(dim=1)).all()


def test_the_weight_has_the_published_sign_and_steepness() -> None:
    clf, images = toy_classifier(F64), toy_images(1, dtype=F64)
    ratio = float(MAC(views=1)(clf, images).score)
    far, near = (MAC(views=1, tau=ratio + by, eps=0.1)(clf, images).features for by in (1.0, -1.0))
    half = MAC(views=1, tau=ratio, eps=0.1)(clf, images).features
    plain = clf.encoder(images)
    assert torch.allclose(far, plain, atol=1e-6), "far below tau nothing moves"
    assert (plain - half).norm() < (plain - near).norm()


def test_the_passes_are_the_published_ones() -> None:
    clf, images = toy_classifier(), toy_images(3)
    out = MAC()(clf, images)
    assert out.passes.tolist() == [14] * 3
    assert out.backward_passes.tolist() == [8] * 3
    assert MAC(views=1, steps=2).cost() == (5, 2)


def test_the_augmentation_is_part_of_the_configuration() -> None:
    guard = MAC(augmentation=WeakAugmentation(rotation=0.0, scale=(1.0, 1.0)))
    assert from_dict(guard.to_dict()) == guard
    assert guard.to_dict()["augmentation"]["rotation"] == 0.0
