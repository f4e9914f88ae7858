"""Small YAML files of plain values, read strictly: no key twice, no alias, no large file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from react_clip.errors import ReactClipError, missing_or_wrong
from react_clip.optional import require

MAX_YAML_BYTES = 256 * 1024


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a small YAML file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise ReactClipError(f"it has more than {MAX_YAML_BYTES:,} bytes; a recipe is a short YAML file")
        return parse_yaml(data.decode("utf-8"))
    except OSError as error:
        raise missing_or_wrong(
            path, f"{path} cannot be read: {error.strerror}; give a file like recipes/table1.yaml"
        ) from None
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
        """SafeLoader keeps the last of two equal keys, and aliases let a short text become a huge value."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("an alias (*name) is used; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.YAMLError(f"key {twice[0]!r} is there {len(twice)} times; keep one")
            return super().construct_mapping(node, deep=deep)

    try:
        values = yaml.load(text, Loader=Strict)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()) or "it is nested too deeply"
        raise ReactClipError(f"not valid YAML ({reason})") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ReactClipError("a recipe is a mapping with lines such as `model: clip-vit-b-16`")
    return values
