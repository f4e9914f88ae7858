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
from PIL import Image

import react_clip as rc
import tiny_clip
from programs import Run
from react_clip.attacks.universal import read_perturbation
from react_clip.encoders import Encoder
from react_clip.evaluation import Recipe

pytestmark = [pytest.mark.docs, pytest.mark.usefixtures("no_new_classes")]
ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = {path: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")))}
SMALL = {'"openai/clip-vit-base-patch16"', '"clip-vit-b-16"'}
"""Models of the examples, which tests replace by a small CLIP."""


def blocks(language: str, name: str) -> list[str]:
    """The code blocks of one language in a document."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENTS[ROOT / name], re.DOTALL)


def commands(name: str) -> list[list[str]]:
    """The words of the ``react-clip`` commands in a document."""
    lines = "\n".join(blocks("sh", name)).splitlines()
    shown = [line.partition(" > ")[0] for line in lines if line.startswith("react-clip ")]
    return [shlex.split(line, comments=True)[1:] for line in shown]


def run_examples(name: str, model: Path) -> dict[str, Any]:
    """Run the Python of a document on a small CLIP, which has no constants of its own; returns its variables."""
    example = "".join(blocks("python", name))
    for large in SMALL:
        example = example.replace(large, repr(str(model)))
    space: dict[str, Any] = {}
    exec(example.replace("rc.SecondLook.for_encoder(clip)", f"rc.SecondLook({NO_SMALL_COPY})"), space)
    return space


NO_SMALL_COPY = "copy_size=None"
"""The small CLIP has too few patches for a smaller copy."""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.smoke
def test_links_lead_to_files_that_exist() -> None:
    links = [(path, link) for path, text in DOCUMENTS.items() for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    assert [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()] == []


def test_every_marked_number_equals_its_result_file() -> None:
    from fill_docs import filled

    stale = [path.name for path, text in DOCUMENTS.items() if "<!-- end -->" in text and filled(text) != text]
    assert stale == [], "python tools/fill_docs.py rewrites them"


@pytest.mark.parametrize("model", [None, "clip-vit-b-16"])
def test_every_recipe_is_valid_for_both_models(model: str | None) -> None:
    for path in (ROOT / "recipes").glob("*.yaml"):
        recipe = Recipe.load(path, model=model)
        assert recipe.paper, path
        assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("name", ["table1", "table1-extended", "table5", "table6", "table7", "table8"])
def test_a_table_of_the_paper_has_all_its_columns_and_budgets(name: str) -> None:
    values = json.loads((ROOT / "benchmarks" / "paper.json").read_text())[name]
    budgets, methods = values.pop("columns")[1:], {f"{name} (paper)" if name == "ReACT" else name for name in values}
    recipe = Recipe.load(ROOT / "recipes" / f"{name}.yaml")
    assert [f"{255 * item.eps:g}" for item in recipe.attacks] == budgets
    labels = {item.label for item in recipe.defenses}
    if name.startswith("table1"):
        for kind in ("TeCoA", "PMG-AFT", "FARE"):
            tower = Recipe.load(ROOT / "recipes" / "finetuned.yaml", model=f"towers/{kind}")
            assert set(budgets) <= {f"{255 * item.eps:g}" for item in tower.attacks}
            labels |= {item.label for item in tower.defenses}
    assert methods <= labels


@pytest.mark.usefixtures("in_folder")
def test_the_examples_of_readme_and_production_run(tiny_folder: Path) -> None:
    Image.new("RGB", (40, 50), "teal").save("photo.jpg")
    space = run_examples("README.md", tiny_folder)
    assert space["out"].names[0] in ("cat", "dog", "teapot")
    assert space["net"](torch.rand(1, 3, 32, 32)).shape == (1, 3)
    space = run_examples("docs/production.md", tiny_folder)
    assert (space["attacked"] - space["pixels"]).abs().max() <= 4 / 255 + 1e-6
    assert len(space["answer"].names) == 2


@pytest.mark.usefixtures("in_folder")
def test_the_tutorial_for_research_runs(tiny_folder: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    name = "docs/research.md"
    make_photos, show, defense, attack, universal = blocks("python", name)
    exec(make_photos, {})
    space: dict[str, Any] = {}
    exec(attack + universal.replace("clip-vit-b-16", str(tiny_folder)), space)
    assert read_perturbation(Path(space["again"].file)).shape == (3, 32, 32)
    Path("my_defense.py").write_text(defense)
    first, _, adaptive = blocks("yaml", name)
    for file, recipe in (("first.yaml", first), ("adaptive.yaml", adaptive)):
        small = recipe.replace("clip-vit-b-16", str(tiny_folder))
        Path(file).write_text(
            small.replace(
                "second_look,", f"second_look, calibrated: false, {NO_SMALL_COPY.replace('=None', ': null')},"
            )
        )
    for words in commands(name):
        if words[0] != "pull":
            # An attacker who knows the defence finds nothing in random weights; the recipe is checked.
            code, _, errors = run(*words, "--validate" if "adaptive.yaml" in words else "--quiet")
            assert code == 0, (words, errors)
    exec(show, {})
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("CLIP", "ReACT", "SecondLook", "noise-0.02", "pgd-10"))
    assert "Mirror" in Path("ranking.html").read_text()


# ---------------------------------------------------------------------- the paper, part by part

PAPER = DOCUMENTS[DOCS / "reproduction.md"].split("## The paper, part by part")[1]
MENTIONED = {text for row in re.findall(r"^\| .*", PAPER, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)}
PARTS = {"equations": 20, "table": 17, "figure": 33}
"""Number of each in the paper, the appendix included."""


@pytest.mark.parametrize("title", PARTS)
def test_the_whole_paper_is_there(title: str) -> None:
    rows = PAPER.split(f"\n| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    numbers: list[int] = []
    for row in rows:
        listed = re.match(r"\| ([\d,; to]*)", row)
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed[1] if listed else ""):
            numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(1, PARTS[title] + 1))


def test_every_recipe_of_the_paper_is_named() -> None:
    recipes = {path.name: Recipe.load(path).paper for path in (ROOT / "recipes").glob("*.yaml")}
    assert {name for name, part in recipes.items() if not part.startswith(("beyond", "excerpt"))} <= MENTIONED


# ---------------------------------------------------------------------- recipes on the paper's encoder and a text tower


@pytest.fixture(scope="module")
def vit_b_32(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """A random CLIP with the patches and widths of ViT-B/32, the library's defaults, and two layers."""
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("vit-b-32")
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2}
    CLIPModel(CLIPConfig(vision_config=layers, text_config=layers)).save_pretrained(folder)
    tiny_clip.write_tokenizer(folder)
    return rc.load(folder, device="cpu")


