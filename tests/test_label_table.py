"""The label bank: the contents of the file, matching of labels, and labels of real photos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from react_clip.bank import BANK_FILE, TENSOR, LabelBank, match_key
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.preprocess import as_pixels


@pytest.fixture(scope="module")
def bank() -> LabelBank:
    return LabelBank.load()


def test_file_is_small_and_says_what_it_holds():
    assert BANK_FILE.stat().st_size < 3_000_000
    with safe_open(BANK_FILE, framework="pt") as stored:
        features = stored.get_tensor(TENSOR)
        said = {key: json.loads(text) for key, text in stored.metadata().items()}
    assert set(said) == {"encoder", "names", "groups", "vocabulary", "photos", "sets", "preprocessing"}
    assert said["encoder"] == "clip-vit-b-16"
    assert len(said["photos"]) == len(said["names"])
    assert min(said["photos"]) >= 1
    assert features.dtype == torch.float16
    assert bool(torch.isfinite(features).all())
    assert features.shape == (len(said["names"]), 512)


def test_names_are_unique_and_lower_case_and_have_features(bank: LabelBank):
    labels = {*bank.names, *bank.groups}
    assert {member for members in (*bank.groups.values(), *bank.sets.values()) for member in members} <= {*bank.names}
    assert len(set(bank.names)) == len(bank.names) >= 1200
    assert len({match_key(label) for label in labels}) == len(labels)
    for label in labels:
        assert label == label.lower().strip()
        assert "_" not in label
        assert not label[0].isdigit()


def test_all_imagenet_classes_are_in_the_bank(bank: LabelBank):
    imagenet = bank.sets["imagenet"]
    assert len(set(imagenet)) == 1000
    assert imagenet[0] == "tench"
    assert imagenet[-1] == "toilet paper"
    assert {"crane bird", "construction crane", "cardigan", "cardigan corgi", "computer mouse"} <= set(imagenet)


def test_vocabulary_is_imagenet_and_more_without_generic_names(bank: LabelBank):
    vocabulary = bank.vocabulary()
    assert len(set(vocabulary)) == len(vocabulary)
    assert set(bank.sets["imagenet"]) <= set(vocabulary) <= set(bank.names)
    # A name that means a group would score with the group's feature, not with its own.
    assert not set(vocabulary) & set(bank.groups)


def test_features_are_unit_fp32_and_fresh(bank: LabelBank):
    features = bank.features(bank.vocabulary())
    assert features.dtype == torch.float32
    assert features.shape == (len(bank.vocabulary()), 512)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(len(features)))
    features.zero_()
    assert bank.features(["tench"]).norm() > 0.9


def test_common_words_are_labels(bank: LabelBank):
    wanted = """
        cat dog bird fish snake lizard frog turtle spider insect butterfly bear wolf fox monkey ape horse cow sheep
        elephant rabbit rodent whale shark car truck bus train boat ship airplane bicycle motorcycle chair table sofa
        bed lamp clock phone computer keyboard camera bottle cup mug bowl plate teapot knife bag hat shoe shirt dress
        coat ball guitar piano drum instrument weapon tool building house church bridge tower castle temple tree flower
        fruit vegetable mushroom bread cake pizza coffee food drink mountain beach lake spacecraft rocket person
    """
    for label in wanted.split():
        assert bank.resolve(label) == label
    assert len(bank.groups) >= 80


def test_group_feature_is_the_unit_mean_of_its_members(bank: LabelBank):
    members = bank.features(["acoustic guitar", "electric guitar"])
    expected = torch.nn.functional.normalize(members.mean(0), dim=0)
    torch.testing.assert_close(bank.features(["guitar"])[0], expected)


def test_photos_of_the_word_itself_weigh_as_much_as_its_group(bank: LabelBank):
    assert "apple" in bank.groups["apple"]
    apple, both = bank._matrix[bank.names.index("apple")], bank.features(["apple"])[0]
    granny = bank.features(["granny smith apple"])[0]
    group = torch.nn.functional.normalize(apple + granny, dim=0)
    torch.testing.assert_close(both, torch.nn.functional.normalize(apple + group, dim=0))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cats", "cat"),
        ("CAT", "cat"),
        ("Golden Retriever", "golden retriever"),
        ("golden_retriever", "golden retriever"),
        ("goldenretrievers", "golden retriever"),
        ("T Shirt", "t-shirt"),
        ("butterflies", "butterfly"),
        ("wolves", "wolf"),
        ("knives", "knife"),
        ("buses", "bus"),
        ("bus", "bus"),
        ("jean", "jeans"),
        ("jack o lantern", "jack-o'-lantern"),
        ("sunglasses", "sunglasses"),
    ],
)
def test_spelling_does_not_matter(bank: LabelBank, typed: str, meant: str):
    assert bank.resolve(typed) == meant


def test_every_label_means_itself(bank: LabelBank):
    for label in (*bank.names, *bank.groups):
        assert bank.resolve(label) == label


@pytest.mark.parametrize("label", ["elefant", "zzzzqqq", "", "---", "x" * 5000])
def test_unknown_label_is_one_line_with_the_way_out(bank: LabelBank, label: str):
    with pytest.raises(ReactClipError) as caught:
        bank.features(["cat", label])
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 400
    assert "text tower" in said
    assert "from_folder" in said
    if label == "elefant":
        assert "'elefant'" in said
        assert "elephant" in said


@pytest.mark.parametrize("labels", [[], "cat"])
def test_labels_must_be_a_list(bank: LabelBank, labels: list[str] | str):
    with pytest.raises(ReactClipError, match="give a list"):
        bank.features(labels)


def test_damaged_files_say_so_in_one_line(tmp_path: Path):
    whole = BANK_FILE.read_bytes()
    cut, noise, empty = tmp_path / "cut", tmp_path / "noise", tmp_path / "empty"
    cut.write_bytes(whole[: len(whole) // 2])
    noise.write_bytes(b"\x80\x04not a bank")
    empty.write_bytes(b"")
    for file in (cut, noise, empty):
        with pytest.raises(ReactClipError, match="is damaged") as caught:
            LabelBank.load(file)
        assert "\n" not in str(caught.value)
    with pytest.raises(ReactClipError, match="is missing"):
        LabelBank.load(tmp_path / "nowhere")


@pytest.mark.tower
@pytest.mark.shared
def test_cats_and_dogs_are_told_apart(bank: LabelBank, tower: Encoder, shared: Path):
    # Oxford Pets spells cat breeds with a capital letter and dog breeds without.
    breeds = sorted((shared / "data" / "oxford_pets" / "test").iterdir())
    chosen = [b for b in breeds if b.name[0].isupper()] + [b for b in breeds if b.name[0].islower()][:12]
    photos = [sorted(breed.iterdir())[0] for breed in chosen]
    assert len(photos) == 24
    assert tower.name == bank.encoder
    with torch.no_grad():
        found = (tower(as_pixels(photos, tower.image_size)) @ bank.features(["cat", "dog"]).T).argmax(1)
    right = [(choice == 0) == breed.name[0].isupper() for choice, breed in zip(found.tolist(), chosen, strict=True)]
    assert sum(right) / len(right) >= 0.9


@pytest.mark.parametrize(("label", "near"), [("cta", "cat"), ("Katze", ""), ("skyscrap", "skyscraper")])
def test_an_unknown_label_names_neighbours_and_the_option_for_photos(label: str, near: str) -> None:
    with pytest.raises(ReactClipError, match=rf"no '{label}' \(near: .*{near}.*\); .*--photos"):
        LabelBank.load().resolve(label)
