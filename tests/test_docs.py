"""Documents: numbers equal the result files, examples run, links lead somewhere, recipes are valid."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from react_clip.cli import parse_args
from react_clip.defenses import SSTPT
from react_clip.evaluation import Recipe

ROOT = Path(__file__).resolve().parents[1]
FINETUNED = ("TeCoA", "PMG-AFT", "FARE")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_marked_number_equals_its_result_file() -> None:
    command = [sys.executable, str(ROOT / "tools" / "fill_docs.py"), "--check"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_exist(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("model", [None, "clip-vit-b-16"])
def test_every_recipe_is_valid_for_both_models(path: Path, model: str | None) -> None:
    recipe = Recipe.load(path, model=model)
    assert recipe.paper
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("name", ["table1", "table1-extended", "table5", "table6", "table7", "table8"])
def test_a_table_of_the_paper_has_all_its_columns_and_budgets(name: str) -> None:
    values = json.loads((ROOT / "benchmarks" / "paper.json").read_text())[name]
    budgets, methods = values.pop("columns")[1:], {f"{name} (paper)" if name == "ReACT" else name for name in values}
    recipes = [Recipe.load(ROOT / "recipes" / f"{name}.yaml")]
    if name.startswith("table1"):
        towers = ROOT / "recipes" / name.replace("table1", "finetuned")
        recipes += [Recipe.load(towers.with_suffix(".yaml"), model=f"towers/{kind}") for kind in FINETUNED]
    assert methods <= {item.label for recipe in recipes for item in recipe.defenses}
    for recipe in recipes:
        assert [f"{255 * item.eps:g}" for item in recipe.attacks] == budgets
    tuned = [item.defense for item in recipes[0].defenses if isinstance(item.defense, SSTPT)]
    assert [defense.augmix.chains for defense in tuned] == [0 if name == "table8" else 3]


def test_make_has_the_targets_of_the_readme() -> None:
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_parser_takes_every_command_of_the_readme() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("react-clip ")]
    assert len(lines) >= 5
    for line in lines:
        assert callable(parse_args(shlex.split(line, comments=True)[1:]).run), line


def test_the_example_of_the_readme_runs(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (40, 50), "teal").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    # The tiny CLIP has no constants of its own.
    for large, small in {
        '"openai/clip-vit-base-patch16"': repr(str(tiny_folder)),
        "rc.SecondLook.for_encoder(clip)": "rc.SecondLook(look=None)",
    }.items():
        assert large in example
        example = example.replace(large, small)
    space: dict[str, Any] = {}
    exec(example, space)
    assert space["out"].names[0] in ("cat", "dog", "teapot")
    assert space["net"](torch.rand(1, 3, 32, 32)).shape == (1, 3)
