"""Recipes: what they mean, that they survive a round trip, and that a mistake is one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import react_clip as rc
from react_clip import data
from react_clip.evaluation import Recipe
from react_clip.evaluation.checks import own_self_check
from react_clip.evaluation.recipe import format_eps, parse_yaml

TEXT = """
title: Clean and PGD-10 accuracy
paper: Table 1
model: clip-vit-b-16
datasets: [oxford_pets]
limit: 200
attacks: [clean, {kind: pgd, steps: 10, eps: [1/255, 4/255]}, {kind: cw, eps: 0.5/255, label: margin}]
defenses: [undefended, aom, defend-clip, react, {defense: react, tau: 0.4, lazy: false, label: "ReACT tau 0.4"}]
draws: 3
seed: 7
images: {store: uint8}
"""


def parsed(changes: str = "", *, without: str = "") -> Recipe:
    values = parse_yaml(TEXT) | (parse_yaml(changes) if changes else {})
    values.pop(without, None)
    return Recipe.from_dict(values)


def test_a_recipe_says_what_it_says() -> None:
    recipe = parsed()
    assert [item.title for item in recipe.attacks] == ["pgd-10 1/255", "pgd-10 4/255", "margin 0.5/255"]
    assert recipe.attacks[1].attack == rc.attacks.PGD(eps=4 / 255, steps=10)
    assert [item.label for item in recipe.defenses] == ["undefended", "aom", "defend-clip", "react", "ReACT tau 0.4"]
    assert recipe.defenses[-1].defense == rc.ReACT(tau=0.4, lazy=False)
    assert (recipe.draws, recipe.seeds, recipe.images.store, recipe.batch) == (3, (7, 8, 9), "uint8", 64)
    assert (recipe.scoring, recipe.threat, recipe.self_check) == ("leakage_free", "oblivious", True)
    assert own_self_check(recipe) == recipe.attacks[0]
    assert own_self_check(parsed("attacks: [clean]")) is None


def test_a_recipe_survives_a_round_trip(tmp_path: Path) -> None:
    recipe = parsed()
    recipe.save(tmp_path / "recipe.yaml")
    again = Recipe.load(tmp_path / "recipe.yaml")
    assert again.to_dict() == recipe.to_dict()
    assert again.fingerprint() == recipe.fingerprint()
    assert again.attacks == recipe.attacks
    assert again.defenses == recipe.defenses
    assert recipe.replace(seed=8).fingerprint() != recipe.fingerprint()


def test_an_attack_keeps_its_budget_through_the_file() -> None:
    recipe = parsed("attacks: [{kind: pgd, eps: [0.001, 0.0123456789, 16/255]}]")
    again = Recipe.from_dict(recipe.to_dict())
    assert [item.eps for item in again.attacks] == [0.001, 0.0123456789, 16 / 255]


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
        ("attacks: [{kind: pgd, eps: 8}]", "eps is 8; pixels lie in .0, 1., so write 8/255"),
        ("attacks: [{kind: pgd, eps: [1/255, 4]}]", "write 4/255"),
        ("attacks: [{kind: pgd, eps: -1/255}]", "it must be >= 0"),
        ("attacks: [{kind: pgd, eps: lots}]", "a number such as 4/255"),
        ("attacks: [{kind: pgd, eps: []}]", "empty list of eps"),
        ("attacks: [{kind: pgd, eps: {a: 1}}]", "it must be a finite number"),
        ("attacks: [fgsm]", "'fgsm' does not exist; choose one of .*apgd, autoattack, cw, fab, pgd, square"),
        ("attacks: [{eps: 1/255}]", "the attack has no kind"),
        ("attacks: [{kind: pgd, step: 3}]", "no field 'step'; its fields are eps, steps"),
        ("attacks: [{kind: pgd, steps: ten}]", "steps is 'ten'"),
        ("attacks: pgd", "must be a list"),
        ("attacks: [3]", "an entry is a name or a mapping"),
        ("attacks: [{kind: pgd}, {kind: pgd}]", "'pgd-10 4/255' is there 2 times; give one of them a label"),
        ("attacks: [{kind: pgd, label: [a]}]", "one line of text"),
        ("defenses: [ttc2]", "'ttc2' does not exist; choose one of anti-adv"),
        ("defenses: []", "defenses is empty"),
        ("defenses: [{tau: 3}]", "the defence has no kind; choose one of"),
        ("defenses: [{defense: react, tua: 0.4}]", "no field 'tua'; its fields are"),
        ("defenses: [{defense: react, tau: high}]", "tau is 'high'"),
        ("defenses: [{defense: react, mapping: {kind: cubic}}]", "cubic"),
        ("defenses: [react, react]", "'react' is there 2 times"),
        ("datasets: []", "datasets is empty"),
        ("datasets: [1]", "one line of text"),
        ("datasets: [mean]", "rename its folder"),
        ("datasets: [dtd, dtd]", "name each once"),
        ("limit: 0", "limit is 0; it must be a whole number >= 1"),
        ("draws: 1.5", "whole number"),
        ("batch: yes", "whole number"),
        ("seed: -1", "whole number >= 0"),
        ("dtype: fp8", "choose one of fp32, bf16, fp16"),
        ("dtype: [fp32]", "choose one of fp32"),
        ("attack_dtype: int8", "attack_dtype is 'int8'"),
        ("scoring: leaky", "choose one of leakage_free, attack_all"),
        ("threat: adaptive", "belongs to oblivious or transfer"),
        ("images: {store: png}", "choose one of float16, uint8, none"),
        ("images: {save: png}", "no field 'save'; its fields are store"),
        ("images: float16", "images: 'float16' is not a mapping of Images; its fields are store"),
        ("self_check: maybe", "true or false"),
        ("title: [1]", "one line of text"),
        ('title: "a\\nb"', "one line of text"),
        ("attackz: [clean]", "no field 'attackz'; its fields are model, datasets, defenses"),
    ],
)
def test_a_mistake_is_one_clear_line(change: str, message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message) as caught:
        parsed(change)
    assert "\n" not in str(caught.value)


def test_what_a_recipe_needs() -> None:
    for key in ("model", "datasets", "defenses"):
        with pytest.raises(rc.ReactClipError, match=f"Recipe needs '{key}'; its fields are"):
            parsed(without=key)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"title: [", "not valid YAML in line 1"),
        (b"- a list", "a recipe is a mapping"),
        (b"1: one", "a recipe is a mapping"),
        (b"title: a\ntitle: b", "'title' is there 2 times"),
        (b"title: &a [1]\npaper: *a", "an alias"),
        (b"title: !!python/object/apply:os.system [ls]", "not valid YAML"),
        (b"[" * 3000, "not valid YAML"),
        (b"# " + b"x" * 270_000, "more than 262,144 bytes"),
        (b"\xff\xfe\x00", "no UTF-8 text"),
        (b"title: \x00", "not valid YAML"),
        (b"", "a recipe is a mapping"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "recipe.yaml").write_bytes(text)
    with pytest.raises(rc.ReactClipError, match=message) as caught:
        Recipe.load(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)
    assert "recipe.yaml" in str(caught.value)


@pytest.mark.parametrize("place", ["nothing.yaml", "."])
def test_files_that_are_not_there(tmp_path: Path, place: str) -> None:
    with pytest.raises(rc.ReactClipError, match=r"does not exist|cannot be read"):
        Recipe.load(tmp_path / place)


@pytest.mark.parametrize(("eps", "text"), [(1 / 255, "1/255"), (16 / 255, "16/255"), (0.5 / 255, "0.5/255")])
def test_budgets_are_written_as_people_do(eps: float, text: Any) -> None:
    assert format_eps(eps) == text
