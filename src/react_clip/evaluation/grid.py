"""Sweeps in a recipe: one entry with lists of values expands to one defence per combination."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from typing import Any

from react_clip.config import read_length
from react_clip.errors import ReactClipError

LARGEST = 400
"""Most defences that one entry may expand to."""
_PLACEHOLDER = re.compile(r"\{([\w.]+)(?::([^{}]*))?\}")


@dataclass(frozen=True)
class Point:
    """One combination of a grid: its label, its configuration, and the swept fields with their values."""

    label: str
    config: dict[str, Any]
    params: dict[str, Any]


def expand(config: dict[str, Any], label: str, grid: Any) -> list[Point]:
    """Every combination of the grid's values; a dot in a field's name leads into a nested field.

    A label may show swept values as ``{field}`` or ``{field:.2f}``; otherwise they are appended to it.

    >>> entry = {"kind": "aom", "mapping": {"kind": "constant", "sigma": 0.1}}
    >>> for point in expand(entry, "AOM", {"mapping.sigma": [0.05, 0.1], "alpha": [2.0]}):
    ...     print(point.label, point.params)
    AOM sigma=0.05 alpha=2 {'mapping.sigma': 0.05, 'alpha': 2.0}
    AOM sigma=0.1 alpha=2 {'mapping.sigma': 0.1, 'alpha': 2.0}
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
    points = []
    for combination in combinations:
        params = dict(zip(grid, combination, strict=True))
        changed = copy.deepcopy(config)
        for name, value in params.items():
            _put(changed, name, value)
        points.append(Point(_label(label, params), changed, params))
    return points


def value_at(config: Any, name: str) -> Any:
    """The value of a dotted field, or ``None`` where the configuration has no such field; ``"4/255"`` is a number.

    >>> value_at({"mapping": {"sigma": 0.1}}, "mapping.sigma")
    0.1
    """
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return read_length(config) if isinstance(config, str) and config.endswith("/255") else config


def _label(label: str, params: dict[str, Any]) -> str:
    if not _PLACEHOLDER.search(label):
        return " ".join([label, *(f"{name.rpartition('.')[2]}={_short(value)}" for name, value in params.items())])

    def shown(match: re.Match[str]) -> str:
        if match[1] not in params:
            raise ReactClipError(f"label {label!r} shows {match[1]!r}, which the grid does not sweep")
        try:
            return format(params[match[1]], match[2]) if match[2] else _short(params[match[1]])
        except ValueError as error:
            raise ReactClipError(f"label {label!r} cannot show {match[1]}: {error}") from None

    return _PLACEHOLDER.sub(shown, label)


def _put(config: dict[str, Any], name: str, value: Any) -> None:
    *outer, last = name.split(".")
    for part in outer:
        inner = config.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ReactClipError(f"grid field {name!r} leads into {part!r}, which is {inner!r} and has no fields")
        config = inner
    config[last] = value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
