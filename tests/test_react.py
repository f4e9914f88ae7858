"""ReACT equals a literal implementation and encodes only the views it needs."""

from __future__ import annotations

import math

import pytest
import torch

import literal
import react_clip as rc
from react_clip import mappings, noise
from react_clip.defenses import AOM, DefendCLIP
from react_clip.defenses.react import ANCHOR, AUGMENT, HIGH, LOW
from toys import toy_classifier, toy_images

F64 = torch.float64


def middle_threshold(guard: rc.ReACT, images: torch.Tensor) -> float:
    """A tau that opens the gate for half of these images."""
    clf = toy_classifier(images.dtype)
    out = guard.replace(tau=0.0).run(clf.encoder, images, 0, clf, skip_unneeded=False)
    return float(out.score.median())


@pytest.mark.parametrize(
    "mapping", [mappings.Linear(), mappings.Logistic(0.2, 2.0, 0.5), mappings.PowerLaw(0.1, 0.5)], ids=repr
)
@pytest.mark.parametrize("skip_unneeded", [True, False])
def test_the_batched_algorithm_equals_the_literal_one(mapping: mappings.Mapping, skip_unneeded: bool) -> None:
    clf, images = toy_classifier(F64), toy_images(8, dtype=F64)
    guard = rc.ReACT(mapping=mapping, views=4)
    guard = guard.replace(tau=middle_threshold(guard, images))
    out = guard.run(clf.encoder, images, 5, clf, skip_unneeded=skip_unneeded)
    assert 0 < out.gated.sum() < len(images), "both sides of the gate must be tried"
    keys = noise.stream_keys(images, 5)

    def encode(pixels: literal.Array) -> literal.Array:
        return clf.encoder.raw(torch.tensor(pixels).reshape(1, 3, 16, 16))[0].numpy()

    def draw(branch: int, view: int, i: int) -> literal.Array:
        stream = noise.fork(noise.fork(keys[i : i + 1], branch), view)
        return noise.normal(stream, (3 * 16 * 16,)).double()[0].numpy()

    for i in range(len(images)):
        augmented = guard.augmentation(images[i : i + 1], noise.fork(keys[i : i + 1], AUGMENT))
        expected = literal.react(
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


def test_published_configurations_have_the_published_cost() -> None:
    clf, images = toy_classifier(), toy_images(6)
    assert AOM()(clf, images).passes.tolist() == [11] * 6
    assert set(DefendCLIP(tau=-1e9)(clf, images).passes.tolist()) == {31}
    assert set(DefendCLIP(tau=1e9)(clf, images).passes.tolist()) == {21}
    assert set(rc.ReACT(tau=1e9)(clf, images).passes.tolist()) == {3}
    assert set(rc.ReACT(tau=None)(clf, images).passes.tolist()) == {13}


def test_aom_is_the_operator_without_a_gate() -> None:
    clf, images = toy_classifier(), toy_images(5)
    out = AOM()(clf, images, seed=3)
    stream = noise.fork(noise.stream_keys(images, 3), ANCHOR)
    with torch.no_grad():
        plain = clf.encoder(images)
        drawn = [clf.encoder.encode(images + 0.1 * noise.normal(noise.fork(stream, i), (3, 16, 16))) for i in range(10)]
    corrected = plain + 1.2 * (torch.stack(drawn).mean(0) - plain)
    assert torch.allclose(out.features, corrected / corrected.norm(dim=1, keepdim=True), atol=1e-5)
    always = DefendCLIP(tau=None)(clf, images, seed=3)
    assert torch.allclose(always.features, out.features, atol=1e-5)
    old = {"kind": "aom", "tau": None, "sigma_low": 0.02, "probe_samples": 1, "instability": False, "augmentation": {}}
    assert AOM.from_dict(old) == AOM()
