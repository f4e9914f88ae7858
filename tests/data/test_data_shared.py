"""The real photos and heads beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from react_clip import data

pytestmark = pytest.mark.shared

SIZES = {  # set: classes with photos, test, train
    "imagenet": (1000, 1000, 2000),
    "caltech101": (101, 505, 505),
    "oxford_pets": (37, 518, 370),
    "flowers102": (102, 510, 510),
    "food26": (26, 520, 260),
    "cifar10": (10, 500, 500),
    "cifar100": (100, 500, 1000),
    "stl10": (10, 300, 150),
    "eurosat": (10, 500, 500),
    "dtd10": (10, 400, 200),
}


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes_and_classes(name: str, shared: Path) -> None:
    classes, *sizes = SIZES[name]
    for split, size in zip(("test", "train"), sizes, strict=True):
        dataset = data.load(name, root=shared / "data", split=split)
        assert len(dataset) == size
        assert len(set(dataset.labels)) == len(dataset.class_names) == classes
        for index in (0, len(dataset) - 1):
            path = dataset.path(index)
            assert path is not None
            assert path.parent.name.startswith(dataset.folders[dataset.labels[index]])
            assert min(dataset.image(index).size) >= 32


@pytest.mark.parametrize("name", [name for name in SIZES if name not in {"food26", "flowers102"}])
def test_every_head_fits_its_set(name: str, shared: Path) -> None:
    dataset = data.load(name, root=shared / "data")
    head = data.load_head(shared / "heads" / f"{name}.npz")
    aligned, _ = dataset.align(head)
    assert aligned.class_names == head.names
    for index in range(0, len(aligned), 37):
        path = aligned.path(index)
        assert path is not None
        assert path.parent.name == head.folders[aligned.labels[index]]


def test_caltechs_head_lacks_a_class(shared: Path) -> None:
    dataset = data.load("caltech101", root=shared / "data")
    aligned, head = dataset.align(data.load_head(shared / "heads" / "caltech101.npz"))
    assert (len(aligned), len(head)) == (500, 100)
    assert "dropped 5 photos of 1 classes the head lacks: Faces_easy" in aligned.notes


def test_dtds_head_keeps_its_47_classes(shared: Path) -> None:
    aligned, head = data.load("dtd10", root=shared / "data").align(data.load_head(shared / "heads" / "dtd10.npz"))
    assert (len(aligned), len(aligned.class_names), len(head)) == (400, 47, 47)
    assert head.folders == data.get("dtd").folders
    assert "37 of the head's 47 classes have no photo here" in aligned.notes


def test_imagenets_names_are_those_of_its_head(shared: Path) -> None:
    head = data.load_head(shared / "heads" / "imagenet.npz")
    assert (head.folders, head.names) == (data.get("imagenet").folders, data.get("imagenet").class_names)
