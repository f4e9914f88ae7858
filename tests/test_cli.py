"""The command line as people use it: real processes, real files, exit codes, one line for bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import react_clip as rc
from programs import Run
from react_clip import calibration, choices, finetune
from react_clip.cli import COMMANDS, main
from react_clip.cli.photos import bundled_photos
from react_clip.cli.progress import Progress
from react_clip.environment import has_fast_bf16
from react_clip.preprocess import to_pixels
from toys import patch_encoder, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "in")


@pytest.fixture
def tiny(tiny_folder: Path) -> list[str]:
    """Options that run a command on the small CLIP."""
    return ["--model", str(tiny_folder), "--labels", "cat, dog, teapot", "--config", "paper", "--quiet"]


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        text = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert f"example: react-clip {name}" in text
        assert "--json" in text


def test_a_real_process_answers_and_fails_with_code_2(command: list[str], photos: Path, tiny: list[str]) -> None:
    (photos / "photo1.png").write_bytes(b"no image")
    finished = subprocess.run([*command, "classify", str(photos), *tiny], capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    assert [line.partition(": ")[0] for line in finished.stdout.splitlines()] == [
        str(photos / "photo0.png"),
        str(photos / "photo2.png"),
    ]
    assert finished.stderr.startswith(f"react-clip: {photos / 'photo1.png'} is not an image we read")
    assert finished.stderr.count("\n") == 1


def test_classify_gives_json_with_diagnostics(run: Run, photos: Path, tiny: list[str]) -> None:
    code, out, _ = run("classify", photos, *tiny, "--json", "--top", 2)
    assert code == 0
    results = json.loads(out)["results"]
    assert [Path(row["file"]).name for row in results] == ["photo0.png", "photo1.png", "photo2.png"]
    for row in results:
        assert len(row["answers"]) == 2
        assert row["answers"][0]["probability"] >= row["answers"][1]["probability"]
        assert row["passes"] in (3, 4, 13, 14)
        assert row["gated"] == (row["score"] >= 0.7)


def test_embed_writes_defended_features(
    run: Run, photos: Path, tiny: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "features.safetensors"
    assert run("embed", photos, *tiny, "--seed", 0, "--out", out)[0] == 0
    with safe_open(out, "pt") as stream:
        features, files = stream.get_tensor("features"), json.loads(stream.metadata()["files"])
    assert [Path(name).name for name in files] == ["photo0.png", "photo1.png", "photo2.png"]
    clf = rc.ZeroShotClassifier(rc.load(tiny_folder), ["cat", "dog", "teapot"])
    expected = rc.ReACT()(clf, sorted(photos.iterdir()), seed=0).features
    assert torch.allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "guard", "line"),
    [
        ([], rc.SecondLook(), "the defence is SecondLook; --defense react gives the paper's"),
        (["--defense", "second_look"], rc.SecondLook(), "the defence is SecondLook"),
        (["--defense", "react"], rc.ReACT.constants_for("clip-vit-b-16"), "the defence is ReACT, the paper's"),
        (["--config", "paper"], rc.ReACT(), "the defence is ReACT, the paper's; --defense second_look gives ours"),
        (["--config", "look.json"], rc.SecondLook(threshold=0), "the defence is SecondLook"),
    ],
)
def test_the_defence_is_second_look_unless_another_is_asked_for(
    run: Run,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    guard: rc.Defense,
    line: str,
) -> None:
    encoder = patch_encoder()
    encoder.name = "clip-vit-b-16"
    monkeypatch.setattr("react_clip.cli.common.load_encoder", lambda args: encoder)
    monkeypatch.chdir(tmp_path)
    rc.SecondLook(threshold=0).save("look.json")
    for name in ("red", "blue"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), name).save(tmp_path / "classes" / name / "0.png")
    clf = rc.ZeroShotClassifier.from_folder(encoder, tmp_path / "classes")
    expected = guard(clf, sorted(photos.iterdir()), seed=0)

    code, _, err = run("embed", photos, "--photos", "classes", *options, "--seed", 0, "--out", "features.npy")
    assert code == 0
    assert err.count(line) == err.count("the defence is") == 1
    assert np.allclose(np.load("features.npy", allow_pickle=False), expected.features.numpy(), atol=1e-5)
    assert len(json.loads(Path("features.files.json").read_text())["files"]) == 3

    code, out, err = run("classify", photos, "--photos", "classes", *options, "--json")
    assert code == 0
    assert err.count(line) == err.count("the defence is") == 1
    for row in json.loads(out)["results"]:
        assert (row["sigma"] is None) == isinstance(guard, rc.SecondLook)
        assert (row["passes"] % 1 == 0) == isinstance(guard, rc.ReACT)


def test_without_a_seed_the_noise_follows_a_secret(
    run: Run, photos: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[object] = []
    answer = rc.ReACT.__call__
    monkeypatch.setattr(
        rc.ReACT, "__call__", lambda self, *args, seed=0: seeds.append(seed) or answer(self, *args, seed=seed)
    )
    options = ["--model", tiny_folder, "--labels", "cat, dog", "--config", "paper"]
    for given in ([], [], ["--seed", 3]):
        _, _, err = run("classify", photos, *options, *given)
        assert err.count("the noise is keyed by a new random secret") == (not given)
    secret, again, number = seeds
    assert isinstance(secret, bytes)
    assert len(secret) == 32
    assert secret == again, "one secret per process"
    assert number == 3


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
    options = [option for option in tiny if name != "attack" or option not in ("--config", "paper")]
    code, printed, err = run(name, photos, *options, *json_flag, *out)
    assert code == 130
    assert "stopped; finished work is kept" in err
    if json_flag:
        assert len(json.loads(printed)["results"]) == 4
    elif name == "attack":
        lines = [line.partition(": ")[0] for line in printed.splitlines()]
        assert lines == [str(tmp_path / "adv" / f"photo{number}.png") for number in range(4)]
        assert all(Path(line).is_file() for line in lines)
    elif name == "classify":
        assert [line.partition(": ")[0] for line in printed.splitlines()] == [
            str(photos / f"photo{number}.png") for number in range(4)
        ]
    elif name == "embed":
        assert len(np.load(tmp_path / "f.npy", allow_pickle=False)) == 4
        assert len(json.loads((tmp_path / "f.files.json").read_text())["files"]) == 4
    else:
        assert "photo0.png" in (tmp_path / "page" / "index.html").read_text()


QUICK = {
    "--version": "",
    "--help": "",
    **{f"{name} --help": "" for name in COMMANDS},
    **{f"{name} --nonsense": "error: " for name in COMMANDS},
    "classify nowhere.jpg": "nowhere.jpg does not exist; check the path",
    "classify empty": "empty holds no photos (.jpg, ",
    "classify empty --top 0": "--top is 0; it must be at least 1",
    "classify empty --labels-file nowhere.txt": "nowhere.txt does not exist; check --labels-file",
    "classify empty --photos nowhere": "nowhere does not exist; check --photos",
    "classify empty --config nowhere.json": "nowhere.json does not exist; check --config",
    "classify empty --calibrate-on nowhere": "nowhere does not exist; check --calibrate-on",
    "demo nowhere.jpg": "nowhere.jpg does not exist",
    "demo --steps 0": "--steps is 0; it must be at least 1",
    "embed nowhere --out f.npy": "nowhere does not exist",
    "embed nowhere --out folder": "nowhere does not exist",
    "embed empty --out folder --chunk 0": "--chunk is 0; it must be at least 1",
    "attack nowhere.jpg --out adv": "nowhere.jpg does not exist",
    "attack empty --out adv --eps four": "--eps is 'four'; it must be a number such as 4/255",
    "attack empty --out adv --eps 4": "--eps is '4'; pixels lie in [0, 1], so write 4/255",
    "attack empty --out adv --steps 0": "--steps is 0; it must be at least 1",
    "evaluate nowhere.yaml": "nowhere.yaml does not exist; give a file like",
    "evaluate empty --data nowhere": "nowhere does not exist; check --data",
    "evaluate empty --limit 0": "--limit is 0; it must be at least 1",
    "calibrate nowhere/": "nowhere does not exist",
    "calibrate folder:nowhere": "nowhere does not exist",
    "calibrate empty --clean-pass 97": "--clean-pass is 97.0; it is a share of clean photos",
    "calibrate empty --defense react --sigmas a": "--sigmas is 'a'; give numbers such as",
    "calibrate empty --defense react --mapping cubic": "--mapping: invalid choice: 'cubic'",
    "report nowhere": "nowhere does not exist; give the --out folder of",
    "report empty --rows -1": "--rows is -1; it must be at least 0",
    "rank nowhere": "nowhere does not exist; give a folder of",
    "rank nowhere.py:Mine": "nowhere.py does not exist; give the file that defines the defence",
    "rank empty --timings nowhere.json": "nowhere.json does not exist; check --timings",
    "bench nowhere.jpg": "nowhere.jpg does not exist",
    "bench --batch 0": "--batch is 0; it must be at least 1",
    "bench --eps 300": "so write 300/255",
    "bench --shapes ViT-Z-1": "--shapes is 'ViT-Z-1'; choose one of ViT-B-32, ViT-B-16",
    "finetune magic folder:empty --out f": "method 'magic' does not exist; choose one of clip-ft, fare",
    "finetune fare folder:nowhere --out f": "nowhere does not exist",
    "finetune fare folder:empty --out f --steps 0": "steps is 0; it must be a whole number >= 1",
    "finetune fare folder:empty --out f --lr -1": "lr is -1.0; it must be > 0",
    "finetune fare folder:empty --out f --eps 4": "so write 4/255",
    "export clip-vit-b-16 --format onnx --out f --photos nowhere": "nowhere does not exist",
    "export clip-vit-b-16 --format onnx --out f --tolerance 0": "--tolerance is 0.0; it must be above 0",
    "export clip-vit-b-16 --format onnx --out .": ". is there already; remove it, or choose another --out",
    "serve --port 70000": "--port is '70000'",
    "serve --labels-file nowhere.txt": "nowhere.txt does not exist; check --labels-file",
    "serve --secret-file nowhere": "nowhere cannot be read",
}
"""Command lines that import nothing heavy, and what they print to stderr; help and the version print nothing there."""


def test_help_and_wrong_arguments_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    program = """
import contextlib, io, json, shlex, sys
from react_clip.cli import main
for line in sys.stdin.read().splitlines():
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(shlex.split(line))
        except SystemExit as stopped:
            code = stopped.code
    slow = {"torch", "transformers", "numpy", "pandas", "PIL", "tqdm"} & sys.modules.keys()
    print(json.dumps([line, code, err.getvalue(), sorted(slow)]))
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
    for line, code, err, slow in results:
        assert slow == [], line
        assert QUICK[line] in err, line
        assert bool(err) == bool(QUICK[line]), line
        assert code == (2 if QUICK[line] else 0), line


