"""The last part of docs/reproduction.md covers the whole paper, and every name and recipe that it mentions exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from react_clip.cli import parse_args
from react_clip.evaluation import Recipe

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8").split("## The paper, part by part")[1]
MENTIONED = {text for row in re.findall(r"^\| .*", TEXT, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)}
PARTS = {"equations": 20, "table": 17, "figure": 33}
"""Number of each in the paper, the appendix included."""


@pytest.mark.parametrize("title", PARTS)
def test_the_whole_paper_is_there(title: str) -> None:
    rows = TEXT.split(f"\n| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    numbers: list[int] = []
    for row in rows:
        listed = re.match(r"\| ([\d,; to]*)", row)
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed[1] if listed else ""):
            numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(1, PARTS[title] + 1))


def exists(name: str) -> bool:
    """True if a recipe, a file, a command or a dotted name below ``react_clip`` exists."""
    if name.endswith(".yaml"):
        return (ROOT / "recipes" / name).is_file()
    if name.startswith("benchmarks/"):
        return (ROOT / name).exists()
    if name.startswith("react-clip "):
        with pytest.raises(SystemExit) as ended:
            parse_args([*name.split()[1:], "--help"])
        return ended.value.code == 0
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(["react_clip", *parts[:depth]]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            found = getattr(found, part, None)
        return found is not None
    return name.startswith("--")


def test_every_name_exists_and_every_recipe_of_the_paper_is_named() -> None:
    assert sorted(name for name in MENTIONED if not exists(name)) == []
    assert not exists("functional.no_such_name")
    recipes = {path.name: Recipe.load(path).paper for path in (ROOT / "recipes").glob("*.yaml")}
    assert {name for name, part in recipes.items() if not part.startswith(("beyond", "excerpt"))} <= MENTIONED
