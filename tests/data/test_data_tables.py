"""Tables on disk: Parquet as the hub keeps it, what save_to_disk writes, and webdataset shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from react_clip import data
from react_clip.errors import ReactClipError
from toys import picture, save_photo, write_tar

datasets = pytest.importorskip("datasets", reason="needs datasets: react-clip[data]")


def table(labels: list[Any], names: tuple[str, ...] | None = None, column: str = "label") -> Any:
    photos = [{"bytes": picture(number), "path": None} for number in range(len(labels))]
    kind = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    return datasets.Dataset.from_dict(
        {"image": photos, column: labels}, features=datasets.Features({"image": datasets.Image(), column: kind})
    )


# ---------------------------------------------------------------------- Parquet


def test_imagenets_validation_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet" / "data"
    folder.mkdir(parents=True)
    words = tuple(f"{name}, and other words {number}" for number, name in enumerate(data.get("imagenet").class_names))
    table([5, 999], words).to_parquet(folder / "validation-00000-of-00014.parquet")
    table([0], words).to_parquet(folder / "validation-00001-of-00014.parquet")
    table([-1]).to_parquet(folder / "test-00000-of-00028.parquet")  # the unlabelled one
    dataset = data.load("imagenet", root=tmp_path)
    assert dataset.labels == [5, 999, 0]
    assert dataset.class_names[5] == "electric ray"
    assert dataset.photos[1].content() == picture(1)
    assert dataset[1][0].size == (44, 36)
    assert len(dataset.fingerprint()) == 64


@pytest.mark.parametrize("column", ["labels", "fine_label", "cls"])
def test_labels_have_one_of_several_columns(column: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    table([1, 0], ("cat", "dog"), column).to_parquet(tmp_path / "mine" / "train.parquet")
    dataset = data.load("mine", root=tmp_path, split="train")
    assert (dataset.class_names, dataset.labels) == (("cat", "dog"), [1, 0])
    assert [photo.content() for photo in dataset.photos] == [picture(0), picture(1)]


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "stl10" / "test.parquet"
    path.parent.mkdir()
    table([0], None, "answer").to_parquet(path)
    with pytest.raises(ReactClipError, match="has the columns image, answer; a set needs one of images"):
        data.load("stl10", root=tmp_path)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(ReactClipError, match=r"test\.parquet cannot be read"):
        data.load("stl10", root=tmp_path)


def test_a_row_that_only_points_elsewhere_is_refused(tmp_path: Path) -> None:
    features = datasets.Features({"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
    reference = {"image": [{"bytes": None, "path": str(save_photo(tmp_path / "secret.png", 1))}]}
    table_of_references = datasets.Dataset.from_dict(reference, features=features).add_column("label", [0])
    table_of_references.info.features["image"] = datasets.Image()
    (tmp_path / "mine").mkdir()
    table_of_references.to_parquet(tmp_path / "mine" / "test.parquet")
    dataset = data.load("mine", root=tmp_path)
    for use in (dataset.fingerprint, lambda: dataset[0]):
        with pytest.raises(ReactClipError, match="row 0 of the table holds no photo"):
            use()


# ---------------------------------------------------------------------- shards


def test_shards_of_the_webdataset_package(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset: react-clip[data]")
    folder = tmp_path / "imagenet_r" / "test"
    folder.mkdir(parents=True)
    labels = [3, 199, 0, 3]
    for shard in (0, 1):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in (2 * shard, 2 * shard + 1):
                writer.write({"__key__": f"s{number}", "jpg": picture(number), "cls": labels[number]})
    dataset = data.load("imagenet_r", root=tmp_path)
    assert dataset.labels == labels
    assert dataset.class_names[199] == data.get("imagenet_r").class_names[-1]
    assert [photo.content() for photo in dataset.photos] == [picture(number) for number in range(4)]
    assert [photo.id for photo in dataset.photos] == ["0/s0", "0/s1", "1/s2", "1/s3"]
    with webdataset.TarWriter(str(folder / "1.tar")) as writer:
        for number in (2, 3):
            writer.write({"__key__": f"s{number}", "jpg": picture(number + 50), "cls": labels[number]})
    changed = data.load("imagenet_r", root=tmp_path)
    assert changed.fingerprint() != dataset.fingerprint(), "not the copy of the first load"


def test_labels_of_shards_are_numbers_names_or_json(tmp_path: Path) -> None:
    photo = {"x.png": picture(1)}
    write_tar(tmp_path / "dtd" / "test" / "0.tar", {**photo, "x.json": b'{"label": "zigzagged"}'})
    assert data.load("dtd", root=tmp_path).labels == [46]
    write_tar(tmp_path / "mine" / "test" / "0.tar", {**photo, "x.cls": b"1"})
    assert data.load("mine", root=tmp_path).class_names == ("0", "1")
    (tmp_path / "mine" / "classnames.txt").write_text("cat\ndog\n")
    dataset = data.load("mine", root=tmp_path)
    assert (dataset.class_names, dataset.labels) == (("cat", "dog"), [1])
    write_tar(tmp_path / "stl10" / "test" / "0.tar", {**photo, "x.cls": b"0"})
    (tmp_path / "stl10" / "classnames.txt").write_text("\n".join(reversed(data.get("stl10").folders)))
    assert data.load("stl10", root=tmp_path).labels == [9], "a class list in another order is read by name"
    (tmp_path / "stl10" / "classnames.txt").write_text("red\ngreen\n")
    with pytest.raises(ReactClipError, match="stl10 has 10 classes, but its files list 2 others, such as 'red'"):
        data.load("stl10", root=tmp_path)


def test_shards_that_cannot_be_used(tmp_path: Path) -> None:
    shard = tmp_path / "stl10" / "test" / "0.tar"
    for members, line in (
        ({"x.png": picture(1)}, r"a set needs one of images and .*\(in shards a \.cls or \.json member for each"),
        ({"x.png": picture(1), "x.cls": b"10"}, "0/x of stl10 has the label 10, none of 10 classes"),
    ):
        write_tar(shard, members)
        with pytest.raises(ReactClipError, match=line):
            data.load("stl10", root=tmp_path)
    shard.write_bytes(b"not a tar file at all" * 100)
    with pytest.raises(ReactClipError, match=r"0\.tar cannot be read"):
        data.load("stl10", root=tmp_path)
