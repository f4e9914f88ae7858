"""Recipes over folders of photos: classes, several sets, the command line and its validation."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_toys import (
    CLASSES,
    ToyEncoder,
    ToyWithText,
    adaptive_recipe,
    toy_classifier,
    toy_photos,
    write_head,
    write_photos,
)
from safetensors import safe_open

import react_clip as rc
from react_clip import data, encoders
from react_clip.cli import parse_args
from react_clip.encoders.loading import resolve_dtype
from react_clip.evaluation import EvaluationResult, Recipe, evaluate, run_recipe, validate
from react_clip.evaluation.recipe import LabelledDefense
from react_clip.evaluation.sets import class_source

RECIPE = """
title: Toys
model: toy
datasets: [toys, others]
attacks: [clean, {kind: pgd, steps: 10, eps: 1/255}]
defenses: [undefended, {defense: react, views: 2, label: ReACT small}]
batch: 8
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, two sets and a head for each; every model name loads the toy."""
    (tmp_path / "toys.yaml").write_text(RECIPE)
    write_photos(tmp_path / "data", "toys")
    write_photos(tmp_path / "data", "others", count=15, seed=1)
    for name in ("toys", "others"):
        write_head(tmp_path / "heads" / f"{name}.npz")

    def load(name: str, **options: Any) -> encoders.Encoder:
        if name == "missing":
            raise rc.ReactClipError("no model is called 'missing'; choose another")
        encoder = ToyWithText() if name == "toy-text" else ToyEncoder()
        encoder.image_size = 16 if name == "small" else encoder.image_size
        encoder.tower.to(resolve_dtype(options["dtype"]))
        return encoder

    monkeypatch.setattr(encoders, "load", load)
    monkeypatch.setenv("REACT_CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def toys(place: Path, **changes: Any) -> Recipe:
    """The recipe for one of its two sets."""
    return Recipe.load(place / "toys.yaml").replace(datasets=("toys",), **changes)


def run(place: Path, recipe: Recipe, folder: str = "r") -> EvaluationResult:
    return run_recipe(recipe, folder, root=place / "data", heads=place / "heads", progress=False)


def check(place: Path, recipe: Recipe, folder: str = "r") -> Any:
    return validate(recipe, folder, root=place / "data", heads=place / "heads")


def call(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    options = parse_args(["evaluate", "toys.yaml", "--data", "data", "--heads", "heads", *args])
    code = options.run(options)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_runs_a_recipe(place: Path, capsys: pytest.CaptureFixture[str], rows_of: Any) -> None:
    code, out, err = call("--quiet", capsys=capsys)
    assert code == 0
    assert "| ReACT small |" in out
    assert "oblivious" in out
    assert err == ""
    folder = place / "runs" / "toys"
    assert {path.name for path in folder.iterdir()} >= {"recipe.yaml", "per_image.parquet", "result.json", "tables"}
    result = EvaluationResult.load(folder / "result.json")
    assert [info.name for info in result.sets] == ["toys", "others"]
    assert [info.class_source for info in result.sets] == ["head toys.npz", "head others.npz"]
    assert result.sets[0].fingerprint == data.load("toys", root=place / "data").fingerprint()
    assert {row["dataset"] for row in rows_of(folder)} == {"toys", "others"}
    assert {row.n for row in result.select(dataset="mean")} == {35}
    assert call("--quiet", "--defenses", "ReACT small", "--out", "one", capsys=capsys)[0] == 0
    one = EvaluationResult.load(place / "one" / "result.json")
    assert one.rows == tuple(row for row in result.rows if row.defense == "ReACT small")
    with pytest.raises(rc.ReactClipError, match="names 'AOM', which the recipe has not; choose among undefended, Re"):
        call("--defenses", "ReACT small, AOM", capsys=capsys)


def test_photos_give_the_same_numbers_as_their_pixels(place: Path, rows_of: Any) -> None:
    recipe = toys(place)
    run(place, recipe)
    dataset = data.load("toys", root=place / "data")
    pair = (dataset.pixels(32).float() / 255, torch.tensor(dataset.labels))
    for name, photos in (("pair", pair), ("set", dataset)):
        attacks = {item.label: item.attack for item in recipe.attacks}
        evaluate(toy_classifier(), recipe.defenses, photos, attacks=attacks, run_dir=name, batch=8, progress=False)
    first, *others = ([{**row, "dataset": ""} for row in rows_of(place / name)] for name in ("r", "pair", "set"))
    assert [first, first] == others


def test_json_is_the_result_and_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--json", "--datasets", "toys", "--limit", "10", "--draws", "2", "--batch", "4", "--out", "o")
    code, out, err = call(*options, capsys=capsys)
    assert code == 0
    assert re.search("toys: .*100%", err), "the bar goes to stderr and reaches its end"
    assert "self-check: PGD-10 at 1/255 on 10 images of toys: 100%" in err
    result = json.loads(out)
    assert out == (place / "o" / "result.json").read_text()
    assert result["recipe"]["datasets"] == ["toys"]
    assert (result["recipe"]["limit"], result["draws"], result["recipe"]["batch"]) == (10, 2, 4)
    assert result["sets"][0]["images"] == 10
    assert any("took 10 of 20" in note for note in result["sets"][0]["notes"])
    assert result["command"]


def test_validate_counts_and_promises(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call("--validate", capsys=capsys)
    assert (code, err) == (0, "loading toy\n")
    lines = out.splitlines()
    assert lines[0] == "toys: 20 images, 5 classes, head toys.npz"
    # Clean: 1 plain + 1 undefended + (1 + 2 + 1 + 2) ReACT; attacked: 11 for PGD-10, and the same again.
    assert lines[2] == f"cost: at most {35 * (8 + 11 + 8):,} forward and {35 * 10:,} backward passes"
    assert not (place / "runs").exists()
    code, out, _ = call("--validate", "--json", capsys=capsys)
    assert json.loads(out)["forward_passes"] == 35 * 27
    assert json.loads(out)["ok"] is True


def test_validate_tells_what_each_defence_costs(place: Path) -> None:
    attack = {"kind": "adaptive-both", "steps": 3, "eot": 2, "checkpoint": False}
    report = check(place, adaptive_recipe(attacks=[attack], defenses=["aom"]))
    # Two answers (clean and attacked), three steps and the last iterate with two draws each, the clean feature, ten
    # draws to judge, one plain answer; and the plain answer on the clean image.
    forward = 2 * 11 + (3 * 2 + 2) * 11 + 1 + 10 * 11 + 1
    assert report.lines()[1] == f"aom: at most {20 * forward:,} forward and {20 * 3 * 2 * 11:,} backward passes"
    assert report.forward_passes == 20 * (forward + 1)


def test_a_transfer_recipe_loads_its_model(place: Path) -> None:
    recipe = adaptive_recipe(threat="transfer", transfer_model="other", attacks=[{"kind": "pgd", "eps": "1/255"}])
    assert check(place, recipe).ok
    assert run(place, recipe).threat == "transfer"
    wrong = recipe.replace(transfer_model="small")
    assert "cannot be replayed" in check(place, wrong).problems[0]
    with pytest.raises(rc.ReactClipError, match="choose a transfer_model of the same size"):
        run(place, wrong, "other")


def test_the_cost_bounds_what_a_run_spends(place: Path, rows_of: Any) -> None:
    recipe = toys(place)
    promised = check(place, recipe)
    run(place, recipe)
    rows = rows_of(place / "r")
    spent = sum(row["passes"] for row in rows) + sum(row["queries"] for row in rows if row["defense"] == "undefended")
    assert spent <= promised.forward_passes
    files = [path for path in (place / "r").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= promised.disk_bytes


def test_validate_collects_all_problems(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = check(place, toys(place, defenses=(LabelledDefense("tuned", rc.defenses.RTPT()),)))
    assert "r-tpt tunes prompt tokens and 'toy' has no text tower" in tuned.problems[0]
    assert "no model is called 'missing'" in call("--validate", "--model", "missing", capsys=capsys)[2]
    write_head(place / "heads" / "toys.npz", name="fruit")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    code, out, err = call("--validate", "--quiet", "--datasets", "toys,nothing,folder:nowhere,others", capsys=capsys)
    problems = (
        "toys: the head knows 0 of the 5 classes",
        "data set 'nothing' is not known, .* known are cifar10",
        "nowhere is not a folder",
        "but 0.0 MB are free; free some",
    )
    assert code == 2
    for line, problem in zip(err.splitlines(), problems, strict=True):
        assert re.search(problem, line)
        assert not re.search(problem, out), "printed once"


def test_validate_gives_the_cost_of_one_image_where_there_is_no_data(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = call("--validate", "--datasets", "folder:nowhere", capsys=capsys)
    assert "cost: at most 27 forward and 10 backward passes an image" in out
    assert "time:" not in out
    assert "disk:" not in out


def test_validate_estimates_the_time_of_a_run_with_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = check(place, toys(place)).minutes
    assert measured is not None
    assert measured > 0
    module = import_module("react_clip.evaluation.validate")
    monkeypatch.setattr(module, "_seconds_per_pass", lambda encoder, batch: 1.5)
    report = check(place, toys(place))
    # A backward pass counts as two forward ones.
    assert report.minutes == pytest.approx((report.forward_passes + 2 * report.backward_passes) * 1.5 / 60)
    assert f"time: about {report.minutes:,.0f} minutes" in "\n".join(report.lines())


def test_class_features_come_from_head_prompts_or_train_photos(place: Path) -> None:
    dataset = data.load("toys", root=place / "data")
    root, heads = place / "data", place / "heads"
    assert class_source(ToyEncoder(), dataset, heads, root).description == "head toys.npz"
    prompts = class_source(ToyWithText(), dataset, None, root)
    assert prompts.description == "prompts (This is a photo of a {}.)"
    clf, _ = prompts.classifier(ToyWithText())
    assert torch.equal(clf.class_features, torch.eye(CLASSES))
    with pytest.raises(rc.ReactClipError, match=r"no text tower, .* neither toys\.npz .* nor photos in"):
        class_source(ToyEncoder(), dataset, None, root)
    write_photos(root, "toys", "train", count=50, seed=9)
    with pytest.raises(rc.ReactClipError, match="nor another split than train"):
        class_source(ToyEncoder(), dataset, None, root, average_train=False)
    train = class_source(ToyEncoder(), dataset, None, root)
    assert train.description == "mean features of 50 train photos"
    clf, aligned = train.classifier(ToyEncoder())
    assert clf.names == aligned.class_names == dataset.class_names
    assert aligned.labels == dataset.labels
    pixels, labels = toy_photos(50, seed=9)
    sums = torch.zeros(CLASSES, CLASSES).index_add(0, labels, ToyEncoder()(pixels))
    assert torch.allclose(clf.class_features, sums / sums.norm(dim=1, keepdim=True), atol=1e-5)


def test_train_folders_may_be_called_otherwise_than_the_classes(place: Path) -> None:
    """Flowers102's folders are ``001.pink primrose`` here and ``001`` in the registry."""
    names = data.get("flowers102").class_names
    for split, seed in (("test", 0), ("train", 9)):
        write_photos(place / "data", "flowers102", split, seed=seed)
        for number in range(CLASSES):
            folder = place / "data" / "flowers102" / split
            (folder / f"class_{number}").rename(folder / f"{number + 1:03d}.{names[number]}")
    dataset = data.load("flowers102", root=place / "data")
    clf, aligned = class_source(ToyEncoder(), dataset, None, place / "data").classifier(ToyEncoder())
    assert clf.names == names[:CLASSES]
    assert [clf.names[label] for label in aligned.labels] == [names[label] for label in dataset.labels]


