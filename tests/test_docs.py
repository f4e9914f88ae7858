"""Documents: numbers equal the result files, examples run, links lead somewhere, recipes are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from react_clip.evaluation import Recipe

ROOT = Path(__file__).resolve().parents[1]
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
    assert Recipe.from_dict(recipe.to_dict()) == recipe.replace(attack_dtype=recipe.attack_dtype or recipe.dtype)


def test_the_readme_shows_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    for command in ("make demo", "make test"):
        assert command in text
