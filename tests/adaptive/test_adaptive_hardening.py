"""Options against an attacker who knows the defence: off they change nothing, on they do what they say."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
import torch

import react_clip as rc
from react_clip import functional, noise
from react_clip.defenses import from_dict, views
from toys import toy_classifier, toy_images

GUARD = rc.ReACT(tau=2.0, views=3)


def test_defaults_are_not_even_written() -> None:
    assert not {"jitter", "alpha_closed", "recheck", "band", "anchors"} & set(rc.ReACT().to_dict())
    hardened = GUARD.replace(jitter=0.1, alpha_closed=0.5, recheck=4, band=0.2, anchors=3)
    assert from_dict(json.loads(json.dumps(hardened.to_dict()))) == hardened


def test_lazy_and_complete_agree_with_every_option() -> None:
    clf, images = toy_classifier(), toy_images(40)
    for options in (
        {"jitter": 0.5}, {"alpha_closed": 0.4}, {"recheck": 3, "band": 0.5}, {"jitter": 0.3, "recheck": 2},
        {"anchors": 3}, {"anchors": 2, "alpha_closed": 0.4},
    ):  # fmt: skip
        guard = GUARD.replace(**options)
        lazy, complete = guard(clf, images), guard.replace(lazy=False)(clf, images)
        assert 0 < int(lazy.gated.sum()) < 40, "both branches must be seen"
        assert torch.equal(lazy.gated, complete.gated)
        assert torch.allclose(lazy.features, complete.features, atol=1e-5)
        assert int(lazy.passes.max()) <= guard.cost()[0]


def test_a_jittered_gate_is_random_per_image_and_seed_but_not_per_batch() -> None:
    clf, images = toy_classifier(), toy_images(40)
    fixed, jittered = GUARD.replace(lazy=False), GUARD.replace(lazy=False, jitter=1.0)
    plain, moved = fixed(clf, images), jittered(clf, images)
    assert torch.equal(plain.score, moved.score)
    assert not torch.equal(plain.gated, moved.gated)
    certain = (plain.score - 2.0).abs() > 1.0
    assert torch.equal(plain.gated[certain], moved.gated[certain]), "never further than the jitter"
    alone = torch.cat([jittered(clf, image[None]).gated for image in images[:8]])
    assert torch.equal(alone, moved.gated[:8])


def test_a_closed_gate_may_correct_a_little() -> None:
    clf, images = toy_classifier(), toy_images(6)
    closed = rc.ReACT(tau=1e9, views=3, alpha_closed=0.5)
    expected = rc.ReACT(tau=-1e9, views=3, alpha=0.5)
    assert not bool(closed(clf, images).gated.any())
    assert torch.allclose(closed(clf, images).features, expected(clf, images).features, atol=1e-6)
    assert closed(clf, images).passes.tolist() == [6] * 6


def test_images_near_the_threshold_are_probed_again() -> None:
    clf, images = toy_classifier(), toy_images(40)
    guard = GUARD.replace(recheck=4, band=0.5, lazy=False)
    before, after = GUARD.replace(lazy=False)(clf, images), guard(clf, images)
    near = (before.score - 2.0).abs() < 0.5
    assert 0 < int(near.sum()) < 40
    assert torch.equal(after.passes - before.passes, 8 * near.long())
    assert torch.equal(after.score[~near], before.score[~near])
    assert not torch.isclose(after.score[near], before.score[near]).any()
    # The first sample and four more are the first five.
    five = GUARD.replace(probe_samples=5, lazy=False)(clf, images)
    assert torch.allclose(after.drift[near], five.drift[near], atol=1e-5)


@pytest.mark.parametrize(("drawn", "anchors"), [(5, 1), (6, 2), (6, 3), (7, 3), (4, 4), (3, 9)])
def test_several_anchors_answer_with_their_median(drawn: int, anchors: int) -> None:
    clf, images = toy_classifier(torch.float64), toy_images(4, dtype=torch.float64)
    guard = rc.ReACT(tau=-1e9, views=drawn, anchors=anchors)
    out = guard(clf, images, seed=2)
    keys = noise.stream_keys(images, 2)
    with torch.no_grad():
        plain = clf.encoder(images)
        seen = views.anchor_views(clf.encoder, images, keys, out.sigma, range(drawn), 64)
    # Views in their order, as evenly as can be, the larger groups first.
    count = min(anchors, drawn)
    sizes = [drawn // count + (i < drawn % count) for i in range(count)]
    for i in range(4):
        said = []
        for group in seen[i].split(sizes):
            moved = plain[i] + guard.alpha * (group.mean(0) - plain[i])
            said.append((moved / moved.norm()).tolist())
        middle = torch.tensor([median(coordinates) for coordinates in zip(*said, strict=True)], dtype=torch.float64)
        assert torch.allclose(out.features[i], middle / middle.norm(), atol=1e-9)
    assert set(out.passes.tolist()) == {3 + drawn}, "no view more than one anchor takes"


def test_a_minority_of_anchors_counts_for_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.functional.normalize(torch.randn(1, 12, generator=generator), dim=1)
    seen = plain[:, None] + 0.1 * torch.randn(1, 10, 12, generator=generator)
    led_astray = torch.cat([seen[:, :8], seen[:, 8:] + 100.0], 1)
    moved = {count: views.corrected(plain, led_astray, 2.0, count) for count in (1, 5)}
    honest = views.corrected(plain, seen, 2.0, 5)
    assert float(functional.drift(moved[5], honest)) < 0.3 < float(functional.drift(moved[1], honest))


def test_the_median_can_be_differentiated() -> None:
    plain = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    seen = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    for anchors in (1, 2, 3, 6):
        assert torch.autograd.gradcheck(lambda f, v, n=anchors: views.corrected(f, v, 2.0, n), (plain, seen))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"jitter": -0.1}, "jitter is -0.1; it must be >= 0"),
        ({"alpha_closed": "a"}, "alpha_closed is 'a'"),
        ({"recheck": 1.5}, "recheck is 1.5"),
        ({"band": -1}, "band is -1"),
        ({"anchors": 0}, "anchors is 0; it must be a whole number >= 1"),
        ({"anchors": 2.5}, "anchors is 2.5"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says):
        rc.ReACT(**options)
