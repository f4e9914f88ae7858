"""Hugging Face tables on disk: parquet as the Hub keeps it, and what save_to_disk writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from react_clip import data
from react_clip.errors import ReactClipError

datasets = pytest.importorskip("datasets", reason="needs datasets: react-clip[data]")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(photo_bytes: Any, labels: list[Any], names: tuple[str, ...] | None, column: str = "label") -> Any:
    photos = [{"bytes": photo_bytes(number), "path": None} for number in range(len(labels))]
    kind = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    return datasets.Dataset.from_dict(
        {"image": photos, column: labels}, features=datasets.Features({"image": datasets.Image(), column: kind})
    )


def test_imagenets_validation_parquet(tmp_path: Path, photo_bytes) -> None:
    folder = tmp_path / "imagenet" / "data"
    folder.mkdir(parents=True)
    words = tuple(f"{name}, and other words {number}" for number, name in enumerate(data.get("imagenet").class_names))
    table(photo_bytes, [5, 999], words).to_parquet(folder / "validation-00000-of-00014.parquet")
    table(photo_bytes, [0], words).to_parquet(folder / "validation-00001-of-00014.parquet")
    table(photo_bytes, [-1], None).to_parquet(folder / "test-00000-of-00028.parquet")  # the unlabelled one
    dataset = data.load("imagenet", root=tmp_path)
    assert dataset.labels == [5, 999, 0]
    assert dataset.class_names[5] == "electric ray"
    assert dataset.photos[1].content() == photo_bytes(1)
    assert dataset.image(1).size == (8, 8)
    assert len(dataset.fingerprint()) == 64


def test_class_labels_in_another_order_are_read_by_name(tmp_path: Path, photo_bytes) -> None:
    (tmp_path / "eurosat").mkdir()
    names = tuple(reversed(data.get("eurosat").folders))
    table(photo_bytes, [0, 9], names).to_parquet(tmp_path / "eurosat" / "test.parquet")
    assert data.load("eurosat", root=tmp_path).labels == [9, 0]


@pytest.mark.parametrize("column", ["labels", "fine_label", "cls"])
def test_save_to_disk_and_other_column_names(column: str, tmp_path: Path, photo_bytes) -> None:
    table(photo_bytes, [1, 0], ("cat", "dog"), column).save_to_disk(tmp_path / "mine" / "train")
    dataset = data.load("mine", root=tmp_path, split="train")
    assert (dataset.class_names, dataset.labels) == (("cat", "dog"), [1, 0])
    assert [photo.content() for photo in dataset.photos] == [photo_bytes(0), photo_bytes(1)]


def test_tables_that_cannot_be_used(tmp_path: Path, photo_bytes) -> None:
    path = tmp_path / "stl10" / "test.parquet"
    path.parent.mkdir()
    table(photo_bytes, [0], None, "answer").to_parquet(path)
    with pytest.raises(ReactClipError, match="has the columns image, answer; a set needs one of images"):
        data.load("stl10", root=tmp_path)
    table(photo_bytes, [0, -1], None).to_parquet(path)
    with pytest.raises(ReactClipError, match="test/000001 of stl10 has the label -1"):
        data.load("stl10", root=tmp_path)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(ReactClipError, match=r"test\.parquet cannot be read"):
        data.load("stl10", root=tmp_path)


def test_a_row_that_only_points_elsewhere_is_refused(tmp_path: Path, save_photo) -> None:
    features = datasets.Features({"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
    reference = {"image": [{"bytes": None, "path": str(save_photo(tmp_path / "secret.png", 1))}]}
    table_of_references = datasets.Dataset.from_dict(reference, features=features).add_column("label", [0])
    table_of_references.info.features["image"] = datasets.Image()
    (tmp_path / "mine").mkdir()
    table_of_references.to_parquet(tmp_path / "mine" / "test.parquet")
    dataset = data.load("mine", root=tmp_path)
    for use in (dataset.fingerprint, lambda: dataset.image(0)):
        with pytest.raises(ReactClipError, match="row 0 of the table holds no photo"):
            use()
