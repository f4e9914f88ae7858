"""The real photos and heads beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from react_clip import data

pytestmark = pytest.mark.shared

CLASSES = {"imagenet": 1000, "caltech101": 101, "oxford_pets": 37, "flowers102": 102, "food26": 26}
CLASSES |= {"cifar10": 10, "cifar100": 100, "stl10": 10, "eurosat": 10, "dtd10": 10}


@pytest.mark.parametrize("name", list(CLASSES))
def test_every_photo_has_the_class_of_its_folder(name: str, shared: Path) -> None:
    for split in ("test", "train"):
        dataset = data.load(name, root=shared / "data", split=split)
        assert len(set(dataset.labels)) == len(dataset.class_names) == CLASSES[name]
        assert all(photo.id.startswith(dataset.folders[photo.label]) for photo in dataset.photos)
        assert min(dataset.image(0).size) >= 32


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in {"food26", "flowers102"}])
def test_every_head_fits_its_set(name: str, shared: Path) -> None:
    dataset = data.load(name, root=shared / "data")
    head = data.load_head(shared / "heads" / f"{name}.npz")
    aligned, _ = dataset.align(head)
    assert aligned.class_names == head.names
    assert all(photo.id.startswith(f"{head.folders[photo.label]}/") for photo in aligned.photos)
    lost = 1 if name == "caltech101" else 0
    assert len({photo.label for photo in aligned.photos}) == CLASSES[name] - lost
    # Caltech101's head lacks a class; that of the ten DTD classes here has all 47.
    expected = {
        "caltech101": "dropped 5 photos of 1 classes the head lacks: Faces_easy",
        "dtd10": "37 of the head's 47 classes have no photo here",
    }
    assert expected.get(name, "") in ("", *aligned.notes)


@pytest.mark.parametrize(("head", "registered"), [("imagenet", "imagenet"), ("dtd10", "dtd")])
def test_heads_have_the_registrys_classes(head: str, registered: str, shared: Path) -> None:
    assert data.load_head(shared / "heads" / f"{head}.npz").folders == data.get(registered).folders
