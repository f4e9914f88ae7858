"""Lots: every role has its stream, whatever else is drawn; recorded ones have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import react_clip as rc
from react_clip import noise
from react_clip.augment import WeakAugmentation
from react_clip.defenses import views
from react_clip.defenses.lots import Plan
from toys import on_a_gpu

KEYS = torch.arange(5) * 977


def plan(samples: int = 2, count: int = 3) -> Plan:
    return Plan(samples, count, WeakAugmentation(), torch.float32)


def test_every_role_has_the_stream_of_its_branch() -> None:
    lots = plan().draw(KEYS)
    for scale, role in enumerate((views.LOW, views.HIGH)):
        for sample in range(2):
            assert torch.equal(lots.probes[scale, sample], noise.fork(noise.fork(KEYS, role), sample))
    for number in range(3):
        assert torch.equal(lots.anchors[:, number], noise.fork(noise.fork(KEYS, views.ANCHOR), number))
    expected = WeakAugmentation().choose(noise.fork(KEYS, views.AUGMENT), torch.float32)
    assert lots.choices is not None
    assert torch.equal(lots.choices.values, expected.values)
    assert torch.equal(lots.choices.grain, expected.grain)


def test_more_of_one_role_changes_no_other() -> None:
    few, many = plan(1, 1).draw(KEYS), plan(3, 9).draw(KEYS, recorded=True)
    assert torch.equal(few.probes, many.probes[:, :1])
    assert torch.equal(few.anchors, many.anchors[:, :1])
    blind = Plan(1, 1, None, torch.float32).draw(KEYS)
    assert blind.choices is None
    assert torch.equal(blind.probes, few.probes)
    assert torch.equal(blind.anchors, few.anchors)


@on_a_gpu
def test_recorded_lots_have_the_same_bits() -> None:
    for count in (5, 1, 5, 300, 1025):
        keys = torch.arange(count, device="cuda") * 31
        drawn, recorded = plan().draw(keys), plan().draw(keys, recorded=True)
        assert torch.equal(drawn.probes, recorded.probes)
        assert torch.equal(drawn.anchors, recorded.anchors)
        assert drawn.choices is not None
        assert recorded.choices is not None
        assert torch.equal(drawn.choices.values, recorded.choices.values)
        assert torch.equal(drawn.choices.grain, recorded.choices.grain)


@on_a_gpu
@pytest.mark.parametrize("tau", [-1e9, 0.3, 1e9])
def test_graphs_change_no_bit_of_an_answer(tiny_folder: Path, tau: float) -> None:
    encoder = rc.load(tiny_folder, device="cuda")
    clf = rc.ZeroShotClassifier.from_features(encoder, list("abc"), torch.eye(3, encoder.dim, device="cuda"))
    images = torch.rand(40, 3, encoder.image_size, encoder.image_size, device="cuda")
    guard = rc.ReACT(tau=tau, sequential=0.99)
    for count in (1, 3, 40):
        plain = guard(clf, images[:count])
        encoder.use_graphs()
        for _ in range(2):
            recorded = guard(clf, images[:count])
            for part in ("features", "score", "gated", "passes"):
                assert torch.equal(getattr(plain, part), getattr(recorded, part)), (count, part)
        encoder.use_graphs(False)


@on_a_gpu
def test_pixels_out_of_range_are_refused_after_the_clean_pass(tiny_folder: Path) -> None:
    encoder = rc.load(tiny_folder, device="cuda")
    clf = rc.ZeroShotClassifier.from_features(encoder, list("ab"), torch.eye(2, encoder.dim, device="cuda"))
    images = torch.rand(2, 3, encoder.image_size, encoder.image_size, device="cuda")
    for bad in (1.5, -0.1, float("nan")):
        broken = images.clone()
        broken[1, 2, 3, 4] = bad
        with pytest.raises(rc.ReactClipError, match="they must lie in"):
            rc.ReACT()(clf, broken)
        with pytest.raises(rc.ReactClipError, match="they must lie in"):
            encoder(broken)
