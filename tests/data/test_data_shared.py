"""The real photos and class features beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from react_clip import data

CLASSES = {"imagenet": 1000, "caltech101": 101, "oxford_pets": 37, "flowers102": 102, "food26": 26}
CLASSES |= {"cifar10": 10, "cifar100": 100, "stl10": 10, "eurosat": 10, "dtd10": 10}
NOTES = {
    "caltech101": "dropped 5 photos of 1 classes without features: Faces_easy",
    "dtd10": "37 of the 47 classes with features have no photo here",
}


@pytest.mark.parametrize("name", list(CLASSES))
def test_every_photo_has_the_class_of_its_folder(name: str, shared: Path) -> None:
    for split in ("test", "train"):
        dataset = data.load(name, root=shared / "data", split=split)
        assert len(set(dataset.labels)) == len(dataset.class_names) == CLASSES[name]
        assert all(photo.id.startswith(dataset.folders[photo.label]) for photo in dataset.photos)
        assert min(dataset[0][0].size) >= 32
    if name in ("food26", "flowers102"):
        return
    aligned = data.load(name, root=shared / "data").align(
        data.load_class_features(shared / "heads" / f"{name}.npz")  # class features of this set
    )
    assert all(photo.id.startswith(f"{aligned.folders[photo.label]}/") for photo in aligned.photos)
    assert len({photo.label for photo in aligned.photos}) == CLASSES[name] - (name == "caltech101")
    assert NOTES.get(name, "") in ("", *aligned.notes)
    registered = {"imagenet": "imagenet", "dtd10": "dtd"}.get(name)
    assert registered is None or aligned.folders == data.get(registered).folders
