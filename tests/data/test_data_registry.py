"""The registry against the paper's data-set table and the protocol's names and prompts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from react_clip import data
from react_clip.data.registry import ClassIndex
from react_clip.errors import ReactClipError
from react_clip.label_table import match_key


def test_the_registry_has_the_papers_number_of_photos() -> None:
    assert len(data.names()) == 17
    totals: Counter[str] = Counter()
    for spec in map(data.get, data.names()):
        totals[spec.group] += spec.test_images
    assert totals == {"downstream": 142_606, "imagenet": 17_000}


@pytest.mark.parametrize("name", data.names())
def test_each_set_lists_its_classes_once(name: str) -> None:
    spec = data.get(name)
    assert len(spec.class_names) == len(spec.folders) == spec.classes
    assert len(set(map(match_key, spec.folders))) == spec.classes, "two folders would be taken for one class"
    assert all(label == label.strip() and label for label in spec.class_names)
    index = ClassIndex(spec.folders, spec.class_names)
    assert [index.find(folder) for folder in spec.folders] == list(range(spec.classes))
    assert [template.count("{}") for template in spec.templates] == [1]
    assert re.fullmatch(r"run: .*here.* \(about the set: https://.*\)", spec.how_to_get(Path("here")))


@pytest.mark.parametrize(
    ("name", "folder", "label"),
    [
        ("caltech101", "Faces_easy", "person"),
        ("fgvc_aircraft", "737-700", "Boeing 737-700"),
        ("eurosat", "SeaLake", "a sea or a lake"),
        ("caltech256", "145.motorbikes-101", "motorbikes"),
        ("imagenet", "n02012849", "crane bird"),
    ],
)
def test_names_follow_the_protocol(name: str, folder: str, label: str) -> None:
    spec = data.get(name)
    assert spec.class_names[spec.folders.index(folder)] == label


def test_imagenets_names_are_unique_and_its_variants_share_them() -> None:
    imagenet = dict(zip(data.get("imagenet").folders, data.get("imagenet").class_names, strict=True))
    assert len({name.lower() for name in imagenet.values()}) == 1000, "no two classes may tie"
    for name in ("imagenet_a", "imagenet_r", "imagenet_v2", "imagenet_sketch"):
        variant = data.get(name)
        assert [imagenet[folder] for folder in variant.folders] == list(variant.class_names)
        assert list(variant.folders) == sorted(variant.folders)


def test_an_unknown_set_lists_what_exists() -> None:
    with pytest.raises(ReactClipError, match=r"'mnist' is not known; it is one of cifar10, .*imagenet_sketch"):
        data.get("mnist")


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REACT_CLIP_DATA", str(tmp_path))
    assert data.default_root() == tmp_path
