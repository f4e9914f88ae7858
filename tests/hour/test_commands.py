"""Commands of README, docs and recipes' headers are parsed, and run where that is cheap, or listed with a reason."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiny_clip
from programs import Run
from react_clip.cli import COMMANDS, parse_args

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    "curl": "needs a running service; tests/serve sends such requests",
    "printf": "makes the body of such a request",
    "tr -d": "is part of it",
    "docker": "needs docker",
    "cd deploy/prometheus": "a folder of the repository",
    "head -n 1 ../../secrets/": "copies a key for Prometheus",
    "promtool": "needs Prometheus; tests/serve/test_deploy.py runs it",
    "prometheus": "needs Prometheus and a running service",
    "chmod 444": "for docker",
}
"""Beginning of a command that is neither run nor parsed here: the reason."""

NEEDS = {
    "eval": "check|evaluate|report|rank|compare",
    "serve": "serve",
    "scale": "embed .*--engine ray",
    "offline": "pull",
}
"""Extra: commands that need it. The pages that install for themselves must name it."""
INCLUDE_OFFLINE = {"demo", "eval"}

RUN_AS_PRINTED = [
    "react-clip pull clip-vit-b-16",
    'react-clip classify holiday/ --labels "beach, mountain, city"',
    "react-clip classify holiday/ --defense react",
    "react-clip embed holiday/ --out features.npy",
    'react-clip classify holiday/ --labels "beach, mountain, city" --shadow --out shadow/',
    "react-clip calibrate photos/ --model my-clip/ --labels-file names.txt --out calibration.json",
    "react-clip check my-clip/ photos/ --out checked/",
    "react-clip calibrate --defense react folder:photos --model my-clip/ --clean-pass 0.95 --out calibration.json",
]
"""Commands with two photos on the real tower, or more on a tiny one; all others of ``react-clip`` are parsed."""


def of_pages() -> list[tuple[str, str]]:
    """Page and command, for every command in a block of a document."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in re.sub(r"(\\|(?<=\|))\n\s*", " ", block).splitlines():
                words = re.sub(r"(^|\s)#.*", "", line)
                found += [(page.name, part.strip()) for part in re.split(r" && | \| ", words) if part.strip()]
    return found


def of_recipes() -> list[tuple[str, str]]:
    """Recipe and command, for every command in a comment of a recipe."""
    found = []
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        header = "\n".join(re.findall(r"^#(.*)", path.read_text(encoding="utf-8"), re.MULTILINE))
        commands = re.findall(r"`(react-clip [^`]+)`", header) + re.findall(
            r"^ {3}(react-clip .*)", header, re.MULTILINE
        )
        found += [(path.name, re.sub(r"\s+", " ", command)) for command in commands]
    return found


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small CLIP with images of 8 x 8 patches, so that SecondLook's copies have enough of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_clip, "SIZE", 8 * tiny_clip.PATCH)
        return tiny_clip.write_hf(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def here(clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with everything that the documents name."""
    for name in ("my-clip", "towers/TeCoA", "towers/FARE", "openai/clip-vit-base-patch32"):
        shutil.copytree(clip_folder, tmp_path / name)
    for name in ("recipes", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("heads", "checked", "secrets", "shards", "proof", "imagenet"):
        (tmp_path / name).mkdir()
    for name in ("first", "standard", "table1", "leakage", "a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("first.yaml", "adaptive.yaml", "my_defense.py", "shards/1.tar", "checked/calibration.json"):
        (tmp_path / name).touch()
    for folder, count in (("holiday", 2), ("photos/cat", 21), ("photos/dog", 21)):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(count):  # smooth, as photos are: their smaller copies look alike
            coarse = np.random.default_rng([number, len(folder), ord(folder[-1])]).integers(0, 256, (2, 2, 3), np.uint8)
            Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(tmp_path / folder / f"{number}.png")
    shutil.copy(tmp_path / "holiday" / "0.png", tmp_path / "my.jpg")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(command: str) -> list[str]:
    """The words of a ``react-clip`` command, with file patterns as the shell replaces them."""
    words = shlex.split(command.partition(" > ")[0])[1:]
    return [found for word in words for found in (map(str, Path().glob(word)) if "*" in word else [word])]


def test_every_command_of_the_pages_is_parsed_or_listed(here: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    unknown = []
    assert set(COMMANDS) <= {command.split()[1] for _, command in of_pages() if command.startswith("react-clip ")}
    for page, command in of_pages():
        if command.startswith("react-clip "):
            assert callable(parse_args(arguments(command)).run), (page, command)
        elif command.startswith("make "):
            subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)
        elif named := re.fullmatch(r"pip install -e '\.\[([\w,]+)\]'", command):
            assert set(named[1].split(",")) <= set(extras), (page, command)
        elif re.match(r"install -d|openssl", command):
            if shutil.which(command.split()[0]):
                subprocess.run(command, shell=True, check=True, cwd=here)
        elif not command.startswith(tuple(NOT_RUN)):
            unknown.append((page, command))
    assert unknown == [], "mend them, or say in NOT_RUN why they are not run"
    assert [each for each in NOT_RUN if not any(command.startswith(each) for _, command in of_pages())] == []


@pytest.mark.parametrize("page", ["README.md", "production.md", "research.md", "serve.md", "scale.md"])
def test_a_page_installs_what_its_commands_need(page: str) -> None:
    commands = [command for name, command in of_pages() if name == page]
    installed = {extra for each in commands for extra in "".join(re.findall(r"\.\[(.*)\]", each)).split(",") if extra}
    installed |= {"offline"} if installed & INCLUDE_OFFLINE else set()
    needed = {extra for extra, names in NEEDS.items() for each in commands if re.match(f"react-clip ({names})", each)}
    assert needed <= installed
    assert needed


@pytest.mark.usefixtures("here")
def test_every_command_of_a_recipe_is_complete() -> None:
    for recipe, command in of_recipes():
        words = arguments(command)
        assert words[0] in COMMANDS, (recipe, command)
        assert len(words) == 1 or callable(parse_args(words).run), (recipe, command)


@pytest.mark.usefixtures("here", "pulled_tower")
def test_cheap_commands_run_as_printed(run: Run) -> None:
    printed = {command for _, command in of_pages()}
    for command in RUN_AS_PRINTED:
        assert command in printed, "the pages have another command now"
        code, _, errors = run(*arguments(command))
        assert code == 0, (command, errors)


@pytest.mark.usefixtures("here")
def test_recipes_validate_on_other_photos(run: Run) -> None:
    for path in sorted((ROOT / "recipes").glob("table*.yaml")):
        code, out, errors = run("evaluate", path, "--datasets", "folder:photos", "--validate")
        assert code == 0, (path.name, errors)
        assert "work: " in out
