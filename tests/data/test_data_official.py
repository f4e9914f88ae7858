"""Official releases, in miniature: each test writes the files a torchvision class expects and lets it read them."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest

from react_clip import data
from react_clip.data.dataset import ImageDataset
from react_clip.errors import ReactClipError

torchvision_datasets = pytest.importorskip("torchvision.datasets", reason="needs torchvision: react-clip[data]")


def class_names_of(dataset: ImageDataset) -> list[str]:
    return [dataset.class_names[label] for label in dataset.labels]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_dtd_reads_partition_one(tmp_path: Path, save_photo) -> None:
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


def test_oxford_pets(tmp_path: Path, save_photo) -> None:
    base = tmp_path / "oxford-iiit-pet"
    lines = {"Abyssinian_201": 1, "great_pyrenees_9": 16, "american_bulldog_100": 2}
    for number, photo in enumerate(lines):
        save_photo(base / "images" / f"{photo}.jpg", number)
    write(base / "annotations" / "test.txt", "".join(f"{photo} {label} 1 1\n" for photo, label in lines.items()))
    write(base / "annotations" / "trainval.txt", "Abyssinian_201 1 1 1\n")
    with pytest.raises(ReactClipError, match="none of its 37 classes"):
        data.load("oxford_pets", root=tmp_path)  # torchvision lists three classes, so label 16 is out of reach
    lines["great_pyrenees_9"] = 3
    write(base / "annotations" / "test.txt", "".join(f"{photo} {label} 1 1\n" for photo, label in lines.items()))
    dataset = data.load("oxford_pets", root=tmp_path)
    assert class_names_of(dataset) == ["abyssinian", "great pyrenees", "american bulldog"]
    assert dataset.photos[1].open().size == (8, 8)
    assert class_names_of(data.load("oxford_pets", root=tmp_path, split="train")) == ["abyssinian"]


def test_stanford_cars(tmp_path: Path, save_photo) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    base = tmp_path / "stanford_cars"
    for number in (1, 2):
        save_photo(base / "cars_test" / f"{number:05d}.jpg", number)
    (base / "devkit").mkdir()
    names = np.array(data.get("stanford_cars").folders, dtype=object)
    scipy_io.savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    annotations = np.zeros(2, dtype=[("class", object), ("fname", object)])
    annotations["class"] = [196, 1]
    annotations["fname"] = ["00001.jpg", "00002.jpg"]
    scipy_io.savemat(base / "cars_test_annos_withlabels.mat", {"annotations": annotations})
    assert class_names_of(data.load("stanford_cars", root=tmp_path)) == [
        "smart fortwo Convertible",
        "AM General Hummer SUV",
    ]
    # A copy that is there is read even where a download was allowed (the network is shut in these tests).
    assert len(data.load("stanford_cars", root=tmp_path, download=True)) == 2


def test_a_download_is_torchvisions(tmp_path: Path, save_photo, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: object) -> None:
        save_photo(tmp_path / "new" / "eurosat" / "2750" / "River" / "River_1.jpg", 1)

    monkeypatch.setattr(torchvision_datasets.EuroSAT, "download", download)
    assert class_names_of(data.load("eurosat", root=tmp_path / "new", download=True)) == ["a river"]


def test_a_failed_download_gives_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision_datasets.DTD, "_download", download)
    with pytest.raises(
        ReactClipError, match=r"dtd cannot be read from .*no route to host.*https://www.robots.ox.ac.uk"
    ):
        data.load("dtd", root=tmp_path, download=True)


def test_stl10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stl10 = torchvision_datasets.STL10
    base = tmp_path / "stl10_binary"
    base.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 96), dtype=np.uint8)
    files = {"train_X.bin": pixels, "train_y.bin": np.array([1, 2], np.uint8), "unlabeled_X.bin": pixels}
    files |= {"test_X.bin": pixels, "test_y.bin": np.array([10, 3], np.uint8)}
    for name, content in files.items():
        (base / name).write_bytes(content.tobytes())
    write(base / "class_names.txt", "\n".join(data.get("stl10").folders) + "\n")
    for part in ("train_list", "test_list"):
        sums = [[name, hashlib.md5((base / name).read_bytes()).hexdigest()] for name, _ in getattr(stl10, part)]
        monkeypatch.setattr(stl10, part, sums)
    dataset = data.load("stl10", root=tmp_path)
    assert class_names_of(dataset) == ["truck", "car"]
    # The file stores columns before rows.
    assert np.array_equal(np.asarray(dataset.photos[1].open()), pixels[1].transpose(2, 1, 0))
    assert dataset.fingerprint() != data.load("stl10", root=tmp_path, split="train").fingerprint()


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar = torchvision_datasets.CIFAR10
    base = tmp_path / cifar.base_folder
    base.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    names = [name for name, _ in cifar.train_list + cifar.test_list]
    for name in names:
        (base / name).write_bytes(pickle.dumps({"data": pixels, "labels": [6, 0, 9]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": list(data.get("cifar10").folders)}))

    def checksum(name: str) -> str:
        return hashlib.md5((base / name).read_bytes()).hexdigest()

    monkeypatch.setattr(cifar, "train_list", [[name, checksum(name)] for name in names[:-1]])
    monkeypatch.setattr(cifar, "test_list", [[names[-1], checksum(names[-1])]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": checksum("batches.meta")})
    dataset = data.load("cifar10", root=tmp_path)
    assert class_names_of(dataset) == ["frog", "airplane", "truck"]
    assert np.array_equal(np.asarray(dataset.photos[0].open()), pixels[0].reshape(3, 32, 32).transpose(1, 2, 0))
    assert len(data.load("cifar10", root=tmp_path, split="train", limit=4)) == 4
    (base / names[-1]).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 0, 0]}))
    with pytest.raises(ReactClipError, match=r"cifar10 cannot be read from .*corrupted.*download=True"):
        data.load("cifar10", root=tmp_path)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchvision.datasets", None)
    with pytest.raises(ReactClipError, match=r"needs torchvision, which is missing; .*pip install -e '\.\[data\]'"):
        data.load("cifar10", root=tmp_path)
