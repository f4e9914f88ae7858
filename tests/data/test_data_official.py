"""Official releases, in miniature: each test writes the files a torchvision class expects and lets it read them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from react_clip import data
from react_clip.data.dataset import ImageDataset
from react_clip.errors import ReactClipError
from toys import save_photo

torchvision_datasets = pytest.importorskip("torchvision.datasets", reason="needs torchvision: react-clip[data]")


def class_names_of(dataset: ImageDataset) -> list[str]:
    return [dataset.class_names[label] for label in dataset.labels]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_dtd_reads_partition_one(tmp_path: Path) -> None:
    base = tmp_path / "dtd" / "dtd"
    for number, photo in enumerate(["zigzagged/z.jpg", "banded/b.jpg", "banded/c.jpg"]):
        save_photo(base / "images" / photo, number)
    write(base / "labels" / "test1.txt", "zigzagged/z.jpg\nbanded/b.jpg\n")
    write(base / "labels" / "test2.txt", "banded/c.jpg\n")
    write(base / "labels" / "val1.txt", "banded/c.jpg\n")
    dataset = data.load("dtd", root=tmp_path)
    assert class_names_of(dataset) == ["zigzagged", "banded"]
    assert dataset.labels == [46, 0], "torchvision numbers only the classes it meets"
    assert dataset.photos[1].id == "dtd/dtd/images/banded/b.jpg"
    assert class_names_of(data.load("dtd", root=tmp_path, split="val")) == ["banded"]


def test_oxford_pets(tmp_path: Path) -> None:
    base = tmp_path / "oxford-iiit-pet"
    lines = {"Abyssinian_201": 1, "great_pyrenees_9": 16, "american_bulldog_100": 2}
    for number, photo in enumerate(lines):
        save_photo(base / "images" / f"{photo}.jpg", number)
    write(base / "annotations" / "test.txt", "".join(f"{photo} {label} 1 1\n" for photo, label in lines.items()))
    write(base / "annotations" / "trainval.txt", "Abyssinian_201 1 1 1\n")
    with pytest.raises(ReactClipError, match="none of 37 classes"):
        data.load("oxford_pets", root=tmp_path)  # torchvision lists three classes, so label 16 is out of reach
    lines["great_pyrenees_9"] = 3
    write(base / "annotations" / "test.txt", "".join(f"{photo} {label} 1 1\n" for photo, label in lines.items()))
    dataset = data.load("oxford_pets", root=tmp_path)
    assert class_names_of(dataset) == ["abyssinian", "great pyrenees", "american bulldog"]
    assert dataset.photos[1].open().size == (44, 36)
    assert class_names_of(data.load("oxford_pets", root=tmp_path, split="train")) == ["abyssinian"]


def test_cifar10_keeps_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the MD5 of its files, which are others here."""
    monkeypatch.setattr(torchvision_datasets.cifar, "check_integrity", lambda *_: True)
    cifar, rows = torchvision_datasets.CIFAR10, np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    base = tmp_path / cifar.base_folder
    base.mkdir()
    for name, _ in cifar.train_list + cifar.test_list:
        (base / name).write_bytes(pickle.dumps({"data": rows, "labels": [6, 0, 9]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": list(data.get("cifar10").folders)}))
    dataset = data.load("cifar10", root=tmp_path)
    assert class_names_of(dataset) == ["frog", "airplane", "truck"]
    assert np.array_equal(np.asarray(dataset[0][0]), rows[0].reshape(3, 32, 32).transpose(1, 2, 0))
    assert dataset.fingerprint() != dataset.take(1).fingerprint()
    assert len(data.load("cifar10", root=tmp_path, split="train", limit=4)) == 4
