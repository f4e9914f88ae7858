"""Other people's attack libraries on our module: the examples, and agreement with ours, where they are installed.

Their pins conflict with what we need, so they get an environment of their own that sees our packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import react_clip
from react_clip.cli.photos import bundled_photos

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torchattacks", "foolbox", "eagerpy", "GitPython", "gitdb", "smmap", "adversarial-robustness-toolbox")

pytestmark = pytest.mark.others


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the attack libraries, without what they pin, and all packages from here."""
    folder = tmp_path_factory.mktemp("libraries")
    venv.create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    ours = Path(react_clip.__file__).resolve().parents[1]
    (packages / "ours.pth").write_text(f"{ours}\n{sysconfig.get_path('purelib')}\n")
    program = str(folder / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", program, "install", "-q", "--no-deps", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs packages from an index: {done.stderr.strip().splitlines()[-1:]}")
    return program


def test_ours_agree_with_theirs(python: str) -> None:
    options = "-q -m others -p no:cacheprovider tests/attacks/test_libraries.py"
    command = [python, "-m", "pytest", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed in", done.stdout), "none is skipped"


@pytest.mark.usefixtures("pulled_tower")
@pytest.mark.parametrize("library", ["torchattacks", "foolbox", "autoattack", "art"])
def test_the_example_runs(library: str, python: str) -> None:
    example = ROOT / "examples" / f"attack_with_{library}.py"
    assert len(example.read_text().splitlines()) <= 40
    command = [python, str(example), *map(str, bundled_photos()[:2])]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(re.findall(r"made on (\w+): right are (.*)", done.stdout))
    assert set(found) == {"CLIP", "SecondLook"}
    assert found["CLIP"].startswith("CLIP 0/2"), "made on CLIP, they break it"
    moved = [float(value) for value in re.findall(r"moved by ([\d.]+)/255", done.stdout)]
    assert all(0 < value <= 4.01 for value in moved)
