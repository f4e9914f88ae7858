"""docs/paper.md: it covers the whole paper, and every name, recipe, file and section that it mentions exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from react_clip.cli import parse_args
from react_clip.evaluation import Recipe

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
PARTS = {"Equations": 20, "Algorithms": 2, "Tables": 17, "Figures": 33}
"""Number of each in the paper, the appendix included."""


def section(title: str) -> list[str]:
    """The rows of a section, without the head."""
    body = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line for line in body.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("title", PARTS)
def test_the_whole_paper_is_there(title: str) -> None:
    numbers: list[int] = []
    for row in section(title):
        first, middle, last = re.fullmatch(r"\| (\d+)(?: (and|to) (\d+))?,? .*", row).groups()  # type: ignore[union-attr]
        numbers += range(int(first), int(last) + 1) if middle else [int(first)]
    assert numbers == list(range(1, PARTS[title] + 1))


def mentioned() -> list[str]:
    """Every text in backticks inside a table."""
    return sorted({text for row in ROWS for text in re.findall(r"`([^`]+)`", row)})


def exists(name: str) -> bool:
    """True if a recipe, a file, a command or a dotted name below ``react_clip`` exists."""
    if name.endswith(".yaml"):
        return (ROOT / "recipes" / name).is_file()
    if name.startswith("benchmarks/"):
        return (ROOT / name).exists()
    if name.startswith(("react-clip ", "--")):
        return True
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["react_clip", *parts[:depth]]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_every_name_exists() -> None:
    assert [name for name in mentioned() if not exists(name)] == []
    assert not exists("functional.no_such_name")
    assert not exists("no_such_recipe.yaml")
    for command in (name for name in mentioned() if name.startswith("react-clip ")):
        with pytest.raises(SystemExit) as ended:
            parse_args([*command.split()[1:], "--help"])
        assert ended.value.code == 0, command


def test_every_recipe_of_the_paper_is_named() -> None:
    recipes = {path.name: Recipe.load(path).paper for path in (ROOT / "recipes").glob("*.yaml")}
    of_the_paper = {name for name, part in recipes.items() if not part.startswith(("beyond", "excerpt"))}
    assert of_the_paper - set(mentioned()) == set()


def test_the_sweeps_span_what_the_paper_sweeps() -> None:
    def recipe(name: str) -> Recipe:
        return Recipe.load(ROOT / "recipes" / f"{name}.yaml")

    for method in ("AOM", "Defend-CLIP"):
        swept = [item.params for item in recipe("leakage").defenses if item.family == method]
        alphas, scales = ({point[name] for point in swept} for name in ("alpha", "mapping.sigma"))
        assert (min(alphas), max(alphas), min(scales), max(scales)) == (0.4, 2.4, 0.03, 0.28)
    taus = {item.params["tau"] for item in recipe("table3").defenses if item.params}
    assert {round(0.5 + 0.05 * step, 2) for step in range(11)} <= taus
    assert {item.params["views"] for item in recipe("sweep-views").defenses} >= {1, 3, 7, 10}
    assert {item.params["alpha"] for item in recipe("sweep-alpha").defenses} >= {1.2, 2.0, 2.4}
    for name, steps in {"table1-extended": 10, "mappings": 10, "mappings-pgd100": 100, "mappings-imagenet": 10}.items():
        attacks = recipe(name).attacks
        assert [item.attack.to_dict()["steps"] for item in attacks] == 6 * [steps]
        assert [round(255 * item.eps) for item in attacks] == [1, 4, 8, 16, 24, 32]


def slug(heading: str) -> str:
    """The anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_section_that_is_linked_exists() -> None:
    links = re.findall(r"\]\(([\w.-]+\.md)#([^)]+)\)", TEXT)
    assert len(links) > 20
    for file, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in map(slug, headings), f"{file}#{anchor}"
