"""Webdataset shards, written and cross-checked with the webdataset package itself."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from react_clip import data
from react_clip.errors import ReactClipError


def tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def test_shards_of_the_webdataset_package(tmp_path: Path, photo_bytes) -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset: react-clip[data]")
    folder = tmp_path / "imagenet_r" / "test"
    folder.mkdir(parents=True)
    labels = [3, 199, 0, 3]
    for shard in (0, 1):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in (2 * shard, 2 * shard + 1):
                writer.write({"__key__": f"s{number}", "jpg": photo_bytes(number, "JPEG"), "cls": labels[number]})
    dataset = data.load("imagenet_r", root=tmp_path)
    assert dataset.labels == labels
    assert dataset.class_names[199] == data.get("imagenet_r").class_names[-1]
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [photo.content() for photo in dataset.photos] == [sample["jpg"] for sample in theirs]
    assert [photo.id for photo in dataset.photos] == ["0/s0", "0/s1", "1/s2", "1/s3"]
    assert dataset.image(2).size == (8, 8)
    before = dataset.fingerprint()
    with webdataset.TarWriter(str(folder / "1.tar")) as writer:
        for number in (2, 3):
            writer.write({"__key__": f"s{number}", "jpg": photo_bytes(number + 50, "JPEG"), "cls": labels[number]})
    assert data.load("imagenet_r", root=tmp_path).fingerprint() != before


def test_labels_may_be_names_or_json(tmp_path: Path, photo_bytes) -> None:
    tar(
        tmp_path / "dtd" / "test" / "0.tar",
        {
            "a/x.png": photo_bytes(1),
            "a/x.cls": b"zigzagged\n",
            "a/y.image.webp": photo_bytes(2, "WEBP"),
            "a/y.json": b'{"label": 2}',
            "a/z.txt": b"no photo",
        },
    )
    dataset = data.load("dtd", root=tmp_path)
    assert dataset.labels == [46, 2]
    assert dataset.templates == ("A surface with a {} texture.",)


def test_an_unknown_set_brings_its_own_names(tmp_path: Path, photo_bytes) -> None:
    tar(tmp_path / "mine" / "test" / "0.tar", {"x.png": photo_bytes(1), "x.cls": b"1"})
    assert data.load("mine", root=tmp_path).class_names == ("0", "1")
    (tmp_path / "mine" / "classnames.txt").write_text("cat\ndog\n")
    dataset = data.load("mine", root=tmp_path)
    assert (dataset.class_names, dataset.labels) == (("cat", "dog"), [1])


def test_a_class_list_in_another_order_is_understood(tmp_path: Path, photo_bytes) -> None:
    tar(tmp_path / "stl10" / "test" / "0.tar", {"x.png": photo_bytes(1), "x.cls": b"0"})
    (tmp_path / "stl10" / "classnames.txt").write_text("\n".join(reversed(data.get("stl10").folders)))
    assert data.load("stl10", root=tmp_path).labels == [9]
    (tmp_path / "stl10" / "classnames.txt").write_text("red\ngreen\n")
    with pytest.raises(ReactClipError, match="stl10 has 10 classes, but its files list 2 others, such as 'red'"):
        data.load("stl10", root=tmp_path)


def test_shards_that_cannot_be_used(tmp_path: Path, photo_bytes) -> None:
    shard = tmp_path / "stl10" / "test" / "0.tar"
    tar(shard, {"x.png": photo_bytes(1)})
    with pytest.raises(ReactClipError, match=r"photo x in .*0\.tar has no label; add x\.cls"):
        data.load("stl10", root=tmp_path)
    tar(shard, {"x.png": photo_bytes(1), "x.cls": b"10"})
    with pytest.raises(ReactClipError, match=r"0/x of stl10 has the label 10, which is none of its 10 classes"):
        data.load("stl10", root=tmp_path)
    tar(shard, {"x.txt": b"hello"})
    with pytest.raises(ReactClipError, match="stl10 has no test photo in its files"):
        data.load("stl10", root=tmp_path)
    shard.write_bytes(b"not a tar file at all" * 100)
    with pytest.raises(ReactClipError, match=r"0\.tar cannot be read"):
        data.load("stl10", root=tmp_path)


def test_a_download_fetches_the_split_alone(tmp_path: Path, photo_bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **options: object) -> None:
        asked.update(options, repository=repository)
        tar(Path(str(options["local_dir"])) / "test" / "0.tar", {"x.png": photo_bytes(1), "x.cls": b"4"})

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for name in ("imagenet_a", "stanford_cars"):
        assert data.load(name, root=tmp_path, download=True).labels == [4]
        assert asked["repository"] == data.get(name).hub
        assert asked["allow_patterns"] == ["test/*.tar", "data/test*.parquet", "classnames.txt"]
        assert asked["repo_type"] == "dataset"


def test_a_failed_download_gives_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repository: str, **options: object) -> None:
        raise OSError("401 Client Error\nyou need to be logged in")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(
        ReactClipError, match=r"cannot download ILSVRC/imagenet-1k \(401 Client Error\); run: hf download"
    ):
        data.load("imagenet", root=tmp_path, download=True)
