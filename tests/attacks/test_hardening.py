"""Options against an attacker who knows the defence: off they change nothing, on they do what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import react_clip as rc
from react_clip.defenses import from_dict
from toys import toy_classifier, toy_images

GUARD = rc.ReACT(tau=2.0, views=3)


def test_defaults_are_not_even_written() -> None:
    assert not {"jitter", "alpha_closed"} & set(rc.ReACT().to_dict())
    hardened = GUARD.replace(jitter=0.1, alpha_closed=0.5)
    assert from_dict(json.loads(json.dumps(hardened.to_dict()))) == hardened


def test_lazy_and_complete_agree_with_every_option() -> None:
    clf, images = toy_classifier(), toy_images(40)
    for options in ({"jitter": 0.5}, {"alpha_closed": 0.4}, {"jitter": 0.3, "alpha_closed": 1.0}):
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"jitter": -0.1}, "jitter is -0.1; it must be >= 0"),
        ({"alpha_closed": "a"}, "alpha_closed is 'a'"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says):
        rc.ReACT(**options)
