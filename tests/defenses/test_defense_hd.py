"""HD: the literal algorithm, and a loss over all classes that rises."""

from __future__ import annotations

import pytest
import torch

from react_clip import noise
from react_clip.defenses import HD, hd
from toys import toy_classifier, toy_images

from . import literal
from .watching import F64, branch, inside, literal_tower, uniform_draws, watched_classifier


@pytest.mark.parametrize("steps", [1, 5])
def test_it_is_the_literal_algorithm(steps: int) -> None:
    clf, images = toy_classifier(F64), toy_images(4, dtype=F64)
    guard = HD(steps=steps)
    out = guard(clf, images, seed=3)
    keys = noise.stream_keys(images, 3)
    for i in range(len(images)):
        feature = literal.hd(
            literal_tower(clf),
            clf.class_features.tolist(),
            images[i].flatten().tolist(),
            uniform_draws(branch(keys[i : i + 1], hd._START)),
            eps=guard.eps,
            steps=steps,
            size=guard.step_size,
        )
        assert out.features[i].tolist() == pytest.approx(feature, abs=1e-9)


def test_it_raises_the_loss_of_all_classes_inside_its_ball() -> None:
    clf, encoder = watched_classifier()
    x = toy_images(8)
    out = HD(steps=10, step_size=1 / 255)(clf, x)
    start, *_, moved = encoder.seen
    assert len(encoder.seen) == 11
    assert inside(start, x, 8 / 255)
    assert inside(moved, x, 8 / 255)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(1).sum(1)

    assert (loss(out.logits) > loss(clf(start))).all()
    assert out.gated.all()


def test_the_passes_are_the_published_ones() -> None:
    clf, images = toy_classifier(), toy_images(3)
    out = HD()(clf, images)
    assert out.passes.tolist() == [21] * 3
    assert out.backward_passes.tolist() == [20] * 3
    assert HD(steps=3).cost() == (4, 3)
