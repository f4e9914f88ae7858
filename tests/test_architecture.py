"""The rooms of the house, and who may call whom: imports only ever go upwards in this list."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "react_clip"
ROOMS = [
    *(
        "environment",
        "errors",
        "optional",
        "storage",
        "functional",
        "fusing",
        "graphs",
        "mappings",
        "noise",
        "augment",
        "preprocess",
    ),
    *("encoders", "bank", "zeroshot", "defenses", "attacks", "adaptive", "calibration", "data", "evaluation"),
    *("finetune", "bench", "report", "integrations", "serve", "scale", "cli", "__main__"),
]
FORBIDDEN = {
    "serve": {"attacks", "adaptive", "evaluation"},
    "attacks": {"defenses"},
    "data": {"defenses", "attacks", "calibration"},
}
OPTIONAL = {"open_clip", "torchvision", "onnx", "transformers", "skimage", "sklearn", "yaml", "pyarrow", "matplotlib"}
OPTIONAL |= {"datasets", "webdataset", "scipy", "fastapi", "uvicorn", "ray", "pyautoattack"}
OPTIONAL |= {"chromadb", "langchain_core", "fsspec", "onnxruntime", "onnxscript", "openvino"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    """Rooms that a module imports, anywhere in it; ``from react_clip import load`` counts as the room that owns it."""
    owners = {
        "Encoder": "encoders",
        "load": "encoders",
        "pull": "encoders",
        "LabelBank": "bank",
        "ReactClipError": "errors",
    }
    owners |= {"ZeroShotClassifier": "zeroshot", "evaluate": "evaluation", "calibrate": "calibration"}
    owners |= dict.fromkeys(("Defended", "ReACT", "Undefended", "as_module"), "defenses")
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "react_clip":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            rooms |= {owners.get(name, name) for name in names}
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("react_clip.")}
    return rooms - {"__version__"}


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
    assert not names & OPTIONAL, "import it inside the function that needs it"


def test_the_checks_can_fail() -> None:
    assert imported_rooms(ast.parse("from react_clip.serve.app import x\nimport react_clip.data.spec")) == {
        "serve",
        "data",
    }
    assert imported_rooms(ast.parse("from react_clip import load, attacks")) == {"encoders", "attacks"}
