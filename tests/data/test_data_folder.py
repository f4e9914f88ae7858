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


def test_the_folder_layout_keeps_the_sets_own_classes(pets: Path) -> None:
    dataset = data.load("oxford_pets", root=pets)
    assert len(dataset) == 12
    assert dataset.class_names == data.get("oxford_pets").class_names
    assert Counter(dataset.class_names[label] for label in dataset.labels) == {
        "pug": 6,
        "abyssinian": 4,
        "american bulldog": 2,
    }
    assert [photo.id for photo in dataset.photos] == sorted(photo.id for photo in dataset.photos)
    assert dataset.notes == ("12 photos here, 3,669 in the paper",)
    path = pets / "oxford_pets" / "test" / "Abyssinian" / "0.jpg"
    assert dataset.photos[0].source == path
    assert np.array_equal(np.asarray(dataset.image(0)), np.asarray(Image.open(path)))


def test_a_users_folder_is_one_class_per_sub_folder(pets: Path) -> None:
    photos = pets / "oxford_pets"
    dataset = data.load(f"folder:{photos}")
    assert dataset.folders == ("Abyssinian", "american_bulldog", "pug")
    assert dataset.class_names == ("Abyssinian", "american bulldog", "pug")
    assert dataset.templates == ("This is a photo of a {}.",)
    assert dataset.labels == [0] * 4 + [1] * 2 + [2] * 6
    direct = data.load(f"folder:{photos / 'test'}", split="train")
    assert direct.labels == dataset.labels


def test_any_directory_below_the_root_is_a_set(tmp_path: Path, save_photo) -> None:
    save_photo(tmp_path / "mine" / "val" / "n01440764" / "a.png", 1)
    save_photo(tmp_path / "mine" / "val" / "002.hot_dog" / "b.JPEG", 2)
    dataset = data.load("mine", root=tmp_path, split="val")
    assert dataset.class_names == ("hot dog", "tench")
    assert dataset.labels == [0, 1]


def test_folders_of_a_known_set_may_be_spelled_otherwise(tmp_path: Path, save_photo) -> None:
    save_photo(tmp_path / "flowers102" / "test" / "078.lotus lotus" / "a.jpg", 1)
    save_photo(tmp_path / "imagenetv2-matched-frequency-format-val" / "7" / "a.jpeg", 2)
    flowers = data.load("flowers102", root=tmp_path)
    assert flowers.class_names[flowers.labels[0]] == "lotus"
    assert data.load("imagenet_v2", root=tmp_path).labels == [7]


@pytest.mark.parametrize("directory", ["imagenet-a", "imagenet-r", "sketch", "imagenet/val"])
def test_official_archives_are_read_where_they_unpack(directory: str, tmp_path: Path, save_photo) -> None:
    name = {"sketch": "imagenet_sketch", "imagenet/val": "imagenet"}.get(directory, directory.replace("-", "_"))
    for photo in range(7):
        save_photo(tmp_path / directory / "n01498041" / f"{photo}.jpg", photo)
        save_photo(tmp_path / directory / "n01531178" / f"{photo % 3}.jpg", photo)
    spec = data.get(name)
    dataset = data.load(name, root=tmp_path)
    assert Counter(spec.folders[label] for label in dataset.labels) == {"n01498041": 5, "n01531178": 3}
    assert dataset.notes[0] == "took 5 photos per class, 8 of 10 (seed 0); 1 classes have fewer"


def test_caltech101s_background_is_left_out(tmp_path: Path, save_photo) -> None:
    for folder in ("BACKGROUND_Google", "Faces", "Faces_easy", "yin_yang"):
        save_photo(tmp_path / "caltech101" / "101_ObjectCategories" / folder / "image_0001.jpg", len(folder))
    dataset = data.load("caltech101", root=tmp_path)
    assert [dataset.folders[label] for label in dataset.labels] == ["Faces", "Faces_easy", "yin_yang"]
    assert "BACKGROUND_Google" in dataset.notes[0]


def test_hidden_and_other_files_are_no_photos(tmp_path: Path, save_photo) -> None:
    save_photo(tmp_path / "cat" / "a.png", 1)
    (tmp_path / "cat" / "._a.png").write_bytes(b"junk")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    (tmp_path / ".thumbnails").mkdir()
    (tmp_path / "dog").mkdir()
    dataset = data.load(f"folder:{tmp_path}")
    assert (len(dataset), dataset.folders) == (1, ("cat", "dog"))
    assert dataset.notes == ("1 class folders hold no photo",)


