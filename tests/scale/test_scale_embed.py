"""``defend_dataset`` in one process: sources, rows, resuming, and refusals."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import react_clip as rc
from react_clip.cli import main
from react_clip.scale import Summary, collection, defend_dataset
from react_clip.scale.cluster import connected
from scale_toys import picture, read_parts, write_tar
from toys import patch_encoder

GUARD = rc.ReACT(tau=0.8, views=3, max_batch=16)


def defend(source: Any, out: Any, clf: rc.ZeroShotClassifier, **options: Any) -> Summary:
    return defend_dataset(source, out, clf, GUARD, **{"engine": "local", "chunk": 8, **options})


def test_rows_are_the_answers_of_the_library(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    summary = defend(photos, tmp_path / "out", clf, seed=3, top=2)
    rows = read_parts(tmp_path / "out").to_pylist()
    files = sorted(photos.rglob("*.png"))
    assert [row["key"] for row in rows] == [str(path) for path in files]
    [bad] = [row for row in rows if row["error"]]
    assert bad["key"].endswith("07.png")
    assert "not an image we read" in bad["error"]
    assert {value for name, value in bad.items() if name not in ("key", "error")} == {None}

    good = [row for row in rows if row["error"] is None]
    expected = GUARD(clf, [path for path in files if path.name != "07.png"], seed=3)
    assert torch.allclose(torch.tensor([row["feature"] for row in good]), expected.features, atol=1e-5)
    assert [row["label"] for row in good] == expected.names
    best = expected.probs.topk(2)
    assert torch.allclose(torch.tensor([row["probs"] for row in good]), best.values, atol=1e-5)
    assert [row["labels"][0] for row in good] == expected.names
    for name in ("drift_low", "drift_high", "drift", "score", "sigma"):
        found = torch.tensor([row[name] for row in good])
        assert torch.allclose(found, getattr(expected, name), rtol=1e-3, atol=1e-4), name
    assert [row["gated"] for row in good] == expected.gated.tolist()
    assert [row["passes"] for row in good] == expected.passes.tolist()
    assert [row["instability"] is None for row in good] == expected.instability.isnan().tolist()
    assert 0 < sum(row["gated"] for row in good) < len(good), "both answers of the gate are seen"
    counts = (summary.images, summary.errors, summary.gated, summary.passes, summary.parts)
    assert counts == (20, 1, int(expected.gated.sum()), int(expected.passes.sum()), 3)


def test_rows_of_the_default_leave_out_what_only_react_measures(photos: Path, tmp_path: Path) -> None:
    encoder = patch_encoder()
    encoder.name = "clip-vit-b-16"
    clf = rc.ZeroShotClassifier.from_features(encoder, ["a", "b", "c"], torch.eye(12)[:3])
    summary = defend_dataset(photos, tmp_path / "out", clf, engine="local", chunk=8)
    rows = [row for row in read_parts(tmp_path / "out").to_pylist() if row["error"] is None]
    expected = rc.SecondLook()(clf, [row["key"] for row in rows], seed=0)
    assert torch.allclose(torch.tensor([row["feature"] for row in rows]), expected.features, atol=1e-5)
    assert {row[name] for row in rows for name in ("drift_low", "drift_high", "sigma")} == {None}
    assert [row["drift"] for row in rows] == pytest.approx(expected.drift.tolist(), abs=1e-4)
    assert [row["passes"] for row in rows] == pytest.approx(expected.passes.tolist())
    assert summary.passes == pytest.approx(expected.passes.sum().item())
    assert summary.passes % 1 > 0
    (tmp_path / "out" / "part-000000-000000.parquet").unlink()
    assert defend_dataset(photos, tmp_path / "out", clf, engine="local", chunk=8, resume=True) == summary


def test_every_kind_of_source_gives_the_same_rows(clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    images = {f"{i:02d}.png": picture(i) for i in range(11)}
    folder, memory = tmp_path / "folder", fsspec.filesystem("memory")
    folder.mkdir()
    for name, content in images.items():
        (folder / name).write_bytes(content)
        memory.pipe_file(f"/{tmp_path.name}/in/{name}", content)
    long = "a-name-that-needs-a-header-of-its-own/" * 4
    members = {f"{long}{name}": content for name, content in images.items()}
    labels = {f"{long}{name[:-4]}.cls": b"1" for name in images}
    shard = write_tar(tmp_path / "s.tar", dict(sorted({**members, **labels}.items())))
    plain = tmp_path / "plain.parquet"
    parquet.write_table(pa.table({"id": range(11), "photo": list(images.values())}), plain, row_group_size=4)
    struct = pa.array([{"bytes": content, "path": name} for name, content in images.items()])
    nested = tmp_path / "nested.parquet"
    parquet.write_table(pa.table({"image": struct}), nested, row_group_size=20)

    defend(folder, tmp_path / "out", clf, chunk=4)
    expected = read_parts(tmp_path / "out")
    keys = {
        f"file://{folder}": [f"file://{folder}/{name}" for name in images],
        f"memory://{tmp_path.name}/in": [f"memory://{tmp_path.name}/in/{name}" for name in images],
        f"{folder}/*.png": [f"{folder}/{name}" for name in images],
        str(shard): [f"{shard}/{name}" for name in members],
        str(plain): [f"{plain}#{row}" for row in range(11)],
        str(nested): [f"{nested}#{row}" for row in range(11)],
    }
    for i, (source, wanted) in enumerate(keys.items()):
        out = tmp_path / f"out{i}"
        defend(source, out, clf, chunk=4, column="photo" if source == str(plain) else "image")
        found = read_parts(out)
        assert found.column("key").to_pylist() == wanted
        assert found.drop(["key"]).equals(expected.drop(["key"])), source
        assert len(list(out.glob("part-*.parquet"))) == 3


def test_output_can_be_an_object_store(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/out"
    first = defend(photos, url, clf)
    local = defend(photos, tmp_path / "out", clf)
    assert local == replace(first, out=str(tmp_path / "out"))
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "out").glob("part-*"):
        assert memory.cat_file(f"/{tmp_path.name}/out/{path.name}") == path.read_bytes()
    assert defend(photos, url, clf, resume=True) == first


@pytest.mark.parametrize("what", ["seed", "top", "chunk", "guard", "classes", "photos"])
def test_a_folder_of_another_job_is_refused(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out"
    defend(photos, out, clf)
    before = {path: path.read_bytes() for path in out.iterdir() if path.suffix}
    guard, options = GUARD, {}
    if what == "guard":
        guard = GUARD.replace(alpha=1.5)
    elif what == "classes":
        clf = rc.ZeroShotClassifier(clf.encoder, ["cat", "dog"])
    elif what == "photos":
        (photos / "a" / "new.png").write_bytes(picture(99))
    else:
        options = {what: 1}
    with pytest.raises(rc.ReactClipError, match=rf"out holds another job \(other {what}\)"):
        defend_dataset(photos, out, clf, guard, **{"engine": "local", "chunk": 8, "resume": True, **options})
    assert {path: path.read_bytes() for path in out.iterdir() if path.suffix} == before


def test_a_plan_without_parts_is_replaced(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    defend(photos, out, clf, seed=1)
    for path in out.glob("part-*"):
        path.unlink()
    defend(photos, out, clf, chunk=3)
    assert len(list(out.glob("part-*"))) == 7
    assert json.loads((out / "plan.json").read_text())["chunk"] == 3


def test_an_unreadable_shard_costs_itself_and_is_tried_again(clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    members = {f"{i}.png": picture(i) for i in range(10)}
    for name in "ab":
        write_tar(shards / f"{name}.tar", members)
    parquet.write_table(pa.table({"image": list(members.values())}), shards / "c.parquet")
    defend(shards, tmp_path / "whole", clf)
    broken = (shards / "a.tar").read_bytes()
    (shards / "a.tar").write_bytes(broken[: len(broken) // 3])
    (shards / "c.parquet").write_bytes(b"PAR1 and nothing else")
    out = tmp_path / "out"
    summary = defend(shards, out, clf)
    assert (summary.images, summary.parts, len(summary.missing)) == (10, 2, 2)
    assert "a.tar cannot be read" in summary.missing[0]
    assert "c.parquet cannot be read" in summary.missing[1]
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}

    (shards / "a.tar").write_bytes(broken)
    parquet.write_table(pa.table({"image": list(members.values())}), shards / "c.parquet")
    summary = defend(shards, out, clf, resume=True)
    assert (summary.images, summary.missing) == (30, ())
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    by_key = [("key", "ascending")]
    assert read_parts(out).sort_by(by_key).equals(read_parts(tmp_path / "whole").sort_by(by_key))


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "s.tar", {f"{i}.png": picture(i) for i in range(4)})
    files = collection.find_files([str(shard)])
    chunks, problems = collection.cut(files, 3, "image")
    assert ([chunk.count for chunk in chunks], problems) == ([3, 1], [])
    content = bytearray(shard.read_bytes())
    second = 512 + -(-len(picture(0)) // 512) * 512
    content[second : second + 100] = b"x" * 100
    shard.write_bytes(content)
    chunks, [problem] = collection.cut(files, 3, "image")
    assert not chunks
    assert f"header at byte {second:,} is damaged" in problem


def test_a_shard_that_changes_after_it_was_listed_is_one_line(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "s.tar", {f"{i}.png": picture(i) for i in range(8)})
    table = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"image": [picture(i) for i in range(8)]}), table)
    chunks, _ = collection.cut(collection.find_files([str(shard), str(table)]), 4, "image")
    parquet.write_table(pa.table({"image": [picture(i) for i in range(6)]}), table)
    whole = shard.read_bytes()
    for content in (whole[: len(whole) // 3], whole[:512] + b"\xff" * len(whole), b""):
        shard.write_bytes(content)
        for chunk in (chunks[0], chunks[1], chunks[3]):
            with pytest.raises(
                rc.ReactClipError, match=r"cannot be read|holds \d+ images and held 4 when it was listed"
            ):
                list(collection.read_chunk(chunk, "image"))


def test_a_photo_that_is_lost_is_an_error_and_all_of_them_are_one_line(photos: Path) -> None:
    files = collection.find_files([str(photos)])
    [chunk], _ = collection.cut(files, 20, "image")
    Path(files[3].url).unlink()
    lost = [key for key, content in collection.read_chunk(chunk, "image") if isinstance(content, rc.ReactClipError)]
    assert lost == [files[3].url]
    shutil.rmtree(photos)
    with pytest.raises(rc.ReactClipError, match=r"none of the 20 photos from .* can be opened"):
        list(collection.read_chunk(chunk, "image"))


def test_parts_of_another_version_of_a_shard_are_refused(clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    shard, out = tmp_path / "s.tar", tmp_path / "out"
    write_tar(shard, {f"{i}.png": picture(i) for i in range(12)})
    assert defend(shard, out, clf).parts == 2
    (out / "part-000001-000001.parquet").unlink()
    write_tar(shard, {f"{i}.png": picture(i) for i in range(13)})
    with pytest.raises(rc.ReactClipError, match=r"part-000001-000000.parquet was made from another .*s.tar; choose"):
        defend(shard, out, clf, resume=True)


def test_bad_requests_are_one_line(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"jpg": [b"x"], "id": [1]}), table)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = {
        "nowhere does not exist": {"source": tmp_path / "nowhere"},
        "holds none of .jpg": {"source": empty},
        "nothing://there cannot be reached": {"source": "nothing://there"},
        "no column 'image' with the bytes of images; choose --column jpg": {"source": table},
        "--chunk is 0; give 1 to 4096": {"chunk": 0},
        "--top is 0; give at least 1": {"top": 0},
        "--workers is 0; give at least 1": {"workers": 0},
        "engine is 'dask'; choose local or ray": {"engine": "dask"},
        "choose an --out outside of it": {"out": photos / "out"},
    }
    for line, options in refused.items():
        place = {"source": options.pop("source", photos), "out": options.pop("out", tmp_path / "out")}
        with pytest.raises(rc.ReactClipError) as caught:
            defend(**place, clf=clf, **options)
        assert line in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "plan.json").exists()


def test_a_secret_stays_out_of_the_plan(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    defend(photos, tmp_path / "out", clf, seed=b"my secret")
    assert "my secret" not in (tmp_path / "out" / "plan.json").read_text()
    with pytest.raises(rc.ReactClipError, match=r"other seed"):
        defend(photos, tmp_path / "out", clf, seed=b"another", resume=True)


def test_the_command_writes_parts(
    capsys: pytest.CaptureFixture[str],
    clf: rc.ZeroShotClassifier,
    tiny_folder: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(tiny_folder), "--device", "cpu", "--config", "paper", "--labels", "cat, dog, teapot"]
    command = ["embed", "photos", *options, "--chunk", "6", "--batch", "16", "--quiet"]
    assert main([*command, "--out", "out", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["errors"], summary["parts"], summary["missing"]) == (20, 1, 4, [])
    assert read_parts(tmp_path / "out").column("key")[0].as_py() == "photos/a/00.png"
    guard = rc.ReACT(max_batch=16)
    defend_dataset("photos", "again", clf, guard, engine="local", chunk=6)
    assert read_parts(tmp_path / "again").equals(read_parts(tmp_path / "out"))

    assert main([*command, "--out", "out"]) == 2
    assert "--resume" in capsys.readouterr().err
    for wrong in (
        ["--out", "x.npy", "--resume"],
        ["--out", "x.npy", "--engine", "ray"],
        ["--out", "y", "--workers", "2"],
    ):
        extra = [*command[:2], *options, "--quiet", *wrong]
        assert main(extra) == 2
        assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "photos" / "s.tar").write_bytes(b"this is no archive, though it is long enough" * 20)
    assert main([*command, "--out", "third"]) == 2
    assert "photos/s.tar cannot be read" in capsys.readouterr().err


def test_an_address_without_a_cluster_is_one_line() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rc.ReactClipError, match=f"no Ray cluster answers at {address} .*; start one with"):
            connected(address).__enter__()
    with pytest.raises(rc.ReactClipError, match="--address is 'somewhere'; write host:port"):
        connected("somewhere").__enter__()
