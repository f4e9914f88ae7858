"""Recipes: their entries, grids and threat models; they survive a round trip, and a mistake gives one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation_toys import adaptive_recipe

import react_clip as rc
from react_clip import data
from react_clip.evaluation import Recipe, run_folder

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TEXT = """
title: Clean and PGD-10 accuracy
paper: Table 1
model: clip-vit-b-16
datasets: [oxford_pets]
limit: 200
attacks: [clean, {kind: pgd, steps: 10, eps: [1/255, 4/255]}, {kind: cw, eps: 0.5/255, label: margin}]
defenses: [undefended, aom, defend-clip, react, {kind: react, tau: 0.4, lazy: true, label: "ReACT tau 0.4"}]
seed: 7
seeds: [7, 8, 9]
images: {store: none}
"""


def parsed(changes: str = "") -> Recipe:
    return Recipe.from_dict(yaml.safe_load(TEXT) | (yaml.safe_load(changes) or {}))


def test_a_recipe_says_what_it_says() -> None:
    recipe = parsed()
    assert [item.title for item in recipe.attacks] == ["pgd-10 1/255", "pgd-10 4/255", "margin 0.5/255"]
    assert recipe.attacks[1].attack == rc.attacks.PGD(eps=4 / 255, steps=10)
    assert [item.label for item in recipe.defenses] == ["undefended", "aom", "defend-clip", "react", "ReACT tau 0.4"]
    assert recipe.defenses[-1].defense == rc.ReACT(tau=0.4)
    assert (recipe.seed, recipe.seeds, recipe.images.store, recipe.batch) == (7, (7, 8, 9), "none", 64)
    assert (recipe.scoring, recipe.threat, recipe.self_check) == ("leakage_free", "oblivious", True)


def test_towers_meet_the_attacks_of_the_standard_evaluation() -> None:
    standard, tower = (Recipe.load(RECIPES / name) for name in ("standard.yaml", "finetuned-standard.yaml"))
    changes = {"model": tower.model, "defenses": tower.defenses, "self_check": False}
    assert standard.replace(**changes) == tower
    assert [item.label for item in tower.defenses] == ["TeCoA"]


@pytest.mark.parametrize("threat", ["oblivious", "transfer", "adaptive"])
def test_a_recipe_survives_a_round_trip(tmp_path: Path, threat: str) -> None:
    recipe = {
        "oblivious": parsed("attacks: [{kind: pgd, eps: [0.001, 0.0123456789, 16/255]}]"),
        "transfer": adaptive_recipe(threat="transfer", transfer_model="other", attacks=["pgd"]),
        "adaptive": adaptive_recipe(),
    }[threat]
    recipe.save(tmp_path / "recipe.yaml")
    again = Recipe.load(tmp_path / "recipe.yaml")
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint() != recipe.replace(seed=8).fingerprint()


def test_words_for_groups_of_sets(tmp_path: Path) -> None:
    def sets(word: str) -> tuple[str, ...]:
        return parsed(f"datasets: {word}").with_sets_under(tmp_path).datasets

    assert len(sets("downstream")) == 12
    assert set(sets("downstream")) - set(sets("downstream-9")) == {"eurosat", "caltech256", "food101"}
    assert len(sets("imagenet-suite")) == 5
    assert set(sets("[downstream, imagenet-suite, dtd]")) == set(data.names())
    with pytest.raises(rc.ReactClipError, match="holds no folders"):
        sets("all")
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    assert sets("all") == ("a", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("attacks: [{kind: pgd, eps: []}]", "eps is"),
        ("attacks: pgd", "it must be a list of names, mappings or objects"),
        ("attacks: [{kind: pgd}, {kind: pgd}]", "'pgd-10 4/255' is there 2 times; give one of them a label"),
        ("defenses: []", "defenses is empty"),
        ("defenses: [{kind: react, tua: 0.4}]", "tua is 0.4.*the fields of react are"),
        ("model: x\ndefenses: [react]", "no calibration of 'react' for 'x'; .*--model x.* its tau, .*calibrated: f"),
        ("model: x\ndefenses: [second_look]", "no calibration of 'second_look' for 'x'.*give its threshold, or"),
        ("defenses: [{kind: aom, calibrated: true}]", "'aom' cannot be calibrated; react and second_look can"),
        ("defenses: [{kind: react, calibrated: paper}]", "calibrated is 'paper'"),
        ("defenses: [react, react]", "'react' is there 2 times"),
        ("datasets: [mean]", "rename its folder"),
        ("datasets: [dtd, dtd]", "name each once"),
        ("worst_of: [fab 4/255]", "worst_of names 'fab 4/255', which is no attack of the recipe; choose of .*all"),
        ("attacks: [adaptive]", "'adaptive-both-100 4/255' belongs to adaptive; for it set threat: adaptive"),
        ("threat: adaptive", "'pgd-10 1/255' belongs to oblivious or transfer; for it set threat: oblivious"),
        ("threat: transfer", "transfer_model is None; the model to craft on"),
        ("transfer_model: x", "belongs to threat: transfer, and only to it"),
        ("attackz: [clean]", "attackz is .*the fields of Recipe are model, datasets, defenses"),
        (
            "defenses: [{kind: aom, label: '{tau}', grid: {alpha: [1.0]}}]",
            "the grid sweeps alpha",
        ),
        ("defenses: [{kind: aom, label: '{alpha:d}', grid: {alpha: [1.0]}}]", "label '{alpha:d}' cannot be filled in"),
        ("defenses: [{kind: aom, grid: {alpha: 2.0}}]", "grid is 2.0: .*valid list"),
        ("defenses: [{kind: aom, grid: {alpha.x: [1]}}]", "alpha"),
    ],
)
def test_a_mistake_is_one_clear_line(change: str, message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message):
        parsed(change)


def test_constants_of_another_encoder_are_taken_knowingly() -> None:
    entries = "{kind: react, calibrated: false}, {kind: second_look, threshold: 0.3}, {kind: react, grid: {tau: [0.5]}}"
    given = parsed(f"model: x\ndefenses: [{entries}]").defenses
    assert [item.defense for item in given] == [rc.ReACT(), rc.SecondLook(threshold=0.3), rc.ReACT(tau=0.5)]
    entries = "{kind: react, calibrated: true, views: 3}, {kind: second_look, calibrated: true}"
    assert [item.defense for item in parsed(f"defenses: [{entries}]").defenses] == [
        rc.ReACT.for_encoder("clip-vit-b-16").replace(views=3),
        rc.SecondLook.for_encoder("clip-vit-b-16"),
    ]


def test_attacks_and_defences_beside_a_recipe_are_found(tmp_path: Path, no_new_classes: None) -> None:
    (tmp_path / "beside_attacks.py").write_text(
        "from react_clip.attacks import PGD\nclass Corner(PGD):\n    kind = 'corner'\n"
    )
    (tmp_path / "mine.yaml").write_text(TEXT.replace("[clean,", '[{kind: "beside_attacks:Corner", label: mine},'))
    assert Recipe.load(tmp_path / "mine.yaml").attacks[0].label == "mine"


def test_a_quick_and_a_full_measurement_have_folders_of_their_own() -> None:
    quick, whole = (Recipe.load(RECIPES / f"{name}.yaml") for name in ("standard-quick", "standard"))
    assert run_folder("Mine", quick) == run_folder("Mine", quick) != run_folder("Mine", whole)


def test_a_grid_is_every_combination() -> None:
    grid = "grid: {mapping.sigma: [0.05, 0.1], alpha: [1.0, 2.0]}"
    recipe = parsed(f"defenses: [{{kind: defend-clip, label: D, tau: 0.5, {grid}}}]")
    assert [item.label for item in recipe.defenses] == [
        *("D sigma=0.05 alpha=1", "D sigma=0.05 alpha=2", "D sigma=0.1 alpha=1", "D sigma=0.1 alpha=2")
    ]
    last: Any = recipe.defenses[-1].defense
    assert (last.mapping.sigma, last.alpha, last.tau, last.probe_samples) == (0.1, 2.0, 0.5, 10)
    assert {item.family for item in recipe.defenses} == {"D"}
    assert recipe.defenses[-1].params == {"mapping.sigma": 0.1, "alpha": 2.0}
    assert Recipe.from_dict(recipe.to_dict()).defenses == recipe.defenses, "the run's own recipe is written out"
    recipe = parsed("defenses: [{kind: aom, label: '{alpha:.2f} of AOM', grid: {alpha: [1.0, 2.0]}}]")
    assert [item.label for item in recipe.defenses] == ["1.00 of AOM", "2.00 of AOM"]
    assert {item.family for item in recipe.defenses} == {"aom"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"title: [", "not valid YAML .*line 1"),
        (b"- a list", "a recipe is a mapping"),
        (b"title: a\ntitle: b", "'title' is there 2 times"),
        (b"title: !!python/object/apply:os.system [ls]", "not valid YAML"),
        (b"[" * 3000, "not valid YAML"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "recipe.yaml").write_bytes(text)
    with pytest.raises(rc.ReactClipError, match=message) as caught:
        Recipe.load(tmp_path / "recipe.yaml")
    assert "recipe.yaml" in str(caught.value)
