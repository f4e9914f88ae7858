"""``defend_dataset`` in one process: sources, rows, resuming, and refusals."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import react_clip as rc
from programs import Run
from react_clip.scale import Summary, collection, defend_dataset
from toys import features, patch_encoder, picture, read_rows, write_tar

GUARD = rc.ReACT(tau=0.8, views=3)


def defend(source: Any, out: Any, clf: rc.ZeroShotClassifier, **options: Any) -> Summary:
    return defend_dataset(source, out, clf, GUARD, **{"engine": "local", "batch": 8, **options})


def test_rows_are_the_answers_of_the_library(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    summary = defend(photos, tmp_path / "out", clf, seed=3, top=2)
    rows = read_rows(tmp_path / "out")
    files = sorted(photos.rglob("*.png"))
    assert list(rows.key) == list(rows.file) == [str(path) for path in files]
    [bad] = [row for _, row in rows.iterrows() if row.error is not None and row.error == row.error]
    assert bad.key.endswith("07.png")
    assert "not an image we read" in bad.error
    assert bad.drop(["file", "key", "error"]).isna().all()

    good = rows[rows.error.isna()]
    expected = GUARD(clf, [path for path in files if path.name != "07.png"], seed=3)
    assert np.allclose(features(rows), expected.features, atol=1e-5)
    best = expected.probs.topk(2)
    assert np.allclose(np.stack(good.probs), best.values, atol=1e-5)
    assert [list(labels) for labels in good.labels] == [[clf.names[k] for k in row] for row in best.indices.tolist()]
    assert list(good.label) == expected.names
    for name, values in expected.diagnostics.items():
        assert np.allclose(good[name].astype(float), values, rtol=1e-3, atol=1e-4, equal_nan=True), name
    assert list(good.gated) == expected.gated.tolist()
    assert list(good.passes) == expected.passes.tolist()
    assert 0 < good.gated.sum() < len(good), "both answers of the gate are seen"
    counts = (summary.images, summary.errors, summary.gated, summary.passes, summary.parts)
    assert counts == (20, 1, int(expected.gated.sum()), float(expected.passes.sum()), 3)


def test_columns_are_the_defences_own(photos: Path, tmp_path: Path) -> None:
    encoder = patch_encoder()
    encoder.name = encoder.weights = "clip-vit-b-16"
    clf = rc.ZeroShotClassifier.from_features(encoder, ["a", "b", "c"], torch.eye(12)[:3])
    defend_dataset(photos, tmp_path / "out", clf, seed=0, engine="local", batch=8)
    rows = read_rows(tmp_path / "out")
    expected = rc.SecondLook()(clf, list(rows[rows.error.isna()].key), seed=0)
    assert set(expected.diagnostics) <= set(rows.columns)
    assert not {"drift_low", "drift_high", "sigma"} & set(rows.columns), "what only ReACT measures"
    assert np.allclose(features(rows), expected.features, atol=1e-5)


def test_every_kind_of_source_gives_the_same_rows(clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    images = {f"{i:02d}.png": picture(i) for i in range(11)}
    folder, memory = tmp_path / "folder", fsspec.filesystem("memory")
    folder.mkdir()
    for name, content in images.items():
        (folder / name).write_bytes(content)
        memory.pipe_file(f"/{tmp_path.name}/in/{name}", content)
    long = "a-name-that-needs-a-header-of-its-own/" * 4
    labels = {f"{long}{name[:-4]}.cls": b"1" for name in images}
    members = {f"{long}{name}": content for name, content in images.items()}
    shard = write_tar(tmp_path / "s.tar", dict(sorted({**members, **labels}.items())))
    plain = tmp_path / "plain.parquet"
    parquet.write_table(pa.table({"id": range(11), "photo": list(images.values())}), plain, row_group_size=4)
    struct = pa.array([{"bytes": content, "path": name} for name, content in images.items()])
    nested = tmp_path / "nested.parquet"
    parquet.write_table(pa.table({"image": struct}), nested)

    defend(folder, tmp_path / "out", clf, batch=4)
    expected = features(read_rows(tmp_path / "out"))
    keys = {
        f"file://{folder}": [f"file://{folder}/{name}" for name in images],
        f"memory://{tmp_path.name}/in": [f"memory:///{tmp_path.name}/in/{name}" for name in images],
        f"{folder}/*.png": [f"{folder}/{name}" for name in images],
        str(shard): [f"{shard}/{name}" for name in members],
        str(plain): sorted(f"{plain}#{row}" for row in range(11)),
        str(nested): sorted(f"{nested}#{row}" for row in range(11)),
    }
    for i, (source, wanted) in enumerate(keys.items()):
        defend(source, tmp_path / f"out{i}", clf, batch=4, column="photo" if source == str(plain) else "image")
        rows = read_rows(tmp_path / f"out{i}")
        assert list(rows.key) == wanted
        order = [int(key.partition("#")[2]) for key in wanted] if "#" in wanted[0] else range(11)
        assert np.allclose(features(rows), expected[list(order)], atol=1e-5), source


def test_output_can_be_an_object_store(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/out"
    first = defend(photos, url, clf)
    assert replace(defend(photos, tmp_path / "out", clf), out=url) == first
    assert defend(photos, url, clf, resume=True) == replace(first, parts=first.parts + 1)


def test_resume_adds_what_is_missing_and_tries_errors_again(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    (photos / "a" / "07.png").write_bytes(picture(7))
    defend(photos, whole, clf)
    (photos / "a" / "07.png").write_bytes(b"no image")
    defend(photos, out, clf)
    first, second, third = sorted(out.glob("*.parquet"))
    kept = third.read_bytes()
    first.write_bytes(first.read_bytes()[:100])  # the process was killed while it wrote
    second.unlink()
    (photos / "a" / "07.png").write_bytes(picture(7))
    with pytest.raises(rc.ReactClipError, match="holds rows of this job; continue it with --resume"):
        defend(photos, out, clf)
    summary = defend(photos, out, clf, resume=True)
    assert (summary.images, summary.errors, third.read_bytes()) == (20, 0, kept)
    ours, theirs = read_rows(out), read_rows(whole)
    assert np.allclose(features(ours), features(theirs), atol=1e-5)
    assert list(ours.key) == list(theirs.key)
    (photos / "b" / "new.png").write_bytes(picture(99))
    assert defend(photos, out, clf, resume=True).images == 21, "files may be added"


def test_an_unreadable_shard_costs_itself_and_is_tried_again(clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    shards, out = tmp_path / "shards", tmp_path / "out"
    shards.mkdir()
    members = {f"{i}.png": picture(i) for i in range(10)}
    for name in "ab":
        write_tar(shards / f"{name}.tar", members)
    whole = (shards / "a.tar").read_bytes()
    truncated, damaged = whole[: len(whole) // 3], bytearray(whole)
    second = 512 + -(-len(picture(0)) // 512) * 512
    damaged[second : second + 100] = b"x" * 100  # tarfile takes a damaged header for the end of the archive
    (shards / "c.parquet").write_bytes(b"PAR1 and nothing else")
    for content, says in (
        (truncated, "unexpected end of data"),
        (damaged, f"the header at byte {second:,} is damaged"),
    ):
        (shards / "a.tar").write_bytes(content)
        summary = defend(shards, out, clf, resume=True)
        tar, table = sorted(summary.missing)
        assert tar.startswith(f"{shards / 'a.tar'} cannot be read ({says}")
        assert table.startswith(f"{shards / 'c.parquet'} cannot be read")
        assert summary.images - summary.errors >= 11
    (shards / "a.tar").write_bytes(whole)
    parquet.write_table(pa.table({"image": list(members.values())}), shards / "c.parquet")
    summary = defend(shards, out, clf, resume=True)
    assert (summary.images, summary.errors, summary.missing) == (30, 0, ())
    assert len(set(read_rows(out).key)) == 30


def test_a_full_disk_keeps_the_parts_that_fitted(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "disk" / "out"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        (disk / "other").write_bytes(bytes(48 * 1024))
        with pytest.raises(rc.ReactClipError, match=r"cannot write .*/out\.json: No space left on device"):
            defend(photos, out, clf)
        assert not (disk / "out.json").exists()
        (disk / "other").unlink()
        with pytest.raises(rc.ReactClipError, match=r"cannot write .*\.parquet: .*No space left on device"):
            defend(photos, out, clf, batch=1)
        fitted = len(read_rows(out))
        assert 0 < fitted < 20
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        assert defend(photos, out, clf, resume=True).images == 20
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_job_that_is_stopped_leaves_whole_parts(
    clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = parquet.write_table, iter(range(100))

    def stop_in_the_second_part(table: Any, part: str, filesystem: Any) -> None:
        write(table, part, filesystem=filesystem)
        if next(calls):
            Path(part).write_bytes(b"half a part")
            raise KeyboardInterrupt

    monkeypatch.setattr(parquet, "write_table", stop_in_the_second_part)
    with pytest.raises(KeyboardInterrupt):
        defend(photos, tmp_path / "out", clf)
    assert len(pd.read_parquet(tmp_path / "out")) == 8


@pytest.mark.parametrize("tool", ["pandas", "datasets", "duckdb"])
def test_other_tools_open_the_folder(
    tool: str, clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    defend(photos, "features", clf)
    document = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    [line] = [line for line in document.splitlines() if line.startswith(f"table = {tool}.")]
    names = {tool: pytest.importorskip(tool)}
    exec(line, names)
    assert len(names["table"]) == 20


def test_a_folder_of_another_job_is_refused(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = {"clf": clf, "guard": GUARD, "secret": b"a secret of sixteen bytes", "engine": "local", "resume": True}
    defend_dataset(photos, out, **job)
    before = {path: path.read_bytes() for path in tmp_path.glob("out*/*")}
    assert "a secret" not in (tmp_path / "out.json").read_text()
    for what, change in {
        "top": {"top": 1},
        "guard": {"guard": GUARD.replace(alpha=1.5)},
        "classes": {"clf": rc.ZeroShotClassifier(clf.encoder, ["cat", "dog"])},
    }.items():
        with pytest.raises(rc.ReactClipError, match=rf"out holds another job \(other {what}\)"):
            defend_dataset(photos, out, **job | change)
    for other in ({"secret": b"another secret of ours"}, {"secret": None}, {"secret": None, "seed": 0}):
        with pytest.raises(rc.ReactClipError, match=r"\(other seed\); .*'secret [0-9a-f]{16}'"):
            defend_dataset(photos, out, **job | other)
    assert {path: path.read_bytes() for path in tmp_path.glob("out*/*")} == before


def test_bad_requests_are_one_line(clf: rc.ZeroShotClassifier, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"jpg": [b"x"], "id": [1]}), table)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = {
        "nowhere does not exist or holds none of .jpg": {"source": tmp_path / "nowhere"},
        "empty does not exist or holds none of .jpg": {"source": empty},
        "nothing://there cannot be reached": {"source": "nothing://there"},
        "--batch is 0; give at least 1": {"batch": 0},
        "choose an --out outside of it": {"out": photos / "out"},
        "there is no image in the sources": {"source": write_tar(tmp_path / "e.tar", {"a.txt": b"x"})},
    }
    for line, options in refused.items():
        place = {"source": options.pop("source", photos), "out": options.pop("out", tmp_path / "out")}
        with pytest.raises(rc.ReactClipError) as caught:
            defend(**place, clf=clf, **options)
        assert line in str(caught.value)
    for column, says in (("image", "no column 'image'; choose --column among jpg, id"), ("id", "'id' holds no bytes")):
        [row] = collection.read_images({"file": str(table), "done": []}, column)
        assert says in row["error"]


def test_the_command_writes_parts(
    run: Run, clf: rc.ZeroShotClassifier, tiny_folder: Path, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", tiny_folder, "--device", "cpu", "--config", "paper", "--labels", "cat, dog, teapot"]
    command = ["embed", "photos", *options, "--batch", "6", "--quiet", "--seed", "0", "--out", "out", "--json"]
    code, out, _ = run(*command)
    summary = json.loads(out)
    assert (code, summary["images"], summary["errors"], summary["parts"], summary["missing"]) == (0, 20, 1, 4, [])
    expected = rc.ReACT()(clf, [photos / "a" / "00.png"], seed=0)
    assert np.allclose(features(read_rows(tmp_path / "out"))[0], expected.features[0], atol=1e-5)
    (tmp_path / "photos" / "s.tar").write_bytes(b"this is no archive, though it is long enough" * 20)
    code, _, err = run(*command, "--resume")
    assert (code, "photos/s.tar cannot be read" in err) == (2, True)
