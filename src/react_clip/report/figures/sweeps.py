"""Which defences of a run differ in one number, in two or in their mapping: read from configurations, never labels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from react_clip import defenses
from react_clip.errors import ReactClipError

LEAST = 3
"""Values that make a sweep; two are a comparison."""
_NO_CHOICE = ("label", "max_batch", "lazy")
"""Fields that change no answer."""

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """Defences that differ in one number: labels in the order of their values."""

    kind: str
    field: str
    points: tuple[tuple[float, str], ...]
    fixed: Mapping[str, Any]
    """The fields that they share, nested ones with dots."""

    @property
    def labels(self) -> frozenset[str]:
        """The defences of the sweep."""
        return frozenset(label for _, label in self.points)


@dataclass(frozen=True)
class Grid:
    """Defences that differ in two numbers; not every pair has to be there."""

    kind: str
    fields: tuple[str, str]
    cells: Mapping[tuple[float, float], str]

    @property
    def labels(self) -> frozenset[str]:
        """The defences of the grid."""
        return frozenset(self.cells.values())

    def values(self, field: str) -> list[float]:
        """The values of one field, rising."""
        place = self.fields.index(field)
        return sorted({cell[place] for cell in self.cells})

    def along(self, field: str, at: float) -> tuple[tuple[float, str], ...]:
        """The cells where the other field has a value, as points over this field."""
        place = self.fields.index(field)
        return tuple(sorted((cell[place], label) for cell, label in self.cells.items() if cell[1 - place] == at))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration with dotted names, without what changes no answer.

    >>> flat({"defense": "aom", "mapping": {"sigma": 0.1}, "label": "AOM"})
    {'defense': 'aom', 'mapping.sigma': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        elif prefix or name not in _NO_CHOICE:
            found[prefix + name] = value
    return found


def sweeps(settings: Settings) -> list[Sweep]:
    """Groups that differ in one number alone; the lines of a grid are left to it."""
    configs = {label: flat(config) for label, config in settings.items()}
    in_grids = [grid.labels for grid in grids(settings)]
    found = []
    for field in _numbers(configs.values()):
        for group in _groups(configs, (field,)):
            points = {configs[label][field]: label for label in group}
            if len(points) < LEAST or any(set(points.values()) <= labels for labels in in_grids):
                continue
            fixed = {name: value for name, value in configs[group[0]].items() if name != field}
            found.append(Sweep(str(fixed.get("defense", "")), field, tuple(sorted(points.items())), fixed))
    return found


def grids(settings: Settings) -> list[Grid]:
    """Groups that differ in exactly two numbers, at least two values of each and three of one."""
    configs = {label: flat(config) for label, config in settings.items()}
    found = []
    for pair in itertools.combinations(_numbers(configs.values()), 2):
        for group in _groups(configs, pair):
            cells = {(configs[label][pair[0]], configs[label][pair[1]]): label for label in group}
            first, second = (len({cell[place] for cell in cells}) for place in (0, 1))
            # Two crossing lines are two sweeps; a grid has cells beside them.
            if min(first, second) >= 2 and max(first, second) >= LEAST and len(cells) > first + second - 1:
                found.append(Grid(str(configs[group[0]].get("defense", "")), pair, cells))
    return found


def by_mapping(settings: Settings) -> list[dict[str, str]]:
    """Groups that differ in nothing but the kind of their mapping: labels by kind, at least two kinds."""
    configs = {label: flat(config) for label, config in settings.items()}
    fields = {name for config in configs.values() for name in config if name.startswith("mapping.")}
    found = []
    for group in _groups(configs, tuple(sorted(fields)), needed=("mapping.kind",)):
        kinds: dict[str, str] = {}
        for label in group:
            kinds.setdefault(str(configs[label]["mapping.kind"]), label)
        if len(set(kinds) - {"constant"}) > 1:
            found.append(kinds)
    return found


def default_of(kind: str, field: str) -> float | None:
    """A field's default, or ``None`` where there is none that a figure could mark.

    >>> default_of("react", "alpha"), default_of("aom", "mapping.sigma"), default_of("unheard-of", "alpha")
    (2.0, 0.1, None)
    """
    try:
        value = flat(defenses.from_dict(kind).to_dict()).get(field)
    except (ReactClipError, TypeError):
        return None
    return float(value) if value is not None and _is_number(value) else None


def _groups(
    configs: Mapping[str, Mapping[str, Any]], free: tuple[str, ...], needed: tuple[str, ...] | None = None
) -> Iterable[list[str]]:
    """Labels whose configurations agree in everything but the free fields."""
    groups: dict[str, list[str]] = {}
    for label, config in configs.items():
        if all(name in config if needed else _is_number(config.get(name)) for name in needed or free):
            rest = {name: value for name, value in config.items() if name not in free}
            groups.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(label)
    return groups.values()


def _numbers(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Fields that hold numbers, and not always the same, in the order of their appearance."""
    values: dict[str, set[float]] = {}
    for config in configs:
        for name, value in config.items():
            if _is_number(value):
                values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
