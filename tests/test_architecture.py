"""Imports between the modules of the package only go upwards in the list ROOMS."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import react_clip

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "react_clip"
ROOMS = [
    *(
        "environment",
        "errors",
        "optional",
        "choices",
        "storage",
        "config",
        "functional",
        "mappings",
        "noise",
        "augment",
        "kernels",
        "accelerate",
        "preprocess",
    ),
    *("encoders", "bank", "zeroshot", "linf", "defenses", "attacks", "calibration", "data", "evaluation"),
    *("finetune", "bench", "report", "integrations", "serve", "scale", "cli", "__main__"),
]
FORBIDDEN = {
    "serve": {"attacks", "evaluation"},
    "data": {"defenses", "attacks", "calibration"},
}
OPTIONAL = {"open_clip", "torchvision", "onnx", "transformers", "skimage", "sklearn", "yaml", "pyarrow", "matplotlib"}
OPTIONAL |= {"datasets", "webdataset", "scipy", "fastapi", "uvicorn", "ray", "pyautoattack"}
OPTIONAL |= {"chromadb", "langchain_core", "fsspec", "onnxruntime", "onnxscript", "openvino"}
MODULES = sorted(PACKAGE.rglob("*.py"))
LAZY = [node for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body if isinstance(node, ast.ImportFrom)]
OWNERS = {alias.name: node.module for node in LAZY if node.module for alias in node.names}
"""Room of each public name that is imported on first use."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_upwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ROOMS, f"{room} is a new room: put it where it belongs in ROOMS"
    imported = imported_rooms(ast.parse(path.read_text()))
    assert imported <= set(ROOMS), f"unknown rooms {imported - set(ROOMS)}"
    downwards = {other for other in imported if ROOMS.index(other) > ROOMS.index(room)}
    assert not downwards, f"{room} imports {downwards}, which stand below it"
    assert not imported & FORBIDDEN.get(room, set())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_are_imported_where_they_are_used(path: Path) -> None:
    top_level = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in top_level if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module.split(".")[0] for node in top_level if isinstance(node, ast.ImportFrom) and node.module}
    # The commands and the package of integrations import these modules on first use.
    on_first_use = {
        "serve": {"fastapi", "uvicorn"},
        "integrations": {"transformers"},
        "figures": {"matplotlib", "scipy"},
    }
    allowed = on_first_use.get(path.parent.name, set())
    assert not names & (OPTIONAL - allowed), "import it inside the function that needs it"


def test_the_checks_can_fail() -> None:
    assert imported_rooms(ast.parse("from react_clip.serve.app import x\nimport react_clip.data.spec")) == {
        "serve",
        "data",
    }
    assert imported_rooms(ast.parse("from react_clip import load, attacks")) == {"encoders", "attacks"}


@pytest.mark.parametrize("package", [react_clip, react_clip.integrations], ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import react_clip", {"torch", "transformers", "numpy", "yaml", "matplotlib"}),
        ("from react_clip.cli import main; main(['--help'])", {"torch", "transformers", "numpy", "tqdm"}),
        (
            "from react_clip import ReACT, ZeroShotClassifier, load, attacks; "
            "from react_clip.integrations import drift_only; "
            "from react_clip.encoders.vision import VisionTower; import torch; torch.set_default_device('meta'); "
            "VisionTower(width=4, hidden=8, layers=1, heads=1, size=8, patch=4, dim=2)",
            {"transformers", "scipy", "pyarrow", "open_clip", "chromadb", "langchain_core", "torchvision", "onnx"}
            | {"torch._dynamo"},
        ),
    ],
)
def test_heavy_packages_are_imported_on_first_use(statement: str, absent: set[str]) -> None:
    program = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not absent & set(done.stderr.split())
