"""Digests of source code, so that stored work is not mistaken for that of other code."""

from __future__ import annotations

import ast
import hashlib
import inspect
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


@cache
def code_digest(*classes: type) -> str:
    """SHA-256 of the modules that define the classes and their bases, and of all modules of ours that these import.

    Ours are the modules of this package, of the package of a class, and those beside it; comments do not count. A class
    without a file, as in a notebook, has a new digest in every process.
    """
    texts: dict[Path, str] = {}
    loose: list[str] = []
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__):
        if base.__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch"):
            continue
        try:
            file = Path(inspect.getfile(base)).resolve()
        except (OSError, TypeError):
            loose.append(secrets.token_hex())
            continue
        if file.suffix == ".py":
            _collect(file, texts)
    return hashlib.sha256("\0".join([*loose, *(texts[file] for file in sorted(texts))]).encode()).hexdigest()


def _collect(file: Path, texts: dict[Path, str]) -> None:
    """Add the syntax tree of a module and of those of ours that it imports."""
    if file in texts:
        return
    texts[file], imports = _read(file, file.stat().st_mtime_ns)
    top = file.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    own = file.relative_to(top).parts[0]
    for level, name in imports:
        first, root = name.partition(".")[0], file.parents[level - 1] if level else top
        if not level and first == PACKAGE.name:
            root = PACKAGE.parent
        elif not level and first != own and top.name in ("site-packages", "dist-packages"):
            continue
        place = root.joinpath(*name.split("."))
        for other in (place.with_suffix(".py"), place / "__init__.py"):
            if other.is_file():
                _collect(other, texts)


@cache
def _read(file: Path, changed: int) -> tuple[str, tuple[tuple[int, str], ...]]:
    """The syntax tree of a file, and the names that it imports, each with the dots before it."""
    tree, names = ast.parse(file.read_bytes()), dict[tuple[int, str], None]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # What is imported may be a module or a name within one.
            places = [node.module or "", *(f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)]
            names |= dict.fromkeys((node.level, place) for place in places)
    return ast.dump(tree), tuple(names)


@cache
def package_digest() -> str:
    """SHA-256 of all sources of the package."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def git_commit() -> str:
    """The last commit that changed the package, with ``+`` if it was changed since; empty outside of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=True).stdout

    try:
        return git("log", "-1", "--format=%H", "--", ".").strip() + "+" * bool(git("status", "--porcelain", "."))
    except (OSError, subprocess.CalledProcessError):
        return ""
