"""Class features from disk, photos aligned to them, and the real ones beside the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from react_clip import data
from react_clip.data import ClassFeatures
from react_clip.errors import ReactClipError


def features_of(*names: str, folders: tuple[str, ...] = ()) -> ClassFeatures:
    return ClassFeatures(names, folders or names, torch.eye(len(names), 16))


def test_folders_default_to_the_names(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 4))
    np.savez(tmp_path / "a.npz", names=["a cat", "a dog"], folders=["cat", "dog"], features=values)
    loaded = data.load_class_features(tmp_path / "a.npz")
    assert (loaded.names, loaded.folders) == (("a cat", "a dog"), ("cat", "dog"))
    assert torch.equal(loaded.features, torch.tensor(values, dtype=torch.float32))
    np.savez(tmp_path / "a.npz", names=["cat", "dog"], features=np.eye(2))
    assert data.load_class_features(str(tmp_path / "a.npz")).folders == ("cat", "dog")


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"names": ["cat"]}, "features"),
        ({"names": ["cat"], "features": np.eye(2)}, r"1 names need as many rows, not shape \(2, 2\)"),
        ({"names": ["cat", "dog"], "features": np.ones(2)}, r"shape \(2,\)"),
        ({"names": np.array(["cat", None], dtype=object), "features": np.eye(2)}, "allow_pickle"),
        (b"PK\x03\x04 broken", ""),
    ],
)
def test_a_bad_file_is_explained(arrays: dict[str, object] | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(arrays) if isinstance(arrays, bytes) else np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(ReactClipError, match=rf"a\.npz holds no class features \(.*{complaint}.*\); write"):
        data.load_class_features(path)
    with pytest.raises(ReactClipError, match=r"no class features at .*none\.npz"):
        data.load_class_features(tmp_path / "none.npz")


def test_classes_are_found_by_folder_whatever_the_names(tmp_path: Path) -> None:
    old = {"n02012849": "crane", "n03126707": "crane", "n02113186": "Cardigan", "n02963159": "cardigan"}
    for folder in old:
        (tmp_path / "imagenet" / "test" / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "imagenet" / "test" / folder / "a.png")
    dataset = data.load("imagenet", root=tmp_path)
    used = [dataset.class_names[label] for label in dataset.labels]
    assert used == ["crane bird", "Cardigan Welsh corgi", "cardigan", "crane machine"]
    aligned = dataset.align(features_of(*old.values(), folders=tuple(old)))
    assert aligned.class_names == tuple(old.values()), "the names that the features were made from"
    assert [aligned.folders[label] for label in aligned.labels] == [p.id.split("/")[0] for p in dataset.photos]
    # Without folders only the one class whose name is still the same can be found; the others are not guessed.
    with pytest.raises(ReactClipError, match="know 1 of 4 classes"):
        dataset.align(features_of("crane", "a crane", "Lhasa", "Cardigan"))


def test_align_takes_the_order_of_the_features_and_drops_other_photos(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    aligned = dataset.align(features_of("goldfish", "a pug", "an Abyssinian", folders=("gold", "pug", "Abyssinian")))
    assert aligned.class_names == ("goldfish", "a pug", "an Abyssinian")
    assert aligned.labels == [2] * 4 + [1] * 6
    assert aligned.notes[-2:] == (
        "dropped 2 photos of 1 classes without features: american_bulldog",
        "1 of the 3 classes with features have no photo here",
    )
    assert aligned.fingerprint() != dataset.fingerprint()
    assert len(dataset) == 12, "the original is untouched"


def test_align_falls_back_to_names_that_are_unique(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    twice = features_of("Pug", "pug", "Abyssinian", "American Bulldog", folders=("c0", "c1", "c2", "c3"))
    assert set(dataset.align(twice).labels) == {2, 3}
    with pytest.raises(ReactClipError, match=r"know 1 of 3 classes of oxford_pets; give its own"):
        dataset.align(features_of("pug", "goldfish"))


# ---------------------------------------------------------------------- the real photos and class features

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
