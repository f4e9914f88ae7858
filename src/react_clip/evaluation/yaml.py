"""Small YAML files of plain values, in which no key may be there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.storage import read_text


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; its keys must be text."""
    require("yaml", "reading recipes", extra="eval")
    import yaml

    class Strict(yaml.SafeLoader):
        """SafeLoader keeps the last of two equal keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.YAMLError(f"key {twice[0]!r} is there {len(twice)} times; keep one")
            return super().construct_mapping(node, deep=deep)

    try:
        values = yaml.load(read_text(path, "give a file like recipes/table1.yaml"), Loader=Strict)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()) or "it is nested too deeply"
        raise ReactClipError(f"{path}: not valid YAML ({reason})") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ReactClipError(f"{path}: a recipe is a mapping with lines such as `model: clip-vit-b-16`")
    return values
