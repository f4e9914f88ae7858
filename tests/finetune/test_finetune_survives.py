"""Kills, races, other configurations, full disks and infinities: a run goes on where it was, or gives the reason."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip.finetune import METHODS, Finetuned, Settings, finetune
from react_clip.finetune.folder import read_log

PROGRAM = Path(__file__).with_name("finetune_program.py")
SETTINGS = Settings(
    steps=5, batch=6, save_every=2, lr=1e-3, dtype="fp32", eps=1 / 255, eps_start=1 / 255, check_every=0
)


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("tower.safetensors", "log.csv", "settings.json")}


@pytest.fixture(scope="module")
def ended(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folders of runs in real processes, and what became of these."""
    root = tmp_path_factory.mktemp("processes")
    command = [sys.executable, str(PROGRAM), str(tiny_folder), str(root)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "plain ended 0" in finished.stdout, finished.stdout + finished.stderr
    return root, finished.stdout


@pytest.mark.process
def test_a_killed_run_ends_with_the_same_tower(ended: tuple[Path, str]) -> None:
    root, output = ended
    assert output.count("killed ended -9") == 3, output + "the children were to be killed, not to finish"
    assert "killed ended 0" in output
    assert content(root / "killed") == content(root / "plain")
    rows = read_log(root / "killed" / "log.csv")
    assert [row.step for row in rows] == list(range(1, 13))
    assert [row.step for row in rows if row.clean is not None] == [3, 6, 9, 12]
    left = {path.name for path in (root / "killed").iterdir()}
    assert left == {".lock", "finetune.json", "log.csv", "settings.json", "tower.safetensors"}


@pytest.mark.process
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(ended: tuple[Path, str]) -> None:
    root, output = ended
    refused = [line for line in output.splitlines() if line.startswith("starved refused:")]
    assert len(refused) == 1
    assert "checkpoint.pt" in refused[0]
    assert "choose another place" in refused[0]
    assert "starved left .lock checkpoint.pt log.csv settings.json" in output
    assert output.index("starved ended 2") < output.index("starved ended 0")
    assert content(root / "starved") == content(root / "plain")


class StoppedError(Exception):
    """Raised by a test in the middle of a run."""


def stop_after(step: int) -> Any:
    def progress(done: int, total: int, loss: float) -> None:
        if done == step:
            raise StoppedError

    return progress


def stop(encoder: rc.Encoder, photos: Any, folder: Path, *, step: int = 4, seed: int = 0) -> Path:
    """A run that stopped in the middle."""
    settings = SETTINGS.replace(seed=seed)
    with pytest.raises(StoppedError):
        finetune(encoder, "fare", photos[0], out=folder, settings=settings, progress=stop_after(step))
    return folder


@pytest.fixture
def stopped(encoder: rc.Encoder, photos: Any, tmp_path: Path) -> Path:
    """A run that stopped during its fifth step, after the checkpoint of the fourth."""
    return stop(encoder, photos, tmp_path / "run")


def again(encoder: rc.Encoder, photos: Any, folder: Path, **changes: Any) -> Finetuned:
    return finetune(encoder, "fare", photos[0], out=folder, settings=SETTINGS.replace(**changes))


def test_it_continues_from_the_checkpoint_and_not_from_the_start(
    stopped: Path, encoder: rc.Encoder, photos: Any
) -> None:
    seen: list[int] = []
    settings = SETTINGS.replace(save_every=1)  # how often is no part of the outcome
    finetune(encoder, "fare", photos[0], out=stopped, settings=settings, progress=lambda done, *_: seen.append(done))
    assert seen == [3, 4, 5]
    fresh = again(encoder, photos, stopped.with_name("fresh"))
    assert content(stopped) == content(fresh.folder)
    assert fresh.record["settings"]["eps"] == "1/255"


def test_a_finished_run_is_left_alone(
    encoder: rc.Encoder, photos: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = again(encoder, photos, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != ".lock"}
    (tmp_path / "checkpoint.pt").write_bytes(b"left by a kill at the very end")
    monkeypatch.setattr("react_clip.finetune.steps.Trainer.loss", None)  # nothing is left to compute
    second = again(encoder, photos, tmp_path)
    assert (first.was_finished, second.was_finished) == (False, True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != ".lock"} == before
    pixels = photos[0][:3].float() / 255
    assert torch.equal(first.encoder(pixels), second.encoder(pixels))
    assert second.record == first.record


def test_another_configuration_is_refused_by_name(
    stopped: Path, encoder: rc.Encoder, other_folder: Path, photos: Any, class_features: Tensor
) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir()}

    def refused(other: str, model: rc.Encoder = encoder, pixels: Tensor = photos[0], **changes: Any) -> None:
        with pytest.raises(rc.ReactClipError, match=rf"another run \(other {other}\); .*choose another --out"):
            again(model, (pixels,), stopped, **changes)

    refused(r"settings\.batch, settings\.warmup", batch=3, warmup=2)
    refused(r"settings\.seed", seed=1)
    refused(r"data\.photos", pixels=photos[0].flip(0))
    refused("weights", model=rc.load(other_folder, device="cpu"))
    with pytest.raises(rc.ReactClipError, match=r"another run \(other .*method"):
        finetune(encoder, "tecoa", photos[0], photos[1], class_features, out=stopped, settings=SETTINGS)
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == before


def test_foreign_and_damaged_folders_are_refused(
    stopped: Path, encoder: rc.Encoder, photos: Any, tiny_copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(rc.ReactClipError, match=r"has a config\.json but no settings\.json"):
        again(encoder, photos, tiny_copy)
    checkpoint = stopped / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-9])
    with pytest.raises(rc.ReactClipError, match=r"is damaged .*; remove it to begin again"):
        again(encoder, photos, stopped)
    checkpoint.write_bytes(whole)
    (stopped / "settings.json").unlink()
    with pytest.raises(rc.ReactClipError, match=r"has a checkpoint\.pt but no settings\.json"):
        again(encoder, photos, stopped)
    checkpoint.rename(tmp_path / "moved")
    other = stop(encoder, photos, tmp_path / "other", step=1, seed=1)
    (tmp_path / "moved").rename(other / "checkpoint.pt")
    with pytest.raises(rc.ReactClipError, match="belongs to another run; remove it"):
        again(encoder, photos, other, seed=1)
    with pytest.raises(rc.ReactClipError, match="has not finished"):
        rc.load(other)


@pytest.mark.parametrize("quietly", [False, True])
def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(
    quietly: bool, encoder: rc.Encoder, photos: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fare = METHODS["fare"]

    def exploding(batch: Any, attacked: Tensor) -> Tensor:
        value = fare.loss(batch, attacked)
        if (batch.student(batch.pixels) - batch.original_clean).abs().max() < 1e-6:
            return value
        # The square root of zero is finite, its slope is not.
        return value + ((value - value.detach()).sqrt() if quietly else torch.inf)

    monkeypatch.setitem(METHODS, "fare", dataclasses.replace(fare, loss=exploding))
    message = r"the gradient's length is nan at step 2" if quietly else r"the loss is inf at step 2"
    with pytest.raises(rc.ReactClipError, match=f"{message}.*last checkpoint is kept.*--lr"):
        again(encoder, photos, tmp_path, save_every=1)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 1
    assert all(tensor.isfinite().all() for name in ("weights", "means") for tensor in checkpoint[name].values())
    assert not (tmp_path / "finetune.json").exists()
