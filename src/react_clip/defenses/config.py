"""What every defence's configuration can do: be copied with changes, be written as JSON, be read back strictly."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from react_clip import storage
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError


@dataclass(frozen=True)
class Configuration:
    """A frozen dataclass whose ``repr`` is its id; subclasses add their fields and a ``name``."""

    name: ClassVar[str]
    _parts: ClassVar[dict[str, type[Any]]] = {}
    """Fields that are configurations of their own, and their types."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def check(self, encoder: Encoder) -> None:
        """Refuse an encoder that this defence cannot run on; most defences run on all."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return {"defense": self.name, **{f.name: self._write_field(f.name) for f in dataclasses.fields(self)}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read a configuration back; fields left out keep their defaults, unknown ones are refused."""
        values = dict(data)
        kind = values.pop("defense", cls.name)
        if kind != cls.name:
            raise ReactClipError(f"this configuration is for defence {kind!r}, not {cls.name!r}")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            fields = f"its fields are {', '.join(sorted(known))}" if known else "it has no fields"
            raise ReactClipError(f"{cls.name} has no field {unknown[0]!r}; {fields}")
        return cls(**{name: cls._read_field(name, value) for name, value in values.items()})

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        storage.write_text(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a configuration, or the ``config`` of a calibration file."""
        data = storage.read_json(
            Path(path), missing="check the path", invalid="write it again with save() or calibrate"
        )
        if not isinstance(data, dict):
            raise ReactClipError(f"{path} holds a {type(data).__name__}; a configuration is a JSON object")
        return cls.from_dict(data.get("config", data))

    def _write_field(self, name: str) -> Any:
        """A field as JSON values."""
        value = getattr(self, name)
        return dataclasses.asdict(value) if name in self._parts else value

    @classmethod
    def _read_field(cls, name: str, value: Any) -> Any:
        """The opposite of :meth:`_write_field`."""
        if name not in cls._parts or not isinstance(value, dict):
            return value
        try:
            return cls._parts[name](**value)
        except TypeError as error:
            raise ReactClipError(f"{name} is not understood: {error}") from None

    def _check_numbers(self, *names: str, least: float = -math.inf) -> None:
        """Refuse fields that are no finite numbers, or smaller than ``least``."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ReactClipError(f"{name} is {value!r}; it must be a finite number")
            if value < least:
                raise ReactClipError(f"{name} is {value!r}; it must be >= {least:g}")

    def _check_counts(self, *names: str, least: int = 1) -> None:
        """Refuse fields that are no whole numbers, or smaller than ``least``."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ReactClipError(f"{name} is {value!r}; it must be a whole number >= {least}")
