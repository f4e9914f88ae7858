"""The sdist, the wheel built from it and at work where the source tree is not seen, and the workflows that release."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import react_clip as rc
from react_clip.cli.photos import bundled_photos

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "react_clip"
NAME = f"react_clip-{rc.__version__}"
MAX_WHEEL, MAX_SDIST = 4 * 2**20, 10 * 2**20
"""Bytes. The label table is the largest file of the wheel, with 1.4 MB; figures are most of the rest of the sdist."""
# No tests: they need benchmarks, tools and photos beside the repository.
IN_SDIST = {"src", "docs", "examples", "recipes", "deploy", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"}
IN_SDIST |= {"pyproject.toml", "PKG-INFO", ".gitignore"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""Without the variables that lead Python to the source tree."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the build backend comes from this environment, not from a package index.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{NAME}-py3-none-any.whl"


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    source = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    package = {f"react_clip/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in source}
    about = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert set(content) == set(package) | about | {f"{NAME}.dist-info/licenses/LICENSE"}
    assert {name: content[name] for name in package} == package
    assert wheel.stat().st_size < MAX_WHEEL
    metadata = Parser().parsestr(content[f"{NAME}.dist-info/METADATA"].decode())
    assert (metadata["Version"], metadata["Requires-Python"]) == (rc.__version__, ">=3.11")
    assert {"offline", "demo", "eval", "serve", "examples"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_sdist_has_sources_and_neither_results_nor_tests(dist: Path) -> None:
    sdist = dist / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = [Path(name) for name in archive.getnames()]
    assert {name.parts[0] for name in names} == {NAME}
    assert {name.parts[1] for name in names} == IN_SDIST
    assert not [name for name in names if "__pycache__" in name.parts or name.suffix in (".pyc", ".parquet")]
    assert sdist.stat().st_size < MAX_SDIST


@pytest.mark.smoke
def test_every_file_names_the_same_version() -> None:
    """A release changes all of them."""
    files = [ROOT / name for name in ("README.md", "CITATION.cff", "compose.yaml", "Dockerfile", "pyproject.toml")]
    files += [*filter(Path.is_file, (ROOT / "deploy").rglob("*")), *(ROOT / "docs").glob("*.md")]
    pattern = r"(?:react-clip:|react_clip-|^version: |^version = \")(\d+\.\d+\.\d+)"
    named = {path.name: set(re.findall(pattern, path.read_text(), re.MULTILINE)) for path in files}
    assert {name for name, versions in named.items() if versions} >= {"README.md", "CITATION.cff", "pyproject.toml"}
    assert {name: versions for name, versions in named.items() if versions - {rc.__version__}} == {}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel; it imports everything else from this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    [packages] = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but the .pth files inside it (an editable install) are not read.
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    return folder / "bin"


def run_installed(command: list[str | Path], folder: Path) -> str:
    """Stdout of a program that is started in ``folder``."""
    finished = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_installed_package_works_from_its_environment(installed: Path, pulled_tower: str, tmp_path: Path) -> None:
    program = "import react_clip; print(react_clip.__file__, react_clip.__version__, react_clip.__all__)"
    output = run_installed([installed / "python", "-c", program], tmp_path)
    assert output.startswith(str(installed.parent / "lib"))
    assert output.split(" ", 1)[1].strip() == f"{rc.__version__} {rc.__all__}"
    words = ["classify", bundled_photos()[0], "--labels", "cat, rocket", "--model", pulled_tower, "--json", "--quiet"]
    [row] = json.loads(run_installed([installed / "react-clip", *words], tmp_path))["results"]
    assert row["answers"][0]["label"] == "cat"


@pytest.mark.smoke
def test_workflows_run_what_is_there_and_pin_what_is_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {}, "each job asks for what it needs"
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job or "uses" in job
            for step in job.get("steps", []):
                assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40)), "actions are pinned to a commit"
                command = step.get("run", "")
                for target in command.split()[1:] if command.startswith("make ") else []:
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert "make test-lowest" in {step.get("run") for step in ci["jobs"]["lowest"]["steps"]}
    tested = ci["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert tested == re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">={tested[0]}"
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        assert shutil.which(hook["entry"].split()[0], path=str(Path(sys.executable).parent))
