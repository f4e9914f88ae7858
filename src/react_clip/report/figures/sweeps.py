"""Sweeps of a run: defences of one family that differ in one number, in two, or in the kind of their mapping.

``react-clip evaluate`` writes each defence's ``family`` and ``params`` (the swept fields) into ``result.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from react_clip import defenses
from react_clip.errors import ReactClipError
from react_clip.evaluation.grid import value_at

LEAST = 3
"""Values that make a sweep; two are a comparison."""

Settings = Mapping[str, Mapping[str, Any]]
"""Entries of a recipe's ``defenses`` by label."""


@dataclass(frozen=True)
class Sweep:
    """Defences that differ in one number."""

    kind: str
    field: str
    points: tuple[tuple[float, str], ...]
    """Values of the field, rising, each with its defence's label."""
    alpha: float | None = None
    """Extrapolation strength that all share, where they have one."""

    @property
    def labels(self) -> set[str]:
        """The defences of the sweep."""
        return {label for _, label in self.points}


@dataclass(frozen=True)
class Grid:
    """Defences that differ in two numbers; not every pair has to be there."""

    kind: str
    fields: tuple[str, str]
    cells: Mapping[tuple[float, float], str]

    @property
    def labels(self) -> set[str]:
        """The defences of the grid."""
        return set(self.cells.values())

    def values(self, field: str) -> list[float]:
        """The values of one field, rising."""
        axis = self.fields.index(field)
        return sorted({cell[axis] for cell in self.cells})

    def along(self, field: str, at: float) -> tuple[tuple[float, str], ...]:
        """Values of one field and labels, in the cells whose other field has the value ``at``."""
        axis = self.fields.index(field)
        return tuple(sorted((cell[axis], label) for cell, label in self.cells.items() if cell[1 - axis] == at))


def sweeps(settings: Settings) -> list[Sweep]:
    """Families with one swept number and at least three values of it."""
    found = []
    for (_, *fields), labels in _families(settings).items():
        points = {settings[label]["params"][fields[0]]: label for label in labels}
        if len(fields) == 1 and len(points) >= LEAST and all(map(_is_number, points)):
            config = settings[labels[0]]
            found.append(Sweep(str(config.get("kind")), fields[0], tuple(sorted(points.items())), config.get("alpha")))
    return found


def grids(settings: Settings) -> list[Grid]:
    """Families with two swept numbers, at least two values of each and three of one."""
    found = []
    for (_, *fields), labels in _families(settings).items():
        cells = {tuple(settings[label]["params"].values()): label for label in labels}
        if len(fields) != 2 or not all(_is_number(value) for cell in cells for value in cell):
            continue
        counts = [len({cell[axis] for cell in cells}) for axis in (0, 1)]
        if min(counts) >= 2 and max(counts) >= LEAST:
            found.append(Grid(str(settings[labels[0]].get("kind")), (fields[0], fields[1]), cells))
    return found


def by_mapping(settings: Settings) -> list[dict[str, str]]:
    """Families that differ in the kind of their mapping alone: labels by kind, at least two kinds."""
    groups = [labels for (_, *fields), labels in _families(settings).items() if fields == ["mapping.kind"]]
    return [
        {settings[label]["params"]["mapping.kind"]: label for label in labels} for labels in groups if len(labels) > 1
    ]


def default_of(kind: str, field: str) -> float | None:
    """A field's default, or ``None`` where there is none that a figure could mark.

    >>> default_of("react", "alpha"), default_of("aom", "mapping.sigma"), default_of("unheard-of", "alpha")
    (2.0, 0.1, None)
    """
    try:
        value = value_at(defenses.from_dict(kind).to_dict(), field)
    except (ReactClipError, TypeError):
        return None
    return float(value) if _is_number(value) else None


def _families(settings: Settings) -> dict[tuple[str, ...], list[str]]:
    """Labels by family and swept fields; defences outside of sweeps are left out."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, entry in settings.items():
        if entry.get("params"):
            groups.setdefault((str(entry.get("family", label)), *entry["params"]), []).append(label)
    return groups


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
