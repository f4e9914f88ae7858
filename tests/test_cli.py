"""The command line as people use it: real files, exit codes, one line for bad input, nothing lost when it stops."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import react_clip as rc
from programs import Run
from react_clip import choices
from react_clip.cli import COMMANDS, main
from react_clip.cli.common import build_guard
from react_clip.cli.embed import write_features
from react_clip.secret import _drawn_secret, described
from toys import patch_encoder, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "in")


@pytest.fixture
def tiny(tiny_folder: Path) -> list[str]:
    """Options that run a command on the small CLIP."""
    return ["--model", str(tiny_folder), "--labels", "cat, dog, teapot", "--config", "paper", "--quiet"]


def without_config(options: list[str]) -> list[str]:
    return [option for option in options if option not in ("--config", "paper")]


@pytest.mark.process
@pytest.mark.smoke
def test_a_real_process_answers_and_fails_with_code_2(command: list[str], photos: Path, tiny: list[str]) -> None:
    (photos / "photo1.png").write_bytes(b"no image")
    finished = subprocess.run([*command, "classify", str(photos), *tiny], capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    answered = [str(photos / "photo0.png"), str(photos / "photo2.png")]
    assert [line.partition(": ")[0] for line in finished.stdout.splitlines()] == answered
    assert finished.stderr.startswith(f"react-clip: {photos / 'photo1.png'} is not an image we read")
    assert finished.stderr.count("\n") == 1


def test_a_full_output_is_one_line(
    photos: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["classify", str(photos), *tiny, "--json"]) == 2
    assert capsys.readouterr().err == "react-clip: the output cannot be written: no space left on the device\n"


# ---------------------------------------------------------------------- classify and embed


def test_classify_reads_json_lines(
    run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(photos.iterdir())[:2]
    encoded = base64.b64encode(second.read_bytes()).decode()
    lines = [{"file": str(first)}, {"image": encoded, "file": "mine"}, {"image": f"data:image/png;base64,{encoded}"}]
    wrong = ["no json", '{"image": "?"}', "[]", '{"file": "nowhere.png"}']
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*map(json.dumps, lines), "", *wrong])))
    code, out, err = run("classify", "-", *tiny, "--seed", 0, "--json")
    (tmp_path / "labels.txt").write_text("cat\n\ndog\nteapot")
    same = (first, second, *tiny[:2], "--labels-file", tmp_path / "labels.txt", *tiny[4:], "--top", 2)
    found, files = json.loads(out), json.loads(run("classify", *same, "--seed", 0, "--json")[1])
    assert (code, [row["file"] for row in found["results"]]) == (2, [str(first), "mine", "line 3"])
    assert [row["file"] for row in found["errors"]] == ["line 5", "line 6", "line 7", "nowhere.png"]
    assert err.count("is no photo; write") == 3
    for row, expected in zip(found["results"], [*files["results"], files["results"][1]], strict=True):
        assert row["answers"][0]["label"] == expected["answers"][0]["label"]
        assert row["drift"] == pytest.approx(expected["drift"], abs=1e-4)
        assert row["gated"] == (row["score"] >= 0.7)
        likely, other = expected["answers"]
        assert likely["probability"] >= other["probability"]


def test_a_shadow_answers_plainly_and_says_what_would_change(
    run: Run, photos: Path, tiny: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    names = ["cat", "dog", "teapot", "sea", "sky", "tree"]
    guard = rc.SecondLook(copy_size=None, threshold=0, drift_weight=0)  # answers what lies beyond the copies
    guard.save(tmp_path / "guard.json")
    given = [*tiny[:2], "--labels", ", ".join(names), "--config", tmp_path / "guard.json", "--seed", 0]
    clf, files = rc.ZeroShotClassifier(rc.load(tiny_folder), names), sorted(photos.iterdir())
    plain, out = rc.Undefended()(clf, files).names, guard(clf, files, seed=0)
    changed = [number for number in range(3) if plain[number] != out.names[number]]
    assert changed, "the toy's rule changes an answer"
    code, printed, err = run("classify", photos, *given, "--shadow", "--out", tmp_path / "page", "--json")
    found = json.loads(printed)
    assert (code, [row["answers"][0]["label"] for row in found["results"]]) == (0, plain)
    assert [row["shadow"]["label"] for row in found["results"]] == out.names
    assert (found["shadow"]["changed"], found["shadow"]["share"]["value"]) == (len(changed), len(changed) / 3)
    assert found["shadow"]["passes"] == pytest.approx(float(out.passes.mean()))
    assert rc.defenses.from_dict(found["shadow"]["defense"]) == guard
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count("<img") == len(changed)
    assert f"SecondLook would change {len(changed)} of 3 (" in page
    code, printed, err = run("classify", photos, *given, "--shadow")
    assert printed.count("[defended: ") == len(changed)
    assert f"SecondLook would change {len(changed)} of 3 (" in err


def test_a_calibration_names_the_photos_whose_answers_change(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = patch_encoder()
    monkeypatch.setattr("react_clip.cli.common.load_encoder", lambda args: encoder)
    coarse = torch.rand(40, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, 32, mode="bicubic").clamp(0, 1).mul(255).byte().permute(0, 2, 3, 1)
    for number, array in enumerate(smooth.numpy()):
        (tmp_path / "classes" / f"{number % 5}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(tmp_path / "classes" / f"{number % 5}" / f"{number:02}.png")
    given = (tmp_path / "classes", "--photos", tmp_path / "classes", "--clean-pass", 0.7, "--out", tmp_path / "c.json")
    code, out, err = run("calibrate", *given)
    assert code == 0, err
    calibration = rc.Calibration.load(tmp_path / "c.json")
    files = sorted((tmp_path / "classes").rglob("*.png"))
    names = [str(files[number]) for number in calibration.changed or ()]
    assert names
    assert calibration.provenance["changed_photos"] == names
    assert [line.removeprefix("  changed: ") for line in out.splitlines() if line.startswith("  changed: ")] == names
    assert f"the answer changes for {len(names)} of 40 (" in out
    assert json.loads(run("calibrate", *given, "--json", "--quiet")[1])["provenance"]["changed_photos"] == names


def test_a_full_disk_is_known_before_the_work(
    run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rc.ReACT, "__call__", lambda *args, **options: pytest.fail("nothing is computed"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    code, _, err = run("embed", photos, *tiny, "--out", tmp_path / "new" / "f.npy")
    assert (code, "f.npy, " in err, "No space left on device; choose another place" in err) == (2, True, True)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_both_old_files(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npy"
    write_features(path, torch.eye(2), ["a", "b"], {"model": "old"})

    def fail(*args: object) -> None:
        raise failure

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises((rc.ReactClipError, KeyboardInterrupt)):
        write_features(path, torch.ones(3, 2), ["c", "d", "e"], {"model": "new"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.files.json", "x.npy"]
    assert json.loads((tmp_path / "x.files.json").read_text()) == {"model": "old", "files": ["a", "b"]}
    assert np.load(path, allow_pickle=False).shape == (2, 2)


def test_embed_writes_what_the_default_defence_gives(
    run: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = patch_encoder()
    encoder.name = encoder.weights = "clip-vit-b-16"
    monkeypatch.setattr("react_clip.cli.common.load_encoder", lambda args: encoder)
    classes = write_photos(tmp_path / "classes" / "one").parent
    expected = rc.SecondLook()(rc.ZeroShotClassifier.from_folder(encoder, classes), sorted(photos.iterdir()), seed=0)
    code, _, err = run("embed", photos, "--photos", classes, "--seed", 0, "--out", tmp_path / "f.npy")
    assert (code, err.count("the defence is SecondLook")) == (0, 1), err
    files = json.loads((tmp_path / "f.files.json").read_text())["files"]
    assert np.allclose(np.load(tmp_path / "f.npy", allow_pickle=False), expected.features.numpy(), atol=1e-5)
    assert [Path(name).name for name in files] == ["photo0.png", "photo1.png", "photo2.png"]


def test_the_defence_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    encoder, file = patch_encoder(), str(tmp_path / "mine.json")
    encoder.name = encoder.weights = "clip-vit-b-16"
    rc.SecondLook(threshold=0).save(file)
    for defense, config, guard in (
        (None, None, rc.SecondLook()),
        ("react", None, rc.ReACT.for_encoder("clip-vit-b-16")),
        (None, "paper", rc.ReACT()),
        (None, file, rc.SecondLook(threshold=0)),
    ):
        assert build_guard(Namespace(defense=defense, config=config), encoder) == guard


def test_without_a_seed_the_noise_follows_a_secret(
    run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[object] = []
    answer = rc.ReACT.__call__
    monkeypatch.setattr(
        rc.ReACT, "__call__", lambda self, *args, seed=0: seeds.append(seed) or answer(self, *args, seed=seed)
    )
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    recorded = []
    for given in ([], ["--seed", 3], ["--secret-file", file], []):
        _, out, err = run("classify", photos, *tiny[:-1], *given, "--json")
        assert err.count("the noise is keyed by a new random secret") == (not recorded)
        recorded.append(json.loads(out)["seed"])
        monkeypatch.setenv("REACT_CLIP_SECRET_FILE", str(file))
    mine = b"0123456789abcdef"
    assert seeds == [_drawn_secret(), 3, mine, mine]
    assert recorded == ["random secret", 3, described(mine), described(mine)]
    assert "0123456789abcdef" not in f"{recorded}"


# ---------------------------------------------------------------------- attack and demo


def test_attack_writes_photos_within_the_budget(
    run: Run, photos: Path, tiny: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    options = [*without_config(tiny), "--eps", "8/255", "--steps", 3, "--out", tmp_path / "adv", "--json"]
    code, out, _ = run("attack", photos, *options)
    assert code == 0
    encoder = rc.load(tiny_folder)
    for row in json.loads(out)["results"]:
        change = encoder.prepare([row["attacked"]]) - encoder.prepare([row["file"]])
        assert 0 < change.abs().max() <= 8 / 255 + 1e-6


def test_the_demo_prints_outcomes_and_writes_one_page(
    run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rc.SecondLook, "for_encoder", lambda encoder: rc.SecondLook(copy_size=None))
    page = tmp_path / "page" / "index.html"
    options = [*tiny, "--steps", 2, "--out", page.parent]
    code, out, _ = run("demo", photos / "photo0.png", photos / "photo1.png", *options)
    assert code == 0
    assert out.count(" 8/255") == out.count(" noise 0.02") == 2
    for text in ("passes are encoder passes", "CLIP says", "ReACT says", str(page)):
        assert text in out
    html = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', html), "the page stands alone"
    assert "threshold=" in html
    assert "tau=" in html
    code, out, _ = run("demo", photos / "photo0.png", *options, "--json")
    assert code == 0
    outcomes = json.loads(out)["photos"][0]["outcomes"]
    assert [(outcome["eps"], outcome["noise"]) for outcome in outcomes] == [(0, 0), (0, 0.02), (4, 0), (8, 0)]
    for outcome in outcomes:
        assert set(outcome["plain"]) == {"name", "probability"}
        assert {"drift", "sigma", "gated", "passes"} <= set(outcome["react"])
        assert outcome["second_look"]["sigma"] is None


# ---------------------------------------------------------------------- stopped


@pytest.mark.parametrize("command", ["classify", "classify --json", "embed", "demo", "attack", "attack --json"])
def test_what_is_finished_is_kept_when_a_command_is_stopped(
    command: str, run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3, 6):
        Image.new("RGB", (40, 40)).save(photos / f"photo{number}.png")
    name, *json_flag = command.split()
    stopped: type[Any] = rc.attacks.PGD if name == "attack" else rc.ReACT
    answer, calls = stopped.__call__, iter(range(100))

    def stop_at_the_second_batch(self: object, *args: object, **kwargs: object) -> object:
        if next(calls):
            raise KeyboardInterrupt
        return answer(self, *args, **kwargs)

    monkeypatch.setattr(stopped, "__call__", stop_at_the_second_batch)
    out = {
        "embed": ["--out", tmp_path / "f.npy"],
        "demo": ["--out", tmp_path / "page", "--steps", 1],
        "attack": ["--out", tmp_path / "adv", "--steps", 1],
    }.get(name, [])
    code, printed, err = run(name, photos, *(without_config(tiny) if name == "attack" else tiny), *json_flag, *out)
    assert code == 130
    kept = f"; 4 x 32 features in {tmp_path / 'f.npy'}" if name == "embed" else ""
    assert err.splitlines()[-1] == f"react-clip: stopped{kept}"
    folder = tmp_path / "adv" if name == "attack" else photos
    expected = [str(folder / f"photo{number}.png") for number in range(4)]
    if json_flag:
        assert len(json.loads(printed)["results"]) == 4
    elif name in ("attack", "classify"):
        assert [line.partition(": ")[0] for line in printed.splitlines()] == expected
        assert all(Path(file).is_file() for file in expected)
    elif name == "embed":
        assert len(np.load(tmp_path / "f.npy", allow_pickle=False)) == 4
        assert json.loads((tmp_path / "f.files.json").read_text())["files"] == expected
    else:
        assert "photo0.png" in (tmp_path / "page" / "index.html").read_text()


def test_a_run_that_continues_says_so_when_it_is_stopped(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("react_clip.evaluation.Recipe.load", stop)
    code, _, err = run("evaluate", photos / "photo0.png")
    assert (code, err) == (130, "react-clip: stopped; the same command continues\n")


# ---------------------------------------------------------------------- bad input


QUICK = {
    "--version": "",
    "--help": "",
    **{f"{name} --help": "" for name in COMMANDS},
    **{f"{name} --nonsense": "react-clip: " for name in COMMANDS},
    "classify nowhere.jpg": "nowhere.jpg does not exist; check the path",
    "classify empty": "empty holds no photos (.jpg, ",
    "classify empty --top 0": "--top: '0': Input should be greater than or equal to 1",
    "classify empty --seed my-secret": "--seed: invalid int value: 'my-secret'",
    "classify empty --seed 1 --secret-file empty": "--secret-file: not allowed with argument --seed",
    "classify empty --config paper --defense react": "--defense: not allowed with argument --config",
    "classify empty --shadow magic": "--shadow: invalid choice: 'magic'",
    "classify empty --shadow --defense react": "--shadow second_look runs beside plain CLIP; leave out --defense react",
    "classify empty --out page": "--out is page, the folder for the page of --shadow; add --shadow too",
    "embed empty --out f.npy --resume": "--resume and --engine ray are for Parquet files; give --out a folder",
    "embed empty --out f.txt": "must end in .npy, or be a folder",
    "embed empty --out folder --workers 2": "--workers is 2, but the engine is local; add --engine ray",
    "attack empty --out adv --eps four": "--eps: 'four': it must be a number such as 4/255",
    "attack empty --out adv --eps 4": "--eps: '4': pixels lie in [0, 1], so write 4/255",
    "check my-clip empty": "empty holds no photos (.jpg, ",
    "calibrate folder:nowhere": "nowhere does not exist",
    "calibrate empty --clean-pass 97": "--clean-pass: '97': Input should be less than or equal to 1",
    "evaluate empty --seeds 0,-1": "--seeds: '0,-1': Input should be greater than or equal to 0",
    "rank empty --out z.xlsx": "--out: 'z.xlsx' must end in one of .html, .csv, .md",
    "finetune magic folder:empty --out f --quiet": "method: invalid choice: 'magic' (choose from ",
    "export clip-vit-b-16 --out .": ". is there already; remove it, or choose another --out",
}
"""Command lines that import nothing heavy, and what they print to stderr; help and the version print nothing there."""


def test_help_and_wrong_arguments_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    program = """
import contextlib, io, json, shlex, sys
from react_clip.cli import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = main(shlex.split(line))
        except SystemExit as stopped:
            code = stopped.code
    slow = {"torch", "transformers", "numpy", "pandas", "PIL", "tqdm"} & sys.modules.keys()
    print(json.dumps([line, code, out.getvalue(), err.getvalue(), sorted(slow)]))
