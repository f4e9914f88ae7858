"""Imports between the modules of the package only go upwards in the list ROOMS; heavy packages wait until used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import react_clip

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "react_clip"
_IN_ORDER = """
environment errors optional choices storage config functional mappings secret noise augment accelerate preprocess
encoders label_table zeroshot linf defenses attacks intervals calibration data evaluation finetune bench report check
integrations serve scale cli __main__
"""
ROOMS = _IN_ORDER.split()
SHORTCUTS = {"defenses": {"calibration"}}
"""Functions that call a lower room for the user's convenience: ``SecondLook.calibrate``."""
FORBIDDEN = {"serve": {"attacks", "evaluation"}, "data": {"defenses", "attacks", "calibration"}}
_OPTIONAL = """
open_clip torchvision onnx transformers skimage sklearn yaml pyarrow matplotlib datasets webdataset scipy fastapi
uvicorn ray pyautoattack chromadb langchain_core fsspec onnxruntime onnxscript pandas zmq
"""
OPTIONAL = set(_OPTIONAL.split())
ON_FIRST_USE = {
    "serve": {"fastapi", "uvicorn", "zmq"},
    "integrations": {"transformers"},
    "figures": {"matplotlib", "scipy", "pandas"},
    "report": {"pandas", "matplotlib"},
    "evaluation": {"pandas", "pyarrow"},
    "scale": {"ray", "fastapi", "pyarrow", "fsspec"},
}
"""Folders whose modules are themselves imported on first use, and what they may import at once."""
MODULES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
LAZY = [node for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body if isinstance(node, ast.ImportFrom)]
OWNERS = {alias.name: node.module for node in LAZY if node.module for alias in node.names}
"""Room of each public name that is imported on first use."""


def imported_rooms(tree: ast.AST) -> set[str]:
    """Rooms that a module imports, anywhere in it; ``from react_clip import load`` counts as the room that owns it."""
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "react_clip":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            rooms |= {OWNERS.get(name, name) for name in names}
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("react_clip.")}
    return rooms


def test_imports_only_go_upwards() -> None:
    wrong = []
    for path, tree in MODULES.items():
        if (room := path.parts[0].removesuffix(".py")) == "__init__":
            continue
        assert room in ROOMS, f"{room} is a new room: put it where it belongs in ROOMS"
        allowed = set(ROOMS[: ROOMS.index(room) + 1]) - FORBIDDEN.get(room, set()) | SHORTCUTS.get(room, set())
        wrong += [f"{path} imports {other}" for other in sorted(imported_rooms(tree) - allowed)]
    assert wrong == []
    example = ast.parse("from react_clip.serve.app import x\nimport react_clip.data.sets\nfrom react_clip import load")
    assert imported_rooms(example) == {"serve", "data", "encoders"}


def test_optional_packages_are_imported_inside_the_functions_that_use_them() -> None:
    wrong = []
    for path, tree in MODULES.items():
        names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
        forbidden = OPTIONAL - ON_FIRST_USE.get(path.parent.name, set())
        wrong += [f"{path} imports {name}" for name in sorted(names) if name.split(".")[0] in forbidden]
    assert wrong == []


@pytest.mark.parametrize("package", [react_clip, react_clip.integrations], ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import react_clip", {"torch", "transformers", "numpy", "yaml", "matplotlib"}),
        ("from react_clip.cli import main; main(['--help'])", {"torch", "transformers", "numpy", "tqdm", "pydantic"}),
        ("import react_clip.report.demo_page", {"pandas", "matplotlib", "pyarrow", "scipy"}),
        (
            "from react_clip import ReACT, SecondLook, ZeroShotClassifier, load, attacks; "
            "from react_clip.integrations import drift_only; from react_clip.encoders.vision import VisionTower",
            {"transformers", "scipy", "pyarrow", "open_clip", "chromadb", "langchain_core", "torchvision", "onnx"}
            | {"pandas", "torch._dynamo"},
        ),
    ],
)
def test_heavy_packages_are_imported_on_first_use(statement: str, absent: set[str]) -> None:
    program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not absent & set(done.stderr.split())