def test_every_table_of_the_paper_runs_on_a_tower_of_its_shape(vit_b_32: Encoder) -> None:
    assert (vit_b_32.image_size, vit_b_32.patch_size) == (224, 32)
    recipes = [Recipe.load(path) for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    named = [recipe for recipe in recipes if recipe.model == "openai/clip-vit-base-patch32"]
    tables = {number for recipe in named for number in re.findall(r"Table (\d)", recipe.paper)}
    assert tables == set("12345678")
    swept = [item.defense for recipe in named for item in recipe.defenses if item.params]
    defenses = [item.defense for recipe in named for item in recipe.defenses if not item.params] + swept[::20]
    clf = rc.ZeroShotClassifier(vit_b_32, ["cat", "dog"], templates=["a photo of a {}."])
    photo = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    for defense in {repr(each): each for each in defenses}.values():
        defense.check(vit_b_32)
        assert bool(defense(clf, photo, seed=0).logits.isfinite().all()), defense


def test_a_percentage_in_the_first_pages_is_filled_from_its_file() -> None:
    """README, overview, ranking and SecondLook's page: only settings and the paper's own numbers are typed."""
    typed = {"README.md": {"95"}, "second-look.md": {"99.5", "2", "3"}}
    for name in ("README.md", "docs/overview.md", "docs/ranking.md", "docs/second-look.md"):
        text = re.sub(
            r"<!-- (?:number|paired|table): .*?<!-- end -->|```.*?```", "", DOCUMENTS[ROOT / name], flags=re.S
        )
        assert set(re.findall(r"([\d.]+) %", text)) <= typed.get(Path(name).name, set()), name