def test_a_head_of_another_dimension_is_refused(place: Path) -> None:
    write_head(place / "heads" / "toys.npz", dim=7)
    with pytest.raises(rc.ReactClipError, match="features of dimension 7; 'toy' needs 5"):
        class_source(ToyEncoder(), data.load("toys", root=place / "data"), place / "heads", place / "data")


def test_a_head_that_lacks_a_class_drops_its_photos(place: Path) -> None:
    write_head(place / "heads" / "toys.npz", classes=4)
    result = run(place, toys(place, limit=14))
    assert result.sets[0].images == 14
    assert (result.sets[0].classes, result.sets[0].notes[0][:16]) == (4, "dropped 4 photos")


def test_duplicate_class_names_are_a_tie_not_an_error(place: Path) -> None:
    folders = [f"class_{number}" for number in range(CLASSES)]
    features = torch.eye(CLASSES).numpy()
    np.savez(place / "heads" / "toys.npz", names=["thing"] * CLASSES, folders=folders, features=features)
    result = run(place, toys(place))
    assert result.sets[0].classes == CLASSES


def test_a_classifier_in_another_order_is_refused(place: Path) -> None:
    dataset = data.load("toys", root=place / "data")
    encoder, names = ToyEncoder(), list(reversed(dataset.class_names))
    turned = rc.ZeroShotClassifier.from_features(encoder, names, torch.eye(CLASSES))
    with pytest.raises(rc.ReactClipError, match="in another order"):
        evaluate(turned, [rc.Undefended()], dataset, run_dir="r", progress=False)
    fewer = rc.ZeroShotClassifier.from_features(encoder, names[:3], torch.eye(CLASSES)[:3])
    with pytest.raises(rc.ReactClipError, match="3 classes and toys has 5"):
        evaluate(fewer, [rc.Undefended()], dataset, run_dir="r", progress=False)


def test_the_attacked_encoder_may_have_another_precision(place: Path) -> None:
    recipe = toys(place, dtype="bf16", attack_dtype="fp32", model="toy-text")
    result = run_recipe(recipe, "r", root=place / "data", progress=False)
    assert (result.dtype, result.attack_dtype) == ("bf16", "fp32")
    assert result.sets[0].class_source.startswith("prompts")
    shard = next((place / "r" / "shards").glob("toys/pgd*/images/*.safetensors"))
    with safe_open(shard, framework="pt") as stored:
        about = json.loads(stored.metadata()["react-clip"])["about"]
    assert about["model"] != about["attacked_model"]
