"""Sweeps change one thing at a time; random weights have the shapes and the work of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import react_clip as rc
from react_clip import attacks, cli
from react_clip.bench import BARE, OURS, Bench, Comparison, Traffic, measure
from react_clip.bench.workload import (
    attacked_rows,
    gate_scores,
    open_gate_for,
    random_encoder,
    synthetic_photos,
    with_classes,
)
from react_clip.choices import SHAPES, SWEEPS
from toys import toy_classifier, toy_images

_SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128}
TINY = {"text_config": _SMALL, "vision_config": {**_SMALL, "patch_size": 8, "image_size": 32}}


def toy_bench() -> Bench:
    clf = toy_classifier(classes=12)
    traffic = Traffic(clf, toy_images(16), attacks.PGD(eps=8 / 255, steps=2), batch=4)
    return Bench(clf, rc.ReACT(), traffic, images=16, batch=4)


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


@pytest.mark.parametrize("axis", SWEEPS)
def test_a_sweep_measures_the_encoder_and_react_at_every_value(axis: str) -> None:
    bench, labels = toy_bench(), []
    points = bench.sweep(axis)
    for rounds, _ in enumerate(measure([*points.values()], rounds=2, singles=1, progress=labels.append), start=1):
        assert {len(one.timings()[0].round_milliseconds) for one in points.values()} == {rounds}
    assert list(points) == bench.values(axis)
    assert len(labels) == sum(one.steps(rounds=2, singles=1) for one in points.values())
    for point in points.values():
        bare, ours = point.timings()
        assert (bare.label, ours.label) == (BARE, OURS)
        assert 3 <= ours.passes <= 14


def test_more_classes_change_neither_gate_nor_passes() -> None:
    clf, images, guard = toy_classifier(classes=12), toy_images(16), rc.ReACT(lazy=False)
    few, many = (guard(with_classes(clf, count), images, seed=0) for count in (10, 1000))
    assert many.logits.shape == (16, 1000)
    torch.testing.assert_close(few.instability, many.instability, rtol=1e-4, atol=1e-6)
    assert torch.equal(few.gated, many.gated)
    assert len(with_classes(toy_classifier(classes=3), 100).names) == 100


def test_only_the_chosen_images_are_attacked_and_photos_repeat() -> None:
    clf, photos, eps = toy_classifier(), toy_images(5), 8 / 255
    traffic = Traffic(clf, photos, attacks.PGD(eps=eps, steps=2), batch=2)
    clean, some, every = (traffic.images(10, share) for share in (0.0, 0.2, 1.0))
    assert torch.equal(clean, photos.repeat(2, 1, 1, 1))
    moved = (some - clean).flatten(1).abs().amax(1)
    assert (moved > 0).nonzero().flatten().tolist() == attacked_rows(10, 0.2).tolist() == [0, 5]
    distances = (every - clean).flatten(1).abs().amax(1)
    assert bool((distances > 0).all() & (distances <= eps + 1e-6).all())
    # An image that was attacked before is the same one now.
    assert torch.equal(every[0], some[0])


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_forced_gate_opens_for_the_share_asked_for(share: float) -> None:
    clf, images = toy_classifier(), toy_images(8)
    guard = open_gate_for(rc.ReACT(), gate_scores(clf, rc.ReACT(), images, batch=3), share)
    assert guard(clf, images, seed=0).gated.float().mean().item() == share


@pytest.mark.parametrize(("shapes", "operations", "tokens"), [("ViT-B-32", 8.82e9, 50), ("ViT-B-16", 35.1e9, 197)])
def test_random_weights_have_the_work_of_their_shapes(shapes: str, operations: float, tokens: int) -> None:
    # The operations of one pass as the papers count them, a multiply-add as two, without what the last block saves:
    # queries, attention, output and perceptron of all tokens but the first.
    operations -= 2 * (tokens - 1) * (10 * 768**2 + 2 * tokens * 768)
    with FlopCounterMode(display=False) as counter:
        random_encoder(shapes, device="meta").encode_views(torch.full((1, 3, 224, 224), 0.5, device="meta"))
    assert counter.get_total_flops() == pytest.approx(operations, rel=0.002)


def test_random_weights_read_prompts_and_leave_global_randomness_alone(tiny_shapes: str) -> None:
    before = torch.random.get_rng_state()
    encoder = random_encoder(tiny_shapes)
    assert torch.equal(before, torch.random.get_rng_state())
    assert encoder.encode_text(["a photo of a cat.", "a dog"]).shape == (2, 512)
    assert encoder(synthetic_photos(3, 32)).shape == (3, 512)


def test_a_sweep_writes_every_round_as_soon_as_it_is_measured(
    tiny_shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.json"
    arguments = ["--shapes", tiny_shapes, "--images", "8", "--batch", "4", "--rounds", "3", "--singles", "1", "--quiet"]
    whole = Comparison.measure_chunk

    def stopped(self: Comparison, *arguments: Any) -> None:
        if len(self._rounds) == 3:
            raise KeyboardInterrupt
        whole(self, *arguments)

    monkeypatch.setattr(Comparison, "measure_chunk", stopped)
    assert cli.main(["bench", *arguments, "--sweep", "attacked", "--out", str(out)]) != 0
    kept = json.loads(out.read_text())["sweeps"]["attacked"]
    assert [point["value"] for point in kept] == [0.0, 0.01, 0.1, 1.0]
    assert all(len(row["round_milliseconds"]) == 2 for point in kept for row in point["contenders"])
    monkeypatch.undo()
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    assert cli.main(["bench", *arguments, "--sweep", "attacked", "--out", str(out)]) == 0
    sweep = json.loads(out.read_text())["sweeps"]["attacked"]
    passes = [point["contenders"][1]["passes"] for point in sweep]
    assert passes[0] < passes[2] < passes[3]
    assert "along attacked:" in capsys.readouterr().out
