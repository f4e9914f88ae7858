"""Recipes as text: a strict, bounded reading of YAML, and its writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from react_clip.errors import ReactClipError
from react_clip.optional import require

MAX_BYTES = 256 * 1024


def read_mapping(path: Path) -> dict[str, Any]:
    """The one mapping of a small YAML file, read without constructing anything but plain values."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ReactClipError(f"{path} does not exist; give a recipe such as recipes/table1.yaml") from None
    except OSError as error:
        raise ReactClipError(f"{path} cannot be read: {error.strerror}; check the path") from None
    if len(data) > MAX_BYTES:
        raise ReactClipError(f"{path} has more than {MAX_BYTES:,} bytes; a recipe is a short YAML file")
    try:
        return parse_mapping(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ReactClipError(f"{path} is no UTF-8 text; a recipe is a short YAML file") from None
    except ReactClipError as error:
        raise ReactClipError(f"{path}: {error}") from None


def parse_mapping(text: str) -> dict[str, Any]:
    """Parse YAML strictly: keys are text and appear once, and nothing is referred to twice.

    >>> parse_mapping("title: a\\ndatasets: [b]")
    {'title': 'a', 'datasets': ['b']}
    """
    require("yaml", "reading recipes", extra="eval")
    import yaml

    class Strict(yaml.SafeLoader):
        """Plain values only; YAML itself would keep the last of two equal keys, and let aliases grow without bound."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ReactClipError("an alias (*name) is used; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [getattr(key, "value", None) for key, _ in node.value]
            if twice := [key for key in keys if isinstance(key, str) and keys.count(key) > 1]:
                raise ReactClipError(f"key {twice[0]!r} is there {keys.count(twice[0])} times; keep one")
            return super().construct_mapping(node, deep=deep)

    try:
        values = yaml.load(text, Loader=Strict)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ReactClipError(f"not valid YAML{where} ({getattr(error, 'problem', None) or 'bad text'})") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, ReactClipError):
            raise
        raise ReactClipError("not valid YAML (a value is nested too deeply or malformed)") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ReactClipError("a recipe is a mapping with lines such as `model: clip-vit-b-16`")
    return values


def write_mapping(values: dict[str, Any]) -> str:
    """YAML text that :func:`parse_mapping` reads back to the same values."""
    require("yaml", "writing recipes", extra="eval")
    import yaml

    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text
