"""TTE: the literal algorithm, the identity where all views agree, and crops that stay within the padding."""

from __future__ import annotations

import pytest
import torch

import react_clip as rc
from react_clip import noise
from react_clip.defenses import TTE, tte
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, literal_tower, watched_classifier


@pytest.mark.parametrize(("crops", "padding"), [(4, 1 / 8), (2, 0.25), (0, 1 / 8)])
def test_it_is_the_literal_algorithm(crops: int, padding: float) -> None:
    clf, images = toy_classifier(F64), toy_images(3, dtype=F64)
    guard = TTE(crops=crops, padding=padding)
    out = guard(clf, images, seed=3)
    margin = round(16 * padding)
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        draws = noise.uniform(branch(keys[i : i + 1], tte._CROPS), 2 * crops)[0].tolist()
        corners = [int(draw * (2 * margin + 1)) for draw in draws]
        logits, feature = literal.tte(
            literal_tower(clf),
            clf.class_features.tolist(),
            images[i].flatten().tolist(),
            list(zip(corners[::2], corners[1::2], strict=True)),
            size=16,
            margin=margin,
        )
        assert out.logits[i].tolist() == pytest.approx(logits, abs=1e-9)
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-12)


def test_the_mean_of_equal_views_is_the_plain_answer() -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    symmetric = (images + images.flip(-1)) / 2
    assert torch.allclose(TTE(padding=0.0)(clf, symmetric).logits, clf(symmetric), atol=1e-9)
    black = torch.zeros(1, 3, 16, 16, dtype=F64)
    assert torch.allclose(TTE()(clf, black).logits, clf(black), atol=1e-9)
    assert not torch.allclose(TTE()(clf, images).logits, clf(images), atol=1e-3)


def test_views_are_the_image_its_mirror_image_and_shifted_copies() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(1)
    TTE(padding=0.25, max_batch=1)(clf, x, seed=1)
    views = torch.cat(encoder.seen)
    assert torch.equal(views[0], x[0])
    assert torch.equal(views[5:], views[:5].flip(-1))
    padded = torch.nn.functional.pad(x[0], (4, 4, 4, 4))
    shifts = [(top, left) for top in range(9) for left in range(9)]
    found = set()
    for view in views[1:5]:
        found |= {(i, j) for i, j in shifts if torch.equal(padded[:, i : i + 16, j : j + 16], view)}
    assert len(found) == 4, "four crops, each at a place of its own"


def test_crops_reach_both_ends_of_the_padding() -> None:
    corners = TTE(crops=50)._offsets(torch.arange(40), 2)
    assert corners.shape == (51, 40, 2)
    assert (corners[0] == 2).all()
    assert sorted(corners[1:].unique().tolist()) == [0, 1, 2, 3, 4]


def test_gradients_flow_through_the_mean() -> None:
    images = toy_images(2, dtype=F64).requires_grad_()
    net = rc.as_module(toy_classifier(F64), TTE())
    net(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_it_costs_ten_passes_and_no_gradients() -> None:
    out = TTE()(toy_classifier(), toy_images(2))
    assert out.passes.tolist() == [10, 10]
    assert out.backward_passes.tolist() == [0, 0]
    assert TTE(crops=1).cost() == (4, 0)