def test_help_lists_what_is_registered() -> None:
    assert list(choices.ATTACKS) == rc.attacks.names("oblivious")
    assert list(choices.DEFENSES) == rc.defenses.names()
    assert list(choices.FINETUNING) == finetune.names()
    assert list(choices.MAPPINGS) == list(calibration._FITS)
    assert list(choices.dataset_names()) == rc.data.names()


def test_a_photo_that_is_too_large_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("react_clip.encoders.load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")
    for command in (["classify"], ["demo", "--out", tmp_path / "page"]):
        code, _, err = run(*command, tmp_path / "large.png", "--labels", "cat, dog")
        assert code == 2
        assert "81,000,000 pixels; the limit is 64,000,000" in err


def test_embed_leaves_nothing_when_it_cannot_finish(run: Run, photos: Path, tiny: list[str], tmp_path: Path) -> None:
    for path in photos.iterdir():
        path.write_bytes(b"")
    code, _, err = run("embed", photos, *tiny, "--out", tmp_path / "out.npy")
    assert code == 2
    assert "none of the 3 files could be read; nothing was written" in err
    assert not list(tmp_path.glob("out*"))


def test_attack_writes_photos_within_the_budget(run: Run, photos: Path, tiny: list[str], tmp_path: Path) -> None:
    options = [option for option in tiny if option not in ("--config", "paper")]
    code, out, _ = run("attack", photos, *options, "--eps", "8/255", "--steps", 3, "--out", tmp_path / "adv", "--json")
    assert code == 0
    for row in json.loads(out)["results"]:
        attacked, clean = to_pixels(row["attacked"], 32), to_pixels(row["file"], 32)
        assert 0 < (attacked - clean).abs().max() <= 8 / 255 + 1e-6