def test_a_limit_is_balanced_repeatable_and_nested(pets: Path) -> None:
    def chosen(limit: int, seed: int = 0) -> list[str]:
        return [photo.id for photo in data.load("oxford_pets", root=pets, limit=limit, seed=seed).photos]

    assert chosen(6) == chosen(6)
    assert Counter(name.split("/")[0] for name in chosen(6)) == {"pug": 2, "Abyssinian": 2, "american_bulldog": 2}
    assert Counter(name.split("/")[0] for name in chosen(9)) in (
        {"pug": 4, "Abyssinian": 3, "american_bulldog": 2},
        {"pug": 3, "Abyssinian": 4, "american_bulldog": 2},
    )
    assert len({name.split("/")[0] for name in chosen(3)}) == 3
    assert set(chosen(4)) < set(chosen(7))
    assert chosen(6) == sorted(chosen(6))
    assert len({tuple(chosen(2, seed)) for seed in range(8)}) > 1
    assert len(chosen(1000)) == 12


def test_a_subset_does_not_depend_on_the_root(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("moved")
    shutil.copytree(pets, elsewhere, dirs_exist_ok=True)
    moved = data.load("oxford_pets", root=elsewhere, limit=5)
    assert data.load("oxford_pets", root=pets, limit=5).fingerprint() == moved.fingerprint()


def test_the_fingerprint_changes_with_a_photo_a_name_or_a_label(pets: Path, save_photo) -> None:
    dataset = data.load("oxford_pets", root=pets)
    before = dataset.fingerprint()
    path = pets / "oxford_pets" / "test" / dataset.photos[3].id
    original = path.read_bytes()
    save_photo(path, 12345)
    assert dataset.fingerprint() != before
    path.write_bytes(original)
    assert dataset.fingerprint() == before
    path.rename(path.with_name("other.jpg"))
    assert data.load("oxford_pets", root=pets).fingerprint() != before
    path.with_name("other.jpg").rename(pets / "oxford_pets" / "test" / "pug" / path.name.replace("3", "9"))
    assert data.load("oxford_pets", root=pets).fingerprint() != before


def test_an_unreadable_photo_is_named(pets: Path) -> None:
    (pets / "oxford_pets" / "test" / "Abyssinian" / "0.jpg").write_bytes(b"no photo")
    dataset = data.load("oxford_pets", root=pets)
    with pytest.raises(ReactClipError, match=r"photo Abyssinian/0\.jpg: .*; replace it"):
        dataset.image(0)
    assert dataset.image(1).size == (8, 8)
    (pets / "oxford_pets" / "test" / "Abyssinian" / "0.jpg").unlink()
    with pytest.raises(ReactClipError, match=r"photo Abyssinian/0\.jpg"):
        dataset.image(0)
    with pytest.raises(ReactClipError, match=r"photo Abyssinian/0\.jpg cannot be read"):
        dataset.fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imagnet", {}, r"'imagnet' is not known, and here has no folder .*cifar10, .*folder:PATH"),
        ("", {}, "folder:"),
        ("../elsewhere", {}, "write folder:../elsewhere"),
        (".", {}, "write folder:."),
        ("folder:nowhere", {}, "nowhere is not a folder; give folder:PATH"),
        ("folder:here/mine", {}, r"no photo under here/mine \(0 class folders\)"),
        ("mine", {}, "here/mine has no test photos; put them in here/mine/test/<class>/"),
        ("hollow", {}, r"no photo under here/hollow/test \(1 class folders\)"),
        ("stl10", {}, r"1 folders in .* none of the 10 classes of stl10 \(goldfish\); rename them like 'airplane'"),
        ("dtd", {"split": "../train"}, r"split is '\.\./train'"),
        ("oxford_pets", {"split": "val"}, r"no official split 'val' \(it has test, train\)"),
        ("eurosat", {"split": "train"}, "no official split 'train'"),
        ("pets", {"limit": 0}, "limit is 0; the least is 1"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    name: str, options: dict[str, Any], message: str, tmp_path: Path, save_photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "hollow/test/cat"):
        Path("here", folder).mkdir(parents=True)
    save_photo(Path("here/stl10/test/goldfish/0.jpg"), 1)
    save_photo(Path("here/pets/test/pug/0.jpg"), 1)
    with pytest.raises(ReactClipError, match=message) as error:
        data.load(name, root=Path("here"), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", data.names())
def test_missing_data_gives_the_command_and_the_page(name: str, tmp_path: Path) -> None:
    with pytest.raises(ReactClipError) as error:
        data.load(name, root=tmp_path)
    assert f"{data.get(name).how_to_get(tmp_path)}" in str(error.value)
    assert list(tmp_path.iterdir()) == [], "a failed look-up must leave nothing behind"
