"""Attacks as plain values: what a recipe file holds, what a log line shows, and the registry of kinds between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Self, TypeVar

from react_clip.errors import ReactClipError

_LENGTHS = ("eps", "step_size")
"""Fields that may be written ``"4/255"``."""


@dataclass(frozen=True, repr=False)
class Written:
    """A configuration with a kind; its repr is the log line.

    A family of attacks has a registry of its own as ``kinds``, and each of its classes a ``kind``.
    """

    kind: ClassVar[str]
    kinds: ClassVar[Kinds[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass without a kind of its own must not take its parent's place.
        if "kind" in cls.__dict__:
            cls.kinds.add(cls)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML; ``from_dict`` gives the attack back."""
        return {"kind": self.kind} | {f.name: _written(f.name, getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """The attack from its fields as a recipe holds them."""
        for name in _LENGTHS:
            if isinstance(values.get(name), str) and values[name] != "eps/4":
                values[name] = _length(name, values[name])
        fixed: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        try:
            return cls(**fixed)
        except TypeError as error:
            raise ReactClipError(f"attack {cls.kind!r} is not understood: {error}") from None

    def __repr__(self) -> str:
        given = {key: value for key, value in self.to_dict().items() if key != "kind" and value is not None}
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in given.items())})"


A = TypeVar("A", bound=Written)


class Kinds(Generic[A]):
    """The attacks of a family by their kinds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._classes: dict[str, type[A]] = {}

    def add(self, attack: type[A]) -> None:
        """One more kind."""
        self._classes[attack.kind] = attack

    def names(self) -> list[str]:
        """All kinds, sorted."""
        return sorted(self._classes)

    def from_dict(self, config: Mapping[str, Any]) -> A:
        """An attack from plain values."""
        values = dict(config)
        kind = values.pop("kind", None)
        if not isinstance(kind, str) or kind not in self._classes:
            raise ReactClipError(f"{self._what} {kind!r} does not exist; choose one of {', '.join(self.names())}")
        known = [f.name for f in fields(self._classes[kind])]
        if unknown := sorted(set(values) - set(known)):
            raise ReactClipError(f"attack {kind!r} has no field {unknown[0]!r}; it has {', '.join(known)}")
        return self._classes[kind].read(values)


def check_count(name: str, value: int) -> None:
    """Refuse anything but a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ReactClipError(f"{name} is {value!r}, but it must be an integer of at least 1")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse anything that is not on the list."""
    if value not in choices:
        raise ReactClipError(f"{name} is {value!r}, but it must be one of {', '.join(choices)}")


def _length(name: str, text: str) -> float:
    """The number written as ``"4/255"`` or ``"0.0157"``."""
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise ReactClipError(f"{name} is {text!r}, but it must be a number such as 4/255") from None


def _written(name: str, value: Any) -> Any:
    """Lengths as fractions of 255 where that is exact, everything else as JSON has it."""
    if name in _LENGTHS and isinstance(value, float):
        text = f"{value * 255:.6g}/255"
        return text if _length(name, text) == value else value
    return list(value) if isinstance(value, tuple) else value
