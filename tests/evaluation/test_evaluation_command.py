"""Recipes over folders of photos: classes, several sets, the command line and its validation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_toys import (
    CLASSES,
    ToyEncoder,
    adaptive_recipe,
    toy_photos,
    toy_with_text,
    write_head,
    write_photos,
)

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
defenses: [undefended, {kind: react, calibrated: false, views: 2, label: ReACT small}]
batch: 8
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, two sets and class features for each; every model name loads the toy."""
    (tmp_path / "toys.yaml").write_text(RECIPE)
    write_photos(tmp_path / "data", "toys")
    write_photos(tmp_path / "data", "others", count=15, seed=1)
    for name in ("toys", "others"):
        write_head(tmp_path / "heads" / f"{name}.npz")

    def load(name: str, **options: Any) -> encoders.Encoder:
        if name == "missing":
            raise rc.ReactClipError("no model is called 'missing'; choose another")
        encoder = toy_with_text() if name == "toy-text" else ToyEncoder()
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


def check(place: Path, recipe: Recipe) -> Any:
    return validate(recipe, root=place / "data", heads=place / "heads")


def call(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    options = parse_args(["evaluate", "toys.yaml", "--data", "data", "--heads", "heads", *args])
    code = options.run(options)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_runs_a_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call("--quiet", capsys=capsys)
    assert (code, err) == (0, "")
    assert "| ReACT small |" in out
    result = EvaluationResult.load(place / "runs" / "toys")
    assert [info.class_source for info in result.sets] == ["head toys.npz", "head others.npz"]
    assert {row.n for row in result.means} == {35}
    assert call("--quiet", "--defenses", "ReACT small", "--out", "one", capsys=capsys)[0] == 0
    one = EvaluationResult.load(place / "one")
    assert one.rows == tuple(row for row in result.rows if row.defense == "ReACT small")
    with pytest.raises(rc.ReactClipError, match="names 'AOM'; choose among undefended, Re"):
        call("--defenses", "ReACT small, AOM", capsys=capsys)


def test_options_replace_values_of_the_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--json", "--datasets", "toys", "--limit", "10", "--seeds", "0,4", "--batch", "4", "--out", "o")
    code, out, err = call(*options, capsys=capsys)
    assert code == 0
    assert re.search("toys.*100%", err), "the bar goes to stderr and reaches its end"
    recipe, [info] = (json.loads(out)[name] for name in ("recipe", "sets"))
    assert (recipe["limit"], recipe["seeds"], recipe["batch"]) == (10, [0, 4], 4)
    assert (info["images"], any("took 10 of 20" in note for note in info["notes"])) == (10, True)


def test_validate_counts_and_runs_no_attack(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rc.attacks.PGD, "search", lambda self, problem: pytest.fail("an attack was run"))
    code, out, err = call("--validate", capsys=capsys)
    assert (code, err) == (0, "loading toy\n")
    lines = out.splitlines()
    assert lines[0] == "toys: 20 images, 5 classes, head toys.npz"
    assert lines[2] == f"work: at most 35 adversarial images and {35 * 2 * 2} defended answers"
    assert not (place / "runs").exists()
    assert check(place, adaptive_recipe(defenses=["defend-clip", "aom"])).crafted == 20 * 3 * 2


def test_validate_collects_all_problems(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = check(place, toys(place, defenses=(LabelledDefense("tuned", rc.defenses.RTPT()),)))
    assert "text tower" in tuned.problems[0]
    assert "no model is called 'missing'" in call("--validate", "--model", "missing", capsys=capsys)[2]
    write_head(place / "heads" / "toys.npz", name="fruit")
    code, out, err = call("--validate", "--quiet", "--datasets", "toys,nothing,folder:nowhere,others", capsys=capsys)
    problems = ("toys: ", "data set 'nothing'", "nowhere")
    assert code == 2
    for line, problem in zip(err.splitlines(), problems, strict=True):
        assert problem in line
        assert problem not in out, "printed once"


def test_a_transfer_recipe_loads_its_model(place: Path) -> None:
    recipe = adaptive_recipe(threat="transfer", transfer_model="other", attacks=[{"kind": "pgd", "eps": "1/255"}])
    assert check(place, recipe).ok
    assert run(place, recipe).threat == "transfer"
    wrong = recipe.replace(transfer_model="small")
    assert "cannot be replayed" in check(place, wrong).problems[0]
    with pytest.raises(rc.ReactClipError, match="choose a transfer_model of the same size"):
        run(place, wrong, "other")


def test_class_features_come_from_head_prompts_or_train_photos(place: Path) -> None:
    dataset = data.load("toys", root=place / "data")
    root, heads = place / "data", place / "heads"
    assert class_source(ToyEncoder(), dataset, heads, root).description == "head toys.npz"
    prompts = class_source(toy_with_text(), dataset, None, root)
    assert prompts.description == "prompts (This is a photo of a {}.)"
    clf, _ = prompts.classifier(toy_with_text())
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
    pixels, labels = toy_photos(50, seed=9)
    sums = torch.zeros(CLASSES, CLASSES).index_add(0, labels, ToyEncoder()(pixels))
    assert torch.allclose(clf.class_features, sums / sums.norm(dim=1, keepdim=True), atol=1e-5)


def test_heads_of_another_dimension_or_with_fewer_or_equal_names(place: Path) -> None:
    head = place / "heads" / "toys.npz"
    write_head(head, dim=7)
    with pytest.raises(rc.ReactClipError, match="features of dimension 7; 'toy' needs 5"):
        class_source(ToyEncoder(), data.load("toys", root=place / "data"), place / "heads", place / "data")
    write_head(head, classes=4)
    (info,) = run(place, toys(place, limit=14)).sets
    assert (info.images, info.classes, info.notes[0][:16]) == (14, 4, "dropped 4 photos")
    folders = [f"class_{number}" for number in range(CLASSES)]
    np.savez(head, names=["thing"] * CLASSES, folders=folders, features=torch.eye(CLASSES).numpy())
    assert run(place, toys(place), "same names").sets[0].classes == CLASSES


def test_a_classifier_in_another_order_is_refused(place: Path) -> None:
    dataset = data.load("toys", root=place / "data")
    encoder, names = ToyEncoder(), list(reversed(dataset.class_names))
    turned = rc.ZeroShotClassifier.from_features(encoder, names, torch.eye(CLASSES))
    with pytest.raises(rc.ReactClipError, match="in another order"):
        evaluate(turned, [rc.Undefended()], dataset, run_dir="r", progress=False)
    fewer = rc.ZeroShotClassifier.from_features(encoder, names[:3], torch.eye(CLASSES)[:3])
    with pytest.raises(rc.ReactClipError, match="3 classes and toys has 5"):
        evaluate(fewer, [rc.Undefended()], dataset, run_dir="r", progress=False)
