"""Photos of any origin give the same squares, in memory or read ahead; what cannot be read is named and left out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import react_clip as rc
import tiny_clip
from react_clip.data.formats import find_photos
from react_clip.finetune import Settings, finetune
from react_clip.finetune import photos as reading
from react_clip.finetune.check import Check
from react_clip.finetune.folder import read_log
from react_clip.finetune.photos import Photos
from react_clip.finetune.steps import Trainer
from react_clip.preprocess import Preprocessing
from toys import picture, save_photo

HOW = Preprocessing.paper(tiny_clip.SIZE)
SETTINGS = Settings(steps=4, batch=8, lr=1e-3, dtype="fp32", check_every=2, seed=1)


def write_folder(root: Path) -> None:
    for number in range(24):
        save_photo(root / f"{number % 2}" / f"{number:02d}.png", number)


def write_tar(root: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(root / "%02d.tar"), maxcount=20, verbose=0) as shards:
        for number in range(24):
            shards.write({"__key__": f"{number:02d}", "png": picture(number), "json": {"number": number}})


def write_parquet(root: Path) -> None:
    import pyarrow.parquet

    rows = [picture(number) for number in range(24)]
    table = pyarrow.table({"number": list(range(24)), "image": [{"bytes": row, "path": None} for row in rows]})
    pyarrow.parquet.write_table(table, root / "a.parquet")


WRITERS = {"folder": write_folder, "tar": write_tar, "parquet": write_parquet}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_origin_gives_the_same_squares_in_memory_and_read_ahead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REACT_CLIP_CACHE", str(tmp_path / "cache"))
    (root := tmp_path / "photos").mkdir()
    WRITERS[kind](root)
    (root / "broken.jpg").write_bytes(b"no photo")
    (root / "broken.tar").write_bytes(b"no shard" * 100)
    found = find_photos(root)
    assert len(found) == 26
    memory, ahead = Photos(found, HOW), Photos(found, HOW)
    memory.load(torch.device("cpu"))
    monkeypatch.setattr(reading, "free_memory", lambda device: 1)
    ahead.load(torch.device("cpu"))
    assert (memory._stack is None, ahead._stack is None) == (False, True)
    order = [torch.arange(26).roll(3 * step)[:10] for step in range(7)]
    batches = [list(photos.batches(iter(order))) for photos in (memory, ahead)]
    assert all(torch.equal(one[1], other[1]) for one, other in zip(*batches, strict=True))
    assert all(torch.equal(chosen, one[0]) for chosen, one in zip(order, batches[0], strict=True))
    assert memory.unreadable.keys() == ahead.unreadable.keys() == {"photos/broken.jpg", "photos/broken.tar"}
    squares = memory.take(torch.arange(26)).flatten(1)
    assert memory.take(torch.tensor([0])).shape[-1] == HOW.resize
    assert len(squares.unique(dim=0)) == 24, "neighbours stand in for the two"
    largest = Preprocessing(HOW.resize, HOW.resize, interpolation=HOW.interpolation)
    expected = [np.asarray(largest(Image.open(io.BytesIO(picture(number))))).sum() for number in range(24)]
    assert {int(each.sum()) for each in squares} == {int(each) for each in expected}


def test_a_damaged_shard_is_named_and_gives_what_comes_before(tmp_path: Path) -> None:
    write_tar(tmp_path)
    first = tmp_path / "00.tar"
    with tarfile.open(first) as archive:
        places = [member.offset for member in archive]
    content = bytearray(first.read_bytes())
    content[places[20] : places[20] + 300] = b"x" * 300
    first.write_bytes(content)
    found = find_photos(tmp_path)
    assert [photo.id for photo in found.photos if photo.id.endswith("00.tar")] == [f"{tmp_path.name}/00.tar"]
    assert 10 < len(found) < 25
    (tmp_path / "none").mkdir()
    with pytest.raises(rc.ReactClipError, match="holds no photos"):
        find_photos(tmp_path / "none")
    (tmp_path / "none" / "a.png").write_bytes(b"")
    bad = Photos(find_photos(tmp_path / "none"), HOW)
    with pytest.raises(rc.ReactClipError, match=r"none of the 1 photos can be read, such as none/a.png"):
        bad.load(torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    write_folder(root)
    (root / "broken.png").write_bytes(b"no photo")
    return root


def test_init_starts_from_other_weights_towards_the_same_target(
    encoder: rc.Encoder, other_openai: Path, folder: Path, tmp_path: Path
) -> None:
    settings = SETTINGS.replace(steps=1, lr=1e-9, check_every=0)
    photos = find_photos(folder)
    first = finetune(encoder, "fare", photos, out=tmp_path / "a", init=other_openai, settings=settings)
    again = finetune(encoder, "fare", photos, out=tmp_path / "b", init=first.folder, settings=settings)
    pixels = torch.rand(2, 3, tiny_clip.SIZE, tiny_clip.SIZE, generator=torch.Generator().manual_seed(0))
    other = rc.load(f"{encoder.name}+{other_openai}", device="cpu")
    for run in (first, again):
        assert torch.allclose(run.encoder.raw(pixels), other.raw(pixels), atol=1e-4)
        assert run.record["model"] == encoder.name
        assert run.record["first_loss"] > 10, "the target is the original"
        assert [*run.record["unreadable"]] == [f"{folder.name}/broken.png"]
    with pytest.raises(rc.ReactClipError, match=r"another run \(other init\)"):
        finetune(encoder, "fare", photos, out=tmp_path / "a", settings=settings)
    with pytest.raises(rc.ReactClipError, match=r"tower.safetensors does not exist"):
        finetune(encoder, "fare", photos, out=tmp_path / "c", init=folder, settings=settings)


@pytest.mark.parametrize(
    ("curve", "masked"), [((0.9, 0.5, 0.2), False), ((0.9, 0.1, 0.3), True), ((0.5, 0.6, 0.2), True)]
)
def test_a_curve_that_rises_with_the_budget_stops_the_run(
    curve: tuple[float, ...],
    masked: bool,
    encoder: rc.Encoder,
    photos: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Check, "_accuracy", lambda self, eps: dict(zip((0, 1 / 255, 2 / 255), curve, strict=True))[eps])
    if not masked:
        run = finetune(encoder, "fare", photos[0], out=tmp_path, settings=SETTINGS)
        assert read_log(run.folder / "log.csv")[1][3:] == curve
        return
    with pytest.raises(rc.ReactClipError, match=r"held-out accuracy after step 2 is .* rises with the budget.*masked"):
        finetune(encoder, "fare", photos[0], out=tmp_path, settings=SETTINGS)


def test_held_out_photos_are_not_trained_on_and_checked_against_their_own_features(
    encoder: rc.Encoder, photos: Any
) -> None:
    trainer = Trainer(encoder, "fare", photos[0], None, None, SETTINGS)
    seen = {int(index) for step in range(10) for index in trainer.chosen(step)}
    assert seen == {*trainer.trained.tolist()}
    assert len(seen) == 22
    check = Check(trainer)
    held = sorted({*range(24)} - seen)
    assert torch.equal(check.batches[0][0], photos[0][held].float() / 255)
    clean, half, full = check(1)
    assert clean == 1.0, "an untrained tower finds every photo's own feature"
    assert clean >= half >= full


@pytest.mark.process
def test_two_processes_give_the_losses_of_one(tiny_folder: Path, folder: Path, tmp_path: Path) -> None:
    words = ["-m", "react_clip", "finetune", "fare", str(folder), "--model", str(tiny_folder), "--device", "cpu"]
    words += ["--quiet", "--steps=4", "--batch=8", "--lr=1e-3", "--dtype=fp32", "--check-every=2", "--out"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for out, launcher in ((tmp_path / "one", []), (tmp_path / "two", torchrun)):
        done = subprocess.run(
            [sys.executable, *launcher, *words, str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("fare: 4 steps") == 1
    one, two = (read_log(tmp_path / name / "log.csv") for name in ("one", "two"))
    assert [row.loss for row in one] == pytest.approx([row.loss for row in two], rel=1e-4)
    assert [row.lr for row in one] == [row.lr for row in two]
    assert [row[3:] for row in one] == [pytest.approx(row[3:]) if row.clean else row[3:] for row in two]
