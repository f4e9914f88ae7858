"""Small YAML files of plain values, read strictly: no key twice, no alias, no large file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from react_clip.errors import ReactClipError
from react_clip.optional import require

MAX_YAML_BYTES = 256 * 1024


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a small YAML file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ReactClipError(f"{path} cannot be read: {error.strerror}; give a file like recipes/table1.yaml") from None
    if len(data) > MAX_YAML_BYTES:
        raise ReactClipError(f"{path} has more than {MAX_YAML_BYTES:,} bytes; a recipe is a short YAML file")
    try:
        return parse_yaml(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ReactClipError(f"{path} is no UTF-8 text; a recipe is a short YAML file") from None
    except ReactClipError as error:
        raise ReactClipError(f"{path}: {error}") from None


def parse_yaml(text: str) -> dict[str, Any]:
    """The mapping in a YAML text of plain values; keys must be text and appear once, aliases are refused.

    >>> parse_yaml("title: a\\ndatasets: [b]")
    {'title': 'a', 'datasets': ['b']}
    """
    require("yaml", "reading recipes", extra="eval")
    import yaml

    class Strict(yaml.SafeLoader):
        """SafeLoader keeps the last of two equal keys, and lets aliases grow without bound."""

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
    except ReactClipError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise ReactClipError(f"not valid YAML{line} ({getattr(error, 'problem', None) or 'bad text'})") from None
    except (RecursionError, ValueError):
        raise ReactClipError("not valid YAML (a value is nested too deeply or malformed)") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ReactClipError("a recipe is a mapping with lines such as `model: clip-vit-b-16`")
    return values
