"""``react-clip finetune`` from photos on disk to a model that the other commands use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import react_clip as rc
from programs import Run
from react_clip.cli import main
from react_clip.finetune.folder import read_log
from react_clip.storage import sha256_of

NAMES = ("reed", "brick", "cloth", "sand")
RECIPE = "--eps 2/255 --eps-start 1/255 --ramp 0.5 --attack-steps 3 --clean 0.5 --crop 0.5,1 --cutmix 0.5 --average 0.9"


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Class features of the tiny CLIP do not belong into anybody's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REACT_CLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def root(photos: tuple[Tensor, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos as PNG below ``stripes/train/<class>/``."""
    root = tmp_path_factory.mktemp("data")
    for number, (pixels, label) in enumerate(zip(*photos, strict=True)):
        folder = root / "stripes" / "train" / NAMES[int(label)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{number:02d}.png")
    return root


@pytest.fixture(scope="module")
def tuned(root: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tower finetuned by the command."""
    out = tmp_path_factory.mktemp("runs") / "tecoa"
    arguments = ["finetune", "tecoa", "stripes", "--data", root, "--model", tiny_folder, "--out", out]
    arguments += ["--steps", 6, "--batch", 8, "--lr", "1e-3", "--save-every", 3, "--check-every", 3, "--device", "cpu"]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as stdout,
        redirect_stderr(StringIO()) as stderr,
    ):
        patch.setattr(sys, "argv", ["react-clip", *map(str, arguments)])
        assert main(sys.argv[1:]) == 0, stderr.getvalue()
    assert "tecoa: 6 steps on 22 photos" in stdout.getvalue()
    assert f"use it with --model {out}" in stderr.getvalue()
    return out


@pytest.fixture
def tune(root: Path, tiny_folder: Path, run: Run) -> Run:
    """Runs ``react-clip finetune METHOD DATA`` on the photos and the tiny CLIP, and adds further words."""

    def call(method: str, data: str, *words: object) -> tuple[int, str, str]:
        return run(
            "finetune", method, data, "--data", root, "--model", tiny_folder, "--device", "cpu", "--quiet", *words
        )

    return call


def test_the_command_leaves_a_whole_folder(tuned: Path, tiny_folder: Path) -> None:
    left = {path.name for path in tuned.iterdir()}
    assert left >= {"finetune.json", "index.html", "log.csv", "loss.svg", "settings.json", "tower.safetensors"}
    assert "checkpoint.pt" not in left
    record = json.loads((tuned / "finetune.json").read_text())
    expected = {
        "method": "tecoa",
        "model": str(tiny_folder),
        "sha256": sha256_of(tuned / "tower.safetensors"),
        "photos": 22,
        "held_out": 2,
        "classes": 4,
        "class_source": "prompts (This is a photo of a {}.)",
    }
    assert {name: record[name] for name in expected} == expected
    assert record["command"].startswith("react-clip finetune tecoa stripes")
    assert record["final_loss"] < record["first_loss"]
    rows = read_log(tuned / "log.csv")
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[0].loss == record["first_loss"]


def test_the_same_command_again_says_that_it_is_done(tuned: Path, tune: Run) -> None:
    before = sha256_of(tuned / "finetune.json")
    words = "--steps", 6, "--batch", 8, "--check-every", 3, "--lr", "1e-3"
    code, out, _ = tune("tecoa", "stripes", "--out", tuned, *words)
    assert (code, out) == (0, f"{tuned} is finished already: tecoa, 6 steps; nothing was done\n")
    assert sha256_of(tuned / "finetune.json") == before


def test_fare_needs_neither_text_nor_heads(root: Path, tmp_path: Path, tune: Run) -> None:
    arguments = f"--steps 2 --batch 16 --limit 20 --dtype bf16 --half --lr 2e-5 {RECIPE} --json".split()
    code, out, err = tune("fare", f"folder:{root / 'stripes'}", "--out", tmp_path / "fare", *arguments)
    assert code == 0, err
    record = json.loads(out)
    assert (record["settings"]["steps"], record["photos"], record["classes"]) == (2, 18, 0)
    assert record["class_source"] == "none needed"
    assert record["tower"]["dtype"] == "fp16"
    expected = {"eps": "2/255", "eps_start": "1/255", "clean": 0.5, "crop": [0.5, 1.0], "cutmix": 0.5, "average": 0.9}
    assert {name: record["settings"][name] for name in expected} == expected
    assert record["was_finished"] is False
    assert rc.load(tmp_path / "fare", device="cpu", dtype="bf16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["tecoa", "nothing"], "data set 'nothing' is not known"),
        (["tecoa", "folder:empty"], "empty has no train photos"),
        (["tecoa", "stripes", "--heads", "empty.npz"], "holds no class features"),
    ],
)
def test_mistakes_are_one_line(
    changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.npz").write_bytes(b"nothing")
    code, out, err = tune(*changes, "--out", tmp_path / "out")
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
