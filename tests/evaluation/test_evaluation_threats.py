"""Recipes that say what the attacker knows, and those that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import adaptive_recipe

import react_clip as rc
from react_clip.attacks import Both
from react_clip.evaluation import Recipe
from react_clip.evaluation.checks import own_self_check


def test_a_recipe_may_know_the_defence(tmp_path: Path) -> None:
    recipe = adaptive_recipe()
    assert [item.title for item in recipe.attacks] == [
        *("adaptive-both-20 1/255", "adaptive-both-20 4/255", "adaptive-suite-2 4/255")
    ]
    assert recipe.attacks[1].attack == Both(eps=4 / 255, steps=20, eot=4)
    assert all(item.adaptive for item in recipe.attacks)
    recipe.save(tmp_path / "recipe.yaml")
    assert Recipe.load(tmp_path / "recipe.yaml").to_dict() == recipe.to_dict()
    assert own_self_check(recipe) is None


def test_a_transfer_recipe_names_its_model() -> None:
    recipe = adaptive_recipe(threat="transfer", transfer_model="other", attacks=[{"kind": "pgd", "eps": "1/255"}])
    assert Recipe.from_dict(recipe.to_dict()).transfer_model == "other"
    assert own_self_check(recipe) is None, "images of another model need not break this one"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threat": "oblivious"}, "'adaptive-both-20 1/255' belongs to adaptive; for it set threat: adaptive"),
        ({"attacks": ["pgd"]}, "'pgd-10 4/255' belongs to oblivious or transfer; for it set threat: oblivious"),
        ({"threat": "psychic"}, "choose one of oblivious, transfer, adaptive"),
        ({"threat": "transfer", "attacks": ["pgd"]}, "transfer_model is None; the model to craft on"),
        ({"transfer_model": "x"}, "belongs to threat: transfer, and only to it"),
        ({"threat": "transfer", "transfer_model": 3, "attacks": ["pgd"]}, "one line of text"),
        ({"defenses": ["aom"], "attacks": ["adaptive-evade"]}, "'adaptive-evade-20 4/255' cannot be run on .* 'aom'"),
        ({"attacks": [{"kind": "adaptive-both", "steps": "ten"}]}, "steps is 'ten'"),
        ({"attacks": [{"kind": "adaptive-both", "eps": []}]}, "empty list of eps"),
        ({"attacks": [{"kind": "adaptive-suite", "members": []}]}, "a suite has no members"),
        ({"attacks": ["adaptive-magic"]}, "does not exist; choose one of adaptive-both, .*, square"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        adaptive_recipe(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["adaptive", "adaptive-members", "adaptive-small"])
def test_our_recipes_are_in_order(name: str) -> None:
    recipe = Recipe.load(Path(__file__).parents[2] / "recipes" / f"{name}.yaml")
    assert (recipe.threat, recipe.draws) == ("adaptive", 10)
