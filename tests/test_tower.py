"""The defence on the real OpenAI ViT-B/16 image tower and real photos. Small enough for two cores; the full numbers are
in ``benchmarks/results``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import react_clip as rc
from react_clip import data
from react_clip.attacks import PGD
from react_clip.preprocess import as_pixels

pytestmark = [pytest.mark.tower, pytest.mark.shared]
PHOTOS = 8


@pytest.fixture(scope="module")
def pets(tower: rc.Encoder, shared: Path) -> tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor]:
    """The pets classifier, and some photos that plain CLIP gets right."""
    dataset, head = data.load("oxford_pets", root=shared / "data").align(
        data.load_head(shared / "heads/oxford_pets.npz")
    )
    clf = rc.ZeroShotClassifier.from_features(tower, head.names, head.features)
    dataset = dataset.take(2 * PHOTOS, 0)
    pixels = as_pixels([dataset.image(i) for i in range(len(dataset))], 224)
    labels = torch.tensor(dataset.labels)
    right = (rc.Undefended()(clf, pixels).labels == labels).nonzero().flatten()[:PHOTOS]
    assert len(right) == PHOTOS, "CLIP knows most pets"
    return clf, pixels[right], labels[right]


@pytest.fixture(scope="module")
def attacked(pets: tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor]) -> dict[int, torch.Tensor]:
    clf, pixels, labels = pets
    return {eps: PGD(eps=eps / 255, steps=10)(clf, pixels, labels, seed=0).images for eps in (4, 16)}


def test_attacks_collapse_plain_clip_and_the_defence_restores_it(
    pets: tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor], attacked: dict[int, torch.Tensor]
) -> None:
    clf, pixels, labels = pets
    guard = rc.ReACT()
    clean = guard(clf, pixels)
    assert (clean.labels == labels).sum() >= PHOTOS - 1
    assert clean.passes.float().mean() < 6, "clean traffic is cheap"
    drifts = [clean.drift.mean()]
    for images in attacked.values():
        assert (rc.Undefended()(clf, images).labels == labels).sum() == 0
        out = guard(clf, images)
        drifts.append(out.drift.mean())
    assert (out.labels == labels).sum() >= 0.7 * PHOTOS, "at 16/255 the correction reaches"
    assert out.gated.all()
    assert drifts == sorted(drifts), "r grows with the strength of the attack"


def test_an_attacked_image_gets_the_same_answer_alone_and_in_any_batch(
    pets: tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor], attacked: dict[int, torch.Tensor]
) -> None:
    clf, pixels, _ = pets
    images = torch.stack([attacked[4][0], pixels[1], attacked[4][2]])
    guard = rc.ReACT()
    whole = guard(clf, images, seed=b"secret")
    turned = guard.replace(max_batch=5)(clf, images.flip(0), seed=b"secret")
    alone = guard(clf, images[:1], seed=b"secret")
    assert torch.allclose(turned.features.flip(0), whole.features, atol=1e-5)
    assert torch.equal(turned.labels.flip(0), whole.labels)
    assert torch.allclose(alone.features, whole.features[:1], atol=1e-5)


def test_gate_first_equals_the_plain_algorithm(
    pets: tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor], attacked: dict[int, torch.Tensor]
) -> None:
    clf, pixels, _ = pets
    images = torch.cat([pixels[:2], attacked[4][:2]])
    lazy, plain = rc.ReACT(tau=0.5)(clf, images), rc.ReACT(tau=0.5, lazy=False)(clf, images)
    assert plain.passes.tolist() == [14] * 4
    assert torch.equal(lazy.gated, plain.gated)
    assert torch.equal(lazy.labels, plain.labels)
    assert torch.allclose(lazy.features, plain.features, atol=1e-5)