"""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(QUICK),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    results = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [line for line, *_ in results] == list(QUICK)
    for line, code, out, err, slow in results:
        assert slow == [], line
        assert QUICK[line] in err, line
        assert err.count("\n") == bool(QUICK[line]), line
        assert code == (2 if QUICK[line] else 0), line
        if line.endswith(" --help"):
            text = re.sub(r"\s+", " ", out)
            assert f"example: react-clip {line.removesuffix(' --help')}" in text
            assert "--json" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("classify --labels cat,,dog", "label 2 of 3 is blank"),
        ("classify --labels-file .", ". cannot be read: Is a directory"),
        ("classify --labels-file /dev/null", "/dev/null holds no names; write one a line"),
        ("classify --labels cat --config .", ". cannot be read: Is a directory"),
        ("classify --labels cat --defense second_look", "of SecondLook, and every encoder needs its own"),
        ("classify --labels cat --defense react", "of ReACT, and every encoder needs its own"),
        ("classify --labels cat", "hundred clean photos: `react-clip calibrate PHOTOS"),
        ("attack --labels cat --out adv --attack magic", "attack 'magic' does not exist"),
        ("rank nowhere.py:Mine", "nowhere.py does not exist"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, photos: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(photos)
    name, *words = shlex.split(line)
    photo = ["photo0.png", "--model", tiny_folder] if name != "rank" else []
    code, out, err = run(name, *photo, *words, "--quiet")
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not Path("adv").exists()


def test_help_lists_what_is_registered() -> None:
    from react_clip import calibration, finetune

    assert list(choices.ATTACKS) == rc.attacks.names("oblivious")
    assert list(choices.DEFENSES) == rc.defenses.names()
    assert list(choices.FINETUNING) == finetune.names()
    assert list(choices.MAPPINGS) == list(calibration._FITS)
    assert list(choices.dataset_names()) == rc.data.names()


def test_a_missing_package_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for command in ("evaluate", "report", "rank"):
        code, _, err = run(command, tmp_path)
        assert code == 2, command
        assert "needs pandas, which is missing; in the checkout of react-clip: pip install -e '.[eval]'" in err
        assert err.count("\n") == 1