def test_the_demo_prints_outcomes_and_writes_one_page(run: Run, photos: Path, tiny: list[str], tmp_path: Path) -> None:
    options = [*tiny, "--steps", 2, "--out", tmp_path / "page"]
    code, out, _ = run("demo", photos / "photo0.png", photos / "photo1.png", *options)
    assert code == 0
    assert str(tmp_path / "page" / "index.html") in out
    assert out.count(" 8/255") == 2
    assert out.count(" noise 0.0") == 1
    assert "passes are encoder passes of CLIP / ReACT." in out
    for word in ("CLIP says", "ReACT says", "passes"):
        assert word in out
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count("<img") == 2 * (1 + 2 * 2) + 2, "clean, twice attacked with perturbations; one photo with noise"
    assert not re.search(r'(src|href)="(?!data:)', page), "the page stands alone"


def test_the_demo_shows_both_defences(
    run: Run, photos: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rc.SecondLook, "for_encoder", lambda encoder: rc.SecondLook(look=None))
    options = [option for option in tiny if option != "--quiet"]
    code, out, err = run(
        "demo", photos / "photo0.png", *options, "--json", "--full", "--steps", 1, "--out", tmp_path / "page"
    )
    assert code == 0
    assert "the defences are ReACT (the paper's) and SecondLook (ours)" in err
    outcomes = json.loads(out)["photos"][0]["outcomes"]
    assert [outcome["eps"] for outcome in outcomes] == [0, 0, 1, 4, 8, 16]
    assert [outcome["noise"] > 0 for outcome in outcomes] == [False, True, False, False, False, False]
    for outcome in outcomes:
        assert set(outcome["plain"]) == {"name", "probability"}
        assert {"drift", "sigma", "gated", "passes"} <= set(outcome["react"])
        assert outcome["second_look"]["branch"] in ("keep", "blend", "correct")
        assert outcome["second_look"]["sigma"] is None
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count('<span class="who">SecondLook</span>') == page.count('<span class="who">ReACT</span>') == 6
    assert "ReACT with tau" in page
    assert "SecondLook with t" in page


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=False, unit="step", total=4) as progress:
        progress.show("loading")
        progress.show("attacking")
        progress.show("attacking", done=3)
        progress.write("a result")
        progress.show("defending")
    captured = capsys.readouterr()
    stages = [line.partition("] ")[2] for line in captured.err.splitlines() if "working" not in line]
    assert list(dict.fromkeys(stages)) == ["loading", "attacking", "defending, 3 of 4 steps"]
    assert captured.out == "a result\n"
    with Progress(quiet=True, unit="step") as progress:
        progress.show("loading")
    assert capsys.readouterr().err == ""


