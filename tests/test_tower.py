"""The defence on the real OpenAI ViT-B/16 image tower and two photos; the full numbers are in ``benchmarks/results``.

Photos, budget and steps are chosen so that every outcome is clear by several logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import react_clip as rc
from react_clip import data
from react_clip.attacks import PGD

pytestmark = [pytest.mark.tower, pytest.mark.shared]
Pets = tuple[rc.ZeroShotClassifier, torch.Tensor, torch.Tensor]
PHOTOS = [5, 6]
"""Photos of which CLIP is certain: the right class leads by more than 3 logits."""
GUARD = rc.ReACT(views=5)
SEED = b"sixteen secret bytes"


@pytest.fixture(scope="module")
def pets(tower: rc.Encoder, shared: Path) -> Pets:
    """The pets classifier, two photos and their labels."""
    head = data.load_class_features(shared / "heads/oxford_pets.npz")
    dataset = data.load("oxford_pets", root=shared / "data").align(head)
    clf = rc.ZeroShotClassifier.from_features(tower, head.names, head.features)
    dataset = dataset.take(8, 0)
    return clf, tower.prepare([dataset[i][0] for i in PHOTOS]), torch.tensor(dataset.labels)[PHOTOS]


@pytest.fixture(scope="module")
def images(pets: Pets) -> torch.Tensor:
    """The photos, then the same after four steps of PGD at 16/255, which put the right class 18 logits behind."""
    return torch.cat([pets[1], PGD(eps=16 / 255, steps=4)(*pets, seed=0).images])


@pytest.fixture(scope="module")
def answers(pets: Pets, images: torch.Tensor) -> rc.Defended:
    return GUARD(pets[0], images, seed=SEED)


def test_attacks_collapse_plain_clip_and_the_defence_restores_it(
    pets: Pets, images: torch.Tensor, answers: rc.Defended
) -> None:
    clf, _, labels = pets
    assert (clf(images[2:]).argmax(1) != labels).all()
    assert answers.labels.tolist() == [*labels.tolist()] * 2
    assert answers.gated.tolist() == [False, False, True, True]
    assert answers.passes.tolist() == [4, 4, 8, 8], "plain, two probes, then the augmented view or five anchor views"
    assert answers.drift[2:].min() > answers.drift[:2].max()


def test_an_image_gets_the_same_answer_in_any_batch(pets: Pets, images: torch.Tensor, answers: rc.Defended) -> None:
    rows = [3, 0]
    again = GUARD(pets[0], images[rows], seed=SEED)
    assert torch.allclose(again.features, answers.features[rows], atol=1e-5)
    assert torch.equal(again.labels, answers.labels[rows])


def test_a_second_look_keeps_photos_and_restores_attacked_ones(pets: Pets, images: torch.Tensor) -> None:
    clf, _, labels = pets
    out = rc.SecondLook.for_encoder(clf.encoder)(clf, images, seed=SEED)
    assert out.gated.tolist() == [False, False, True, True]
    assert out.labels.tolist() == [*labels.tolist()] * 2
    copy = (1 + 11**2) / (1 + 14**2)
    assert out.passes.tolist() == pytest.approx([1 + 2 * copy] * 4)
