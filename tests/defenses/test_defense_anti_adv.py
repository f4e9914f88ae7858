"""Anti-Adv: the literal algorithm, a surer answer, and no label but its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from react_clip.defenses import AntiAdv
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, literal_tower, watched_classifier


@pytest.mark.parametrize(("steps", "size"), [(2, 4 / 255), (3, 0.15)])
def test_it_is_the_literal_algorithm(steps: int, size: float) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    out = AntiAdv(steps=steps, step_size=size)(clf, images)
    for i in range(len(images)):
        feature = literal.anti_adv(
            literal_tower(clf), clf.class_features.tolist(), images[i].flatten().tolist(), steps=steps, size=size
        )
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-9)


def test_the_label_is_that_of_the_image_even_when_a_step_overshoots() -> None:
    clf, images = toy_classifier(F64), toy_images(40, dtype=F64)
    labels = clf(images).argmax(1)
    overshot = (AntiAdv(steps=1, step_size=0.15)(clf, images).labels != labels).nonzero().flatten().tolist()
    assert overshot, "some step must leave its class"
    out = AntiAdv(steps=2, step_size=0.15)(clf, images)
    for i in overshot:
        feature = literal.anti_adv(
            literal_tower(clf), clf.class_features.tolist(), images[i].flatten().tolist(), steps=2, size=0.15
        )
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-9)


@pytest.mark.parametrize("size", [0.25 / 255, 1 / 255, 4 / 255])
def test_it_lowers_the_loss_of_its_own_label(size: float) -> None:
    clf, images = toy_classifier(F64), toy_images(20, dtype=F64)
    plain = clf(images)
    labels = plain.argmax(1)
    out = AntiAdv(step_size=size)(clf, images)
    before, after = (F.cross_entropy(logits, labels, reduction="none") for logits in (plain, out.logits))
    assert (after <= before + 1e-12).all()
    assert (after < before).sum() > 15
    assert out.gated.all()
    assert out.score.isnan().all()


def test_it_starts_at_the_image_and_leaves_the_range_never() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(3).round(decimals=1)
    AntiAdv(steps=3, step_size=0.4)(clf, x)
    assert torch.equal(encoder.seen[0], x)
    assert len(encoder.seen) == 4
    assert (encoder.seen[-1] - x).abs().max() > 0.4, "there is no ball"
    assert all(pixels.min() >= 0 and pixels.max() <= 1 for pixels in encoder.seen)


def test_the_seed_plays_no_part_and_the_cost_is_known() -> None:
    clf, images = toy_classifier(), toy_images(3)
    assert torch.equal(AntiAdv()(clf, images, seed=1).logits, AntiAdv()(clf, images, seed=b"two").logits)
    assert AntiAdv().cost() == (3, 2)