def test_the_demo_brings_its_own_photos() -> None:
    photos = bundled_photos()
    assert len(photos) >= 6
    assert all(to_pixels(path, 224).shape == (3, 224, 224) for path in photos)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16", True),
        ("Features\t: fp asimd asimddp", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("model name\t: bf16", False),
    ],
)
def test_the_demo_takes_bf16_only_where_the_cpu_has_it(line: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert has_fast_bf16(tmp_path / "cpuinfo") is expected
    assert not has_fast_bf16(tmp_path / "missing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("classify --labels ''", "--labels is empty"),
        ("classify --labels ' , '", "--labels is empty"),
        ("classify --labels cat,,dog", "label 2 of 3 is blank"),
        ("classify --labels-file .", ". cannot be read: Is a directory"),
        ("classify --labels-file /dev/null", "/dev/null holds no names; write one a line"),
        ("classify --photos photo1.png", "photo1.png is no folder"),
        ("classify --labels cat --photos x", "--labels and --photos are both given"),
        ("classify --labels cat --config .", ". cannot be read: Is a directory"),
        ("classify --labels cat --config paper --defense react", "paper and --defense react are both given"),
        ("classify --labels cat --defense second_look", "there is no threshold of SecondLook for"),
        ("classify --labels cat --defense react", "calibrate --defense react folder:PHOTOS"),
        ("classify --labels cat", "with some hundred clean photos give --calibrate-on PHOTOS"),
        ("classify --labels cat --calibrate-on . --defense react", "leave out --config and react"),
        ("classify --labels cat --calibrate-on .", "3 photos are too few to calibrate on"),
        ("classify", "needs names; give --labels"),
        ("classify --labels cat --dtype fp8", "choose one of fp32, bf16, fp16, auto"),
        ("attack --labels cat --out adv --attack magic", "attack 'magic' does not exist"),
        ("embed --labels cat --config paper --out out.txt", "must end in .npy or .safetensors"),
        ("bench --images 0", "--images is 0; it must be at least 1"),
        ("bench --rounds -1", "--rounds is -1; it must be at least 1"),
        ("bench --attacked 1.5", "--attacked is 1.5; it is a share between 0 and 1"),
        ("bench --defenses magic", "defence 'magic' does not exist"),
        ("bench --shapes ViT-B-32 --model x/y", "--shapes ViT-B-32 and --model x/y are both given"),
        ("bench --shapes ViT-B-32 --labels cat", "for which --labels means nothing"),
    ],
)
def test_bad_options_get_one_line(
    run: Run, photos: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.chdir(photos)
    model = [] if "--shapes" in line else ["--model", tiny_folder]
    code, out, err = run(*shlex.split(line), *([] if "bench" in line else ["photo0.png"]), *model, "--quiet")
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not Path("adv").exists()


def test_labels_come_from_a_file_too(run: Run, photos: Path, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\n\ndog\n")
    options = ["--model", tiny_folder, "--config", "paper", "--quiet", "--json", "--top", 5]
    code, out, _ = run("classify", photos / "photo0.png", *options, "--labels-file", tmp_path / "labels.txt")
    assert code == 0
    assert {answer["label"] for answer in json.loads(out)["results"][0]["answers"]} == {"cat", "dog"}
