"""Collections on one machine: what is read, what a row holds, what is kept, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import react_clip as rc
from react_clip.cli import main
from react_clip.scale import Summary, defend_dataset
from react_clip.scale.files import File, find
from react_clip.scale.parcels import cut_shard
from react_clip.scale.ray_data import _Pool

GUARD = rc.ReACT(tau=0.8, views=3, max_batch=16)
Pictures = Callable[[int], bytes]
WriteTar = Callable[[Path, dict[str, bytes]], Path]
ReadParts = Callable[[Path], Any]


def defend(source: Any, out: Any, clf: rc.ZeroShotClassifier, **options: Any) -> Summary:
    return defend_dataset(source, out, clf, GUARD, **{"engine": "local", "parcel": 8, **options})


def test_rows_are_the_answers_of_the_library(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, read_parts: ReadParts
) -> None:
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
    counts = (summary.images, summary.errors, summary.opened, summary.passes, summary.parts)
    assert counts == (20, 1, int(expected.gated.sum()), int(expected.passes.sum()), 3)


def test_every_kind_of_source_gives_the_same_rows(
    clf: rc.ZeroShotClassifier, picture: Pictures, write_tar: WriteTar, tmp_path: Path, read_parts: ReadParts
) -> None:
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

    defend(folder, tmp_path / "out", clf, parcel=4)
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
        defend(source, out, clf, parcel=4, column="photo" if source == str(plain) else "image")
        found = read_parts(out)
        assert found.column("key").to_pylist() == wanted
        assert found.drop(["key"]).equals(expected.drop(["key"])), source
        assert len(list(out.glob("part-*.parquet"))) == 3


def test_output_can_be_an_object_store(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, read_parts: ReadParts
) -> None:
    url = f"memory://{tmp_path.name}/out"
    first = defend(photos, url, clf)
    local = defend(photos, tmp_path / "out", clf)
    assert local == Summary(**{**first.to_dict(), "out": str(tmp_path / "out"), "missing": ()})
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "out").glob("part-*"):
        assert memory.cat_file(f"/{tmp_path.name}/out/{path.name}") == path.read_bytes()
    assert defend(photos, url, clf, resume=True) == first


def test_finished_parts_are_never_made_again(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, read_parts: ReadParts
) -> None:
    out = tmp_path / "out"
    whole = defend(photos, out, clf)
    rows = read_parts(out)
    (out / "part-000001.parquet").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    with pytest.raises(rc.ReactClipError, match="2 finished parts of this job; continue it with --resume"):
        defend(photos, out, clf)
    assert defend(photos, out, clf, resume=True) == whole
    assert read_parts(out).equals(rows)
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize("what", ["seed", "top", "parcel", "guard", "classes", "photos"])
def test_a_folder_of_another_job_is_refused(
    clf: rc.ZeroShotClassifier, photos: Path, picture: Pictures, tmp_path: Path, what: str
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
        defend_dataset(photos, out, clf, guard, **{"engine": "local", "parcel": 8, "resume": True, **options})
    assert {path: path.read_bytes() for path in out.iterdir() if path.suffix} == before


def test_a_plan_without_parts_gives_way(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, read_parts: ReadParts
) -> None:
    out = tmp_path / "out"
    defend(photos, out, clf, seed=1)
    for path in out.glob("part-*"):
        path.unlink()
    defend(photos, out, clf, parcel=3)
    assert len(list(out.glob("part-*"))) == 7
    assert json.loads((out / "plan.json").read_text())["asked"]["parcel"] == 3


@pytest.mark.parametrize(
    ("cores", "gpus", "asked", "workers", "share", "decoders"),
    [(2, 0, None, 2, 0, 1), (16, 0, 5, 5, 0, 2), (16, 1, None, 2, 0.5, 16), (32, 2, 3, 3, 0.5, 32), (8, 4, 2, 2, 1, 8)],
)
def test_workers_and_decoders_find_room_together(
    cores: int, gpus: int, asked: int | None, workers: int, share: float, decoders: int
) -> None:
    have = SimpleNamespace(cluster_resources=lambda: {"CPU": float(cores), "GPU": float(gpus)})
    pool = _Pool.of(have, asked, None, parcels=1000)
    assert (pool.workers, pool.worker_gpus, pool.decoders) == (workers, share, decoders)
    assert pool.workers * pool.worker_cpus + pool.decoders * pool.decoder_cpus <= cores
    assert pool.workers * pool.worker_gpus <= gpus


def test_an_unreadable_shard_costs_itself_and_is_tried_again(
    clf: rc.ZeroShotClassifier, picture: Pictures, write_tar: WriteTar, tmp_path: Path, read_parts: ReadParts
) -> None:
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


def test_a_damaged_header_is_not_taken_for_the_end(picture: Pictures, write_tar: WriteTar, tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "s.tar", {f"{i}.png": picture(i) for i in range(4)})
    [file] = find([str(shard)], str(tmp_path))
    assert [count for *_, count in cut_shard(file, str(tmp_path), 3, "image")] == [3, 1]
    content = bytearray(shard.read_bytes())
    second = 512 + -(-len(picture(0)) // 512) * 512
    content[second : second + 100] = b"x" * 100
    shard.write_bytes(content)
    with pytest.raises(rc.ReactClipError, match=f"header at byte {second:,} is damaged"):
        cut_shard(File(str(shard), len(content)), str(tmp_path), 3, "image")


def test_a_shard_that_breaks_while_it_is_read_is_a_missing_piece(
    clf: rc.ZeroShotClassifier, picture: Pictures, write_tar: WriteTar, tmp_path: Path
) -> None:
    shard = write_tar(tmp_path / "s.tar", {f"{i}.png": picture(i) for i in range(12)})
    defend(tmp_path / "s.tar", tmp_path / "out", clf, parcel=4)
    for number in (1, 2):
        (tmp_path / "out" / f"part-00000{number}.parquet").unlink()
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2] + b"\xff" * (len(content) - len(content) // 2))
    summary = defend(tmp_path / "s.tar", tmp_path / "out", clf, parcel=4, resume=True)
    assert summary.images < 12
    assert all("s.tar" in line for line in summary.missing)
    shard.write_bytes(content)
    assert defend(tmp_path / "s.tar", tmp_path / "out", clf, parcel=4, resume=True).images == 12


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
        "--parcel is 0; give 1 to 4096": {"parcel": 0},
        "--top is 0; give at least 1": {"top": 0},
        "engine is 'dask'; choose local or ray": {"engine": "dask"},
        "choose an --out outside of it": {"out": photos / "out"},
        "memory of this process, which no worker sees": {"out": "memory://x", "engine": "ray"},
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
    read_parts: ReadParts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(tiny_folder), "--device", "cpu", "--config", "paper", "--labels", "cat, dog, teapot"]
    command = ["embed", "photos", *options, "--parcel", "6", "--batch", "16", "--quiet"]
    assert main([*command, "--out", "out", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["errors"], summary["parts"], summary["missing"]) == (20, 1, 4, [])
    assert read_parts(tmp_path / "out").column("key")[0].as_py() == "photos/a/00.png"
    guard = rc.ReACT(max_batch=16)
    defend_dataset("photos", "again", clf, guard, engine="local", parcel=6)
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
