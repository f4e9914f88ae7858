"""Class folders: the folder layout, folder:PATH, subsets, fingerprints, and what goes wrong."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from react_clip import data
from react_clip.errors import ReactClipError
from react_clip.preprocess import Preprocessing
from toys import install, save_photo


def test_a_known_set_keeps_its_own_classes(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    assert dataset.class_names == data.get("oxford_pets").class_names
    counts = Counter(dataset.class_names[label] for label in dataset.labels)
    assert counts == {"pug": 6, "abyssinian": 4, "american bulldog": 2}
    assert [photo.id for photo in dataset.photos] == sorted(photo.id for photo in dataset.photos)
    assert dataset.notes == ("12 photos here, 3,669 in the paper",)


def test_a_set_is_a_sequence_of_images_and_labels(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    image, label = dataset[0]
    assert np.array_equal(np.asarray(image), np.asarray(Image.open(pets / "oxford_pets/test/Abyssinian/0.jpg")))
    assert [label for _, label in dataset] == dataset.labels
    assert dataset[-1][1] == dataset.labels[-1] != label
    expected = "<oxford_pets test: 12 photos of 37 classes; 12 photos here, 3,669 in the paper>"
    assert repr(dataset) == str(dataset) == expected
    assert dataset.pixels(Preprocessing.paper(4)).shape == (12, 3, 4, 4)


def test_a_users_folder_is_one_class_per_sub_folder(pets: Path) -> None:
    folder = pets / "oxford_pets"
    (folder / "test" / "._hidden").mkdir()
    (folder / "test" / "pug" / "._0.jpg").write_bytes(b"junk")
    (folder / "test" / "pug" / "notes.txt").write_text("x")
    dataset = data.load(f"folder:{folder}")
    assert dataset.folders == ("Abyssinian", "american_bulldog", "pug")
    assert dataset.class_names == ("Abyssinian", "american bulldog", "pug")
    assert dataset.templates == ("This is a photo of a {}.",)
    assert dataset.labels == [0] * 4 + [1] * 2 + [2] * 6
    assert data.load(f"folder:{folder / 'test'}", split="train").labels == dataset.labels
    save_photo(pets / "mine" / "val" / "n01440764" / "a.png", 1)
    save_photo(pets / "mine" / "val" / "002.hot_dog" / "b.JPEG", 2)
    assert data.load("mine", root=pets, split="val").class_names == ("hot dog", "tench")


def test_folders_of_a_known_set_may_be_spelled_otherwise(tmp_path: Path) -> None:
    save_photo(tmp_path / "flowers102" / "test" / "078.lotus lotus" / "a.jpg", 1)
    save_photo(tmp_path / "imagenetv2-matched-frequency-format-val" / "7" / "a.jpeg", 2)
    for folder in ("BACKGROUND_Google", "Faces", "yin_yang"):
        save_photo(tmp_path / "caltech101" / "101_ObjectCategories" / folder / "image_0001.jpg", len(folder))
    flowers, faces = (data.load(name, root=tmp_path) for name in ("flowers102", "caltech101"))
    assert flowers.class_names[flowers.labels[0]] == "lotus"
    assert data.load("imagenet_v2", root=tmp_path).labels == [7]
    assert [faces.folders[label] for label in faces.labels] == ["Faces", "yin_yang"]


def test_an_official_archive_is_read_where_it_unpacks_and_cut_as_in_the_paper(tmp_path: Path) -> None:
    for photo in range(7):
        save_photo(tmp_path / "imagenet-a" / "n01498041" / f"{photo}.jpg", photo)
        save_photo(tmp_path / "imagenet-a" / "n01531178" / f"{photo % 3}.jpg", photo)
    dataset = data.load("imagenet_a", root=tmp_path)
    folders = [data.get("imagenet_a").folders[label] for label in dataset.labels]
    assert Counter(folders) == {"n01498041": 5, "n01531178": 3}
    assert dataset.notes[0] == "took 5 photos per class, 8 of 10 (seed 0); 1 classes have fewer"


def test_a_limit_is_balanced_repeatable_and_nested(pets: Path) -> None:
    def chosen(limit: int, seed: int = 0) -> list[str]:
        return [photo.id for photo in data.load("oxford_pets", root=pets, limit=limit, seed=seed).photos]

    assert chosen(6) == chosen(6) == sorted(chosen(6))
    assert Counter(name.split("/")[0] for name in chosen(6)) == {"pug": 2, "Abyssinian": 2, "american_bulldog": 2}
    assert sorted(Counter(name.split("/")[0] for name in chosen(9)).values()) == [2, 3, 4]
    assert len({name.split("/")[0] for name in chosen(3)}) == 3
    assert set(chosen(4)) < set(chosen(7))
    assert len({tuple(chosen(2, seed)) for seed in range(8)}) > 1
    assert len(chosen(1000)) == 12


def test_the_fingerprint_follows_the_content_and_not_the_root(pets: Path, tmp_path: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    before = dataset.fingerprint()
    moved = shutil.copytree(pets / "oxford_pets", tmp_path / "moved" / "oxford_pets")
    assert data.load("oxford_pets", root=moved.parent, limit=5).fingerprint() == dataset.take(5).fingerprint()
    path = pets / "oxford_pets" / "test" / dataset.photos[3].id
    original = path.read_bytes()
    save_photo(path, 12345)
    assert dataset.fingerprint() != before
    path.write_bytes(original)
    assert dataset.fingerprint() == before
    for place in (path.with_name("other.jpg"), path.parent.with_name("pug") / "9.jpg"):  # another name, another label
        path = path.rename(place)
        assert data.load("oxford_pets", root=pets).fingerprint() != before


def test_an_unreadable_photo_is_named(pets: Path) -> None:
    path = pets / "oxford_pets" / "test" / "Abyssinian" / "0.jpg"
    path.write_bytes(b"no photo")
    dataset = data.load("oxford_pets", root=pets)
    with pytest.raises(ReactClipError, match=r"photo Abyssinian/0\.jpg: .*; replace it"):
        dataset[0]
    assert dataset[1][0].size == (44, 36)
    path.unlink()
    with pytest.raises(ReactClipError, match=r"photo Abyssinian/0\.jpg cannot be read"):
        dataset.fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imagnet", {}, r"'imagnet' is not known, and here/imagnet has no test photos; .*folder:PATH or .*cifar10"),
        ("mine", {}, "here/mine has no test photos; put them in here/mine/test/<class>/"),
        ("hollow", {}, r"no photo under here/hollow/test \(1 class folders\)"),
        ("stl10", {}, r"goldfish/0\.jpg of stl10 has the label 'goldfish', none of 10 classes"),
        ("dtd", {"split": "../train"}, r"split is '\.\./train'"),
        ("oxford_pets", {"split": "val"}, r"has the splits test, train; put 'val' in here/oxford_pets/val"),
        ("pets", {"limit": 0}, "limit is 0; the least is 1"),
        ("nothing_here:load", {}, "'nothing_here:load' cannot be imported: No module named 'nothing_here'"),
        ("shutil:which", {}, "'shutil:which' returned a NoneType; it must be an ImageDataset"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    name: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "hollow/test/cat"):
        Path("here", folder).mkdir(parents=True)
    save_photo(Path("here/stl10/test/goldfish/0.jpg"), 1)
    save_photo(Path("here/pets/test/pug/0.jpg"), 1)
    with pytest.raises(ReactClipError, match=message):
        data.load(name, root=Path("here"), **options)


@pytest.mark.parametrize("name", data.names())
def test_missing_data_gives_the_command_and_the_page(name: str, tmp_path: Path) -> None:
    with pytest.raises(ReactClipError) as error:
        data.load(name, root=tmp_path)
    assert f"{data.get(name).how_to_get(tmp_path)}" in str(error.value)
    assert list(tmp_path.iterdir()) == [], "a failed look-up must leave nothing behind"


OUTSIDE = """
from react_clip.data import ImageDataset, Photo

def load(root, split):
    photos = [Photo(path.name, int(path.stem) % 2, path) for path in sorted((root / split).glob("*.png"))]
    return ImageDataset("pairs", split, ("even", "odd"), tuple(photos))
"""


def test_a_set_from_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that lists photos, named by an entry point or by ``module:function``."""
    (package := tmp_path / "package").mkdir()
    install(package, "pairs_of_mine", OUTSIDE, "[react_clip.datasets]\npairs = pairs_of_mine:load\n")
    monkeypatch.syspath_prepend(package)
    for number in range(4):
        save_photo(tmp_path / "test" / f"{number}.png", number)
    for name in ("pairs", "pairs_of_mine:load"):
        dataset = data.load(name, root=tmp_path)
        assert (dataset.labels, dataset.folders) == ([0, 1, 0, 1], ("even", "odd"))
    assert len(data.load("pairs", root=tmp_path, limit=2)) == 2
