"""Documents: numbers equal the result files, examples run, links lead somewhere, recipes are valid."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fill_docs import filled
from PIL import Image

from programs import Run
from react_clip.cli import COMMANDS, parse_args
from react_clip.defenses import SSTPT
from react_clip.evaluation import Recipe

pytestmark = pytest.mark.usefixtures("no_new_classes")
ROOT = Path(__file__).resolve().parents[1]
FINETUNED = ("TeCoA", "PMG-AFT", "FARE")
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
MARKED = [path for path in DOCUMENTS if "<!-- end -->" in path.read_text(encoding="utf-8")]
GUIDES = [DOCS / "commands.md", DOCS / "tutorial-production.md", DOCS / "tutorial-research.md"]


def blocks(language: str, path: Path) -> list[str]:
    """The lines of all code blocks of one language."""
    found = re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in found for line in block.splitlines()]


def run_example(example: str, model: Path, name: str) -> dict[str, Any]:
    """Run Python of a document on a small CLIP, which has no constants of its own; returns its variables."""
    for large, small in {name: repr(str(model)), "rc.SecondLook.for_encoder(clip)": "rc.SecondLook(look=None)"}.items():
        assert large in example
        example = example.replace(large, small)
    space: dict[str, Any] = {}
    exec(example, space)
    return space


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.name)
def test_every_marked_number_equals_its_result_file(path: Path) -> None:
    text = path.read_text()
    assert filled(text) == text, f"python tools/fill_docs.py rewrites {path.name}"


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


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_the_parser_takes_every_command(path: Path) -> None:
    lines = [line for line in blocks("sh", path) if line.startswith("react-clip ")]
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" > ")[0], comments=True)
        assert callable(parse_args(words[1:]).run), line


def test_the_list_of_commands_has_all() -> None:
    listed = {line.split()[1] for line in blocks("sh", DOCS / "commands.md") if line.startswith("react-clip ")}
    assert {*COMMANDS} - listed == set()


def test_the_example_of_the_readme_runs(in_folder: Path, tiny_folder: Path) -> None:
    Image.new("RGB", (40, 50), "teal").save("photo.jpg")
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    space = run_example(example, tiny_folder, '"openai/clip-vit-base-patch16"')
    assert space["out"].names[0] in ("cat", "dog", "teapot")
    assert space["net"](torch.rand(1, 3, 32, 32)).shape == (1, 3)


def test_the_tutorial_for_production_runs(in_folder: Path, tiny_folder: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial-production.md").read_text(), re.DOTALL)
    space = run_example("".join(examples), tiny_folder, '"clip-vit-b-16"')
    assert (space["attacked"] - space["pixels"]).abs().max() <= 4 / 255 + 1e-6
    assert len(space["answer"].names) == 2


def test_the_tutorial_for_research_runs(
    in_folder: Path, tiny_folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "tutorial-research.md").read_text()
    make_photos, show, defense = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    first, adaptive = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    exec(make_photos, {})
    Path("my_defense.py").write_text(defense)
    # The small CLIP has too few patches for a smaller copy.
    for name, recipe in {"first.yaml": first, "adaptive.yaml": adaptive}.items():
        small = recipe.replace("clip-vit-b-16", str(tiny_folder)).replace("second_look,", "second_look, look: null,")
        Path(name).write_text(small)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for line in blocks("sh", DOCS / "tutorial-research.md"):
        if line.startswith("react-clip ") and "pull" not in line:
            words = shlex.split(line)[1:]
            # An attacker who knows the defence finds nothing in random weights; the recipe is checked.
            words += ["--validate"] if "adaptive.yaml" in line else ["--quiet"]
            code, _, errors = run(*words)
            assert code == 0, (line, errors)
    exec(show, {})
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("CLIP", "ReACT", "SecondLook", "noise-0.02", "pgd-10"))
    assert "Mirror" in Path("ranking.html").read_text()
