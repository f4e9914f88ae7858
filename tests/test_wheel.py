"""Wheel and sdist: what is in them, and the wheel at work in an environment that does not see the source tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

import react_clip as rc
from react_clip.cli.photos import bundled_photos

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "react_clip"
NAME = f"react_clip-{rc.__version__}"
MAX_WHEEL, MAX_SDIST = 4 * 2**20, 10 * 2**20
"""Bytes. The label bank is the largest file of the wheel, with 1.4 MB; figures are most of the rest of the sdist."""
IN_SDIST = {
    "src",
    "tests",
    "docs",
    "examples",
    "recipes",
    "deploy",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
}
IN_SDIST |= {"pyproject.toml", "PKG-INFO", ".gitignore"}


@dataclass(frozen=True)
class Built:
    """Files that the build made."""

    sdist: Path
    wheel: Path
    """From the source tree."""
    wheel_of_sdist: Path
    """From the unpacked sdist."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    for words in (["--outdir", folder / "both"], ["--outdir", folder, "--wheel"]):
        # Without isolation: the build backend comes from this environment, not from a package index.
        command = [sys.executable, "-m", "build", "--no-isolation", *map(str, words), str(ROOT)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    wheel = f"{NAME}-py3-none-any.whl"
    return Built(folder / "both" / f"{NAME}.tar.gz", folder / wheel, folder / "both" / wheel)


def read_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    content = read_wheel(built.wheel)
    source = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    package = {f"react_clip/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in source}
    about = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    about.add(f"{NAME}.dist-info/licenses/LICENSE")
    assert set(content) == set(package) | about
    assert {name: content[name] for name in package} == package
    needed = ["py.typed", "__init__.pyi", "assets/label_bank.safetensors", "assets/calibrations/clip-vit-b-16.json"]
    needed += ["assets/recipes/standard.yaml", "data/sets.toml", "serve/static/page.html", "report/page.js"]
    assert {f"react_clip/{name}" for name in needed} <= set(content)
    assert built.wheel.stat().st_size < MAX_WHEEL


def test_the_metadata_names_version_python_and_extras(built: Built) -> None:
    metadata = Parser().parsestr(read_wheel(built.wheel)[f"{NAME}.dist-info/METADATA"].decode())
    assert metadata["Version"] == rc.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"offline", "demo", "eval", "serve", "examples"} <= set(metadata.get_all("Provides-Extra", []))
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {"torch", "numpy", "pillow"} <= {line.partition(">")[0].lower() for line in always}


def test_every_file_names_the_same_version() -> None:
    """A release changes all of them."""
    files = [ROOT / name for name in ("README.md", "CITATION.cff", "compose.yaml", "Dockerfile", "pyproject.toml")]
    files += [*filter(Path.is_file, (ROOT / "deploy").rglob("*")), ROOT / "docs" / "serve.md"]
    pattern = r"(?:react-clip:|react_clip-|^version: |^version = \")(\d+\.\d+\.\d+)"
    named = {path.name: set(re.findall(pattern, path.read_text(), re.MULTILINE)) for path in files}
    assert {name for name, versions in named.items() if versions} >= {"README.md", "CITATION.cff", "pyproject.toml"}
    assert {name: versions for name, versions in named.items() if versions - {rc.__version__}} == {}


def test_the_sdist_builds_the_same_wheel(built: Built) -> None:
    assert read_wheel(built.wheel_of_sdist) == read_wheel(built.wheel)


def test_the_sdist_has_sources_and_no_results(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = [Path(name) for name in archive.getnames()]
    assert {name.parts[0] for name in names} == {NAME}
    assert {name.parts[1] for name in names} == IN_SDIST
    assert not [name for name in names if "__pycache__" in name.parts or name.suffix in (".pyc", ".parquet")]
    assert built.sdist.stat().st_size < MAX_SDIST


# ---------------------------------------------------------------------- the installed wheel


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel; it imports everything else from this environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", str(built.wheel)]
    subprocess.run(command, check=True, env=clean_environment())
    [packages] = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but the .pth files inside it (an editable install) are not read.
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "libraries.pth").write_text("\n".join(sorted(libraries)) + "\n")
    return folder / "bin"


def clean_environment() -> dict[str, str]:
    """The environment variables without those that lead Python to the source tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run_installed(command: list[str | Path], folder: Path) -> str:
    """Stdout of a program that is started in ``folder``."""
    finished = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_installed_package_is_imported_from_its_environment(installed: Path, tmp_path: Path) -> None:
    program = "import react_clip; print(react_clip.__file__, react_clip.__version__, react_clip.__all__)"
    output = run_installed([installed / "python", "-c", program], tmp_path)
    assert output.startswith(str(installed.parent / "lib"))
    assert output.split(" ", 1)[1].strip() == f"{rc.__version__} {rc.__all__}"
    assert rc.__version__ in run_installed([installed / "react-clip", "--version"], tmp_path)


@pytest.mark.tower
def test_the_installed_command_classifies_a_photo(installed: Path, pulled_tower: str, tmp_path: Path) -> None:
    words = ["classify", bundled_photos()[0], "--labels", "cat, rocket", "--model", pulled_tower, "--json", "--quiet"]
    [row] = json.loads(run_installed([installed / "react-clip", *words], tmp_path))["results"]
    assert row["answers"][0]["label"] == "cat"
