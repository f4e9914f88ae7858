"""Sweeps in a recipe: one entry with lists of values stands for every combination of them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from react_clip.errors import ReactClipError

LARGEST = 400
"""Most defences that one entry may stand for."""


def expand(values: dict[str, Any], label: str, grid: Any) -> list[tuple[str, dict[str, Any]]]:
    """Labels and configurations of every combination; a dot leads into a nested field.

    >>> entry = {"defense": "aom", "mapping": {"kind": "constant", "sigma": 0.1}}
    >>> for label, config in expand(entry, "AOM", {"mapping.sigma": [0.05, 0.1], "alpha": [2.0]}):
    ...     print(label, config)
    AOM sigma=0.05 alpha=2 {'defense': 'aom', 'mapping': {'kind': 'constant', 'sigma': 0.05}, 'alpha': 2.0}
    AOM sigma=0.1 alpha=2 {'defense': 'aom', 'mapping': {'kind': 'constant', 'sigma': 0.1}, 'alpha': 2.0}
    """
    if not isinstance(grid, dict) or not grid:
        raise ReactClipError(f"grid is {grid!r}; it maps fields to lists, such as {{alpha: [1.2, 2.0]}}")
    for name, choices in grid.items():
        if not isinstance(choices, list) or not choices:
            raise ReactClipError(f"grid field {name!r} is {choices!r}; it must be a list with at least one value")
    combinations = list(itertools.product(*grid.values()))
    if len(combinations) > LARGEST:
        raise ReactClipError(
            f"the grid of {label!r} stands for {len(combinations)} defences; at most {LARGEST} are allowed, so shorten "
            "its lists"
        )
    found = []
    for combination in combinations:
        config, words = copy.deepcopy(values), [label]
        for name, value in zip(grid, combination, strict=True):
            _put(config, name, value)
            words.append(f"{name.rpartition('.')[2]}={_short(value)}")
        found.append((" ".join(words), config))
    return found


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    *outer, last = name.split(".")
    place = config
    for part in outer:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ReactClipError(f"grid field {name!r} leads into {part!r}, which is {inner!r} and has no fields")
        place = inner
    place[last] = value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
