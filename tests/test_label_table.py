"""The label table: the contents of the file, matching of labels, and labels of real photos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from react_clip.errors import ReactClipError
from react_clip.label_table import TABLE_FILE, TENSOR, LabelTable, match_key


@pytest.fixture(scope="module")
def table() -> LabelTable:
    return LabelTable.load()


def test_the_file_is_small_and_its_names_are_unique_and_mean_themselves(table: LabelTable) -> None:
    assert TABLE_FILE.stat().st_size < 3_000_000
    with safe_open(TABLE_FILE, framework="pt") as stored:
        features = stored.get_tensor(TENSOR)
    assert features.dtype == torch.float16
    assert bool(torch.isfinite(features).all())
    assert features.shape == (len(table.names), 512)
    labels = {*table.names, *table.groups}
    members = {member for each in (*table.groups.values(), *table.sets.values()) for member in each}
    assert members <= {*table.names}
    assert len(set(table.names)) == len(table.names) >= 1200
    assert len({match_key(label) for label in labels}) == len(labels)
    for label in labels:
        assert label == label.lower().strip()
        assert "_" not in label
        assert not label[0].isdigit()
        assert table.resolve(label) == label


def test_the_vocabulary_is_imagenet_and_more_without_generic_names(table: LabelTable) -> None:
    imagenet, vocabulary = table.sets["imagenet"], table.vocabulary()
    assert len(set(imagenet)) == 1000
    assert (imagenet[0], imagenet[-1]) == ("tench", "toilet paper")
    assert {"crane bird", "construction crane", "cardigan", "cardigan corgi", "computer mouse"} <= set(imagenet)
    assert len(set(vocabulary)) == len(vocabulary)
    assert set(imagenet) <= set(vocabulary) <= set(table.names)
    # A name that means a group would score with the group's feature, not with its own.
    assert not set(vocabulary) & set(table.groups)


def test_common_words_are_labels(table: LabelTable) -> None:
    wanted = """
        cat dog bird fish snake lizard frog turtle spider insect butterfly bear wolf fox monkey ape horse cow sheep
        elephant rabbit rodent whale shark car truck bus train boat ship airplane bicycle motorcycle chair table sofa
        bed lamp clock phone computer keyboard camera bottle cup mug bowl plate teapot knife bag hat shoe shirt dress
        coat ball guitar piano drum instrument weapon tool building house church bridge tower castle temple tree flower
        fruit vegetable mushroom bread cake pizza coffee food drink mountain beach lake spacecraft rocket person
    """
    assert [table.resolve(label) for label in wanted.split()] == wanted.split()


def test_a_group_is_the_mean_of_its_members_and_photos_of_the_word_itself_weigh_as_much(table: LabelTable) -> None:
    unit = torch.nn.functional.normalize
    guitars = table.features(["acoustic guitar", "electric guitar"])
    torch.testing.assert_close(table.features(["guitar"])[0], unit(guitars.mean(0), dim=0))
    assert guitars.dtype == torch.float32
    torch.testing.assert_close(guitars.norm(dim=1), torch.ones(2))
    apple, granny = table._matrix[table.names.index("apple")], table.features(["granny smith apple"])[0]
    both = unit(apple + unit(apple + granny, dim=0), dim=0)
    torch.testing.assert_close(table.features(["apple"])[0], both)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("golden_Retriever", "golden retriever"),
        ("T Shirt", "t-shirt"),
        ("butterflies", "butterfly"),
        ("knives", "knife"),
        ("buses", "bus"),
        ("jean", "jeans"),
        ("jack o lantern", "jack-o'-lantern"),
    ],
)
def test_spelling_does_not_matter(table: LabelTable, typed: str, meant: str) -> None:
    assert table.resolve(typed) == meant


@pytest.mark.parametrize(
    ("label", "near"),
    [("elefant", "elephant"), ("cta", "cat"), ("skyscrap", "skyscraper"), ("Katze", ""), ("", ""), ("x" * 5000, "")],
)
def test_an_unknown_label_is_one_line_with_its_neighbours_and_the_way_out(
    table: LabelTable, label: str, near: str
) -> None:
    with pytest.raises(ReactClipError, match=f"{near}.*--photos; .*from_folder.*text tower") as caught:
        table.features(["cat", label])
    assert len(str(caught.value)) < 400


def test_damaged_files_and_empty_lists_are_one_line(tmp_path: Path, table: LabelTable) -> None:
    whole = TABLE_FILE.read_bytes()
    for content in (whole[: len(whole) // 2], b"\x80\x04not a table", b""):
        (file := tmp_path / f"{len(content)}").write_bytes(content)
        with pytest.raises(ReactClipError, match="is damaged"):
            LabelTable.load(file)
    with pytest.raises(ReactClipError, match="is missing"):
        LabelTable.load(tmp_path / "nowhere")
    for labels in ([], "cat"):
        with pytest.raises(ReactClipError, match="give a list"):
            table.features(labels)
