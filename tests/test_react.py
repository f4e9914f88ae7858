"""ReACT equals a literal implementation, encodes only the views it needs, and does not depend on the batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import react_clip as rc
import reference
from react_clip import mappings, noise
from react_clip.defenses import AOM, DefendCLIP, from_dict
from react_clip.defenses.react import ANCHOR, AUGMENT, HIGH, LOW
from toys import ToyEncoder, toy_classifier, toy_images

F64 = torch.float64


def _threshold_in_the_middle(guard: rc.ReACT, images: torch.Tensor) -> float:
    """A tau that opens the gate for half of these images."""
    clf = toy_classifier(images.dtype)
    return float(guard.replace(lazy=False, tau=0.0)(clf, images).score.median())


# ---------------------------------------------------------------------- a second implementation


@pytest.mark.parametrize(
    "mapping", [mappings.Linear(), mappings.Logistic(0.2, 2.0, 0.5), mappings.PowerLaw(0.1, 0.5)], ids=repr
)
@pytest.mark.parametrize("lazy", [True, False])
def test_the_batched_algorithm_equals_the_literal_one(mapping: mappings.Mapping, lazy: bool) -> None:
    images = toy_images(8, dtype=F64)
    clf = toy_classifier(F64)
    guard = rc.ReACT(mapping=mapping, views=4, lazy=lazy, max_batch=7)
    guard = guard.replace(tau=_threshold_in_the_middle(guard, images))
    out = guard(clf, images, seed=5)
    assert 0 < out.gated.sum() < len(images), "both sides of the gate must be tried"

    keys = noise.stream_keys(images, 5)

    def encode(pixels: reference.Array) -> reference.Array:
        return clf.encoder.raw_features(torch.tensor(pixels).reshape(1, 3, 16, 16))[0].numpy()

    def draw(branch: int, view: int, i: int) -> reference.Array:
        stream = noise.fork(noise.fork(keys[i : i + 1], branch), view)
        return noise.normal(stream, (3 * 16 * 16,)).double()[0].numpy()

    for i in range(len(images)):
        augmented = guard.augmentation(images[i : i + 1], noise.fork(keys[i : i + 1], AUGMENT))
        expected = reference.react(
            guard,
            encode,
            clf.class_features.numpy(),
            images[i].flatten().numpy(),
            augmented.flatten().numpy(),
            (draw(LOW, 0, i), draw(HIGH, 0, i)),
            [draw(ANCHOR, view, i) for view in range(guard.views)],
            scale=lambda r: float(mapping(torch.tensor([r], dtype=F64))),
        )
        if math.isnan(out.instability[i]):
            del expected["instability"], expected["score"]
        for name, value in expected.items():
            assert getattr(out, name)[i].tolist() == pytest.approx(value, abs=1e-8), name


# ---------------------------------------------------------------------- gate first


@pytest.mark.parametrize("options", [{}, {"jitter": 0.5}, {"alpha_closed": 0.4}], ids=str)
def test_gate_first_equals_the_plain_fourteen_pass_algorithm(options: dict[str, float]) -> None:
    images = toy_images(40)
    clf = toy_classifier()
    guard = rc.ReACT(**options)  # type: ignore[arg-type]
    guard = guard.replace(tau=_threshold_in_the_middle(guard, images))
    lazy, plain = guard(clf, images, seed=1), guard.replace(lazy=False)(clf, images, seed=1)
    assert set(plain.passes.tolist()) == {14}
    assert set(lazy.passes.tolist()) <= {3, 4, 13, 14}
    assert len(set(lazy.passes.tolist())) >= 2, "images must differ in the views they need"
    assert 0 < int(lazy.gated.sum()) < 40
    assert torch.equal(lazy.gated, plain.gated)
    assert torch.equal(lazy.labels, plain.labels)
    assert torch.allclose(lazy.features, plain.features, atol=1e-6)
    measured = ~lazy.instability.isnan()
    assert torch.allclose(lazy.instability[measured], plain.instability[measured], atol=1e-5)
    assert options or torch.equal(lazy.gated, lazy.score >= guard.tau)


def test_published_configurations_have_the_published_cost() -> None:
    clf, images = toy_classifier(), toy_images(6)
    assert AOM()(clf, images).passes.tolist() == [11] * 6
    assert set(DefendCLIP(tau=-1e9)(clf, images).passes.tolist()) == {31}
    assert set(DefendCLIP(tau=1e9)(clf, images).passes.tolist()) == {21}
    assert set(rc.ReACT(tau=1e9)(clf, images).passes.tolist()) == {3}
    assert set(rc.ReACT(tau=-1e9)(clf, images).passes.tolist()) == {13}


def test_views_share_large_batches() -> None:
    clf = toy_classifier()
    encoder = clf.encoder
    assert isinstance(encoder, ToyEncoder)
    rc.ReACT(tau=-1e9, max_batch=1000)(clf, toy_images(20))
    assert encoder.calls == 2, "one call for clean and probes, one for all anchor views"
    encoder.calls = 0
    rc.ReACT(tau=-1e9, max_batch=50)(clf, toy_images(20))
    assert encoder.calls == math.ceil(60 / 50) + math.ceil(200 / 50)


def test_aom_is_the_operator_without_a_gate() -> None:
    clf, images = toy_classifier(), toy_images(5)
    out = AOM()(clf, images, seed=3)
    stream = noise.fork(noise.stream_keys(images, 3), ANCHOR)
    with torch.no_grad():
        plain = clf.encoder(images)
        drawn = [
            clf.encoder.encode_views(images + 0.1 * noise.normal(noise.fork(stream, i), (3, 16, 16))) for i in range(10)
        ]
    corrected = plain + 1.2 * (torch.stack(drawn).mean(0) - plain)
    assert torch.allclose(out.features, corrected / corrected.norm(dim=1, keepdim=True), atol=1e-5)
    assert out.gated.all()
    gated = DefendCLIP(tau=-1e9)(clf, images, seed=3)
    assert torch.allclose(gated.features, out.features, atol=1e-5)


# ---------------------------------------------------------------------- properties


@settings(max_examples=25)
@given(
    order=st.permutations(range(9)),
    split=st.integers(1, 9),
    batch=st.integers(1, 40),
    seed=st.sampled_from([7, b"secret"]),
    options=st.sampled_from([{}, {"tau": -1e9, "views": 9, "sequential": 0.9}, {"jitter": 0.5, "alpha_closed": 0.4}]),
)
def test_permuting_or_splitting_a_batch_changes_nothing(
    order: list[int], split: int, batch: int, seed: int | bytes, options: dict[str, float]
) -> None:
    clf, images = toy_classifier(), toy_images(9)
    guard = rc.ReACT(tau=0.6, views=3).replace(**options)
    whole = guard(clf, images, seed=seed)
    parts = [guard.replace(max_batch=batch)(clf, part, seed=seed) for part in images[order].split(split)]
    assert torch.allclose(torch.cat([part.features for part in parts]), whole.features[order], atol=1e-5)
    for name in ("labels", "passes", "gated"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)[order]), name


def test_jitter_moves_the_threshold_by_at_most_its_size() -> None:
    clf, images = toy_classifier(), toy_images(40)
    fixed, jittered = (rc.ReACT(tau=2.0, views=3, lazy=False, jitter=jitter)(clf, images) for jitter in (0.0, 1.0))
    assert torch.equal(fixed.score, jittered.score)
    changed = fixed.gated != jittered.gated
    assert 0 < int(changed.sum()) < 40
    assert (fixed.score[changed] - 2.0).abs().max() <= 1.0


@pytest.mark.parametrize("sequential", [None, 0.9])
def test_a_closed_gate_corrects_by_its_own_strength(sequential: float | None) -> None:
    clf, images = toy_classifier(), toy_images(12)
    closed = rc.ReACT(tau=1e9, views=9, alpha_closed=0.5, sequential=sequential)(clf, images)
    expected = rc.ReACT(tau=-1e9, views=9, alpha=0.5, sequential=sequential)(clf, images)
    assert not bool(closed.gated.any())
    assert torch.equal(closed.passes, expected.passes)
    assert torch.allclose(closed.features, expected.features, atol=1e-6)


def test_a_constant_encoder_has_no_drift() -> None:
    clf = toy_classifier()
    for parameter in clf.encoder.tower[0].parameters():
        parameter.data.zero_()
    out = rc.ReACT()(clf, toy_images(3))
    assert out.drift.tolist() == [0, 0, 0]
    assert torch.isfinite(out.features).all()


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no valid JSON"),
        ("[1, 2]", "holds a list"),
        ('{"tau": 0.7, "taau": 1}', "react has no field 'taau'; its fields are"),
        ('{"mapping": {"kind": "linear", "a": "x"}}', "must be a finite number"),
    ],
)
def test_damaged_configuration_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "guard.json"
    path.write_text(text)
    with pytest.raises(rc.ReactClipError, match=says):
        rc.ReACT.load(path)


def test_options_beyond_the_paper_are_written_only_where_they_are_used() -> None:
    assert not {"sequential", "jitter", "alpha_closed"} & rc.ReACT().to_dict().keys()
    guard = rc.ReACT(sequential=0.9, mapping=mappings.PowerLaw(0.1, 0.5))
    assert guard.to_dict()["sequential"] == 0.9
    assert from_dict(json.loads(json.dumps(guard.to_dict()))) == guard
