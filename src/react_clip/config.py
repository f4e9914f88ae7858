"""Configurations: described by typed fields, checked by pydantic, written to and read from JSON values.

A configuration is a frozen dataclass::

    class Blur(Configuration):
        width: Count = 3
        strength: Share = 0.5

Every way to make one (a call, :meth:`Configuration.replace`, :meth:`Configuration.from_dict`) checks all fields and
raises a one-line :class:`ReactClipError` that names the value, the limit and a way out.

Defences, attacks, mappings and finetuning methods are families of configurations (:class:`Registered`): each class has
a ``kind``, and ``{"kind": ..., field: value}`` describes one of the family.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast, dataclass_transform, get_args

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import ArgsKwargs, CoreSchema, ErrorDetails, core_schema

from react_clip import storage
from react_clip.errors import ReactClipError, first_line

LEGACY_KEYS = ("defense", "name")
"""Earlier names of the key ``kind``; files that use them can still be read."""

# ---------------------------------------------------------------------- field types

_LENGTH = object()
"""Marks fields that are lengths in pixel values."""


def read_length(value: Any) -> Any:
    """The number behind ``"4/255"`` or ``"0.0157"``; anything that is no text is returned as it is.

    >>> read_length("51/255")
    0.2
    """
    if not isinstance(value, str):
        return value
    above, _, below = value.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise ValueError("it must be a number such as 4/255") from None


def write_length(value: Any) -> Any:
    """A length as a fraction of 255 where that is exact, otherwise as it is.

    >>> write_length(4 / 255), write_length(0.123456789)
    ('4/255', 0.123456789)
    """
    if not isinstance(value, float):
        return value
    text = f"{value * 255:.6g}/255"
    return text if read_length(text) == value else value


def check_length(value: float) -> float:
    """Refuse lengths above 1, most likely meant as 255ths."""
    if value > 1:
        raise ValueError(f"pixels lie in [0, 1], so write {value:g}/255")
    return value


Count = Annotated[int, Field(ge=1)]
"""A whole number >= 1."""
Whole = Annotated[int, Field(ge=0)]
"""A whole number >= 0."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PixelLength = Annotated[float, Field(ge=0), AfterValidator(check_length), BeforeValidator(read_length), _LENGTH]
"""A length in pixel values, in [0, 1]; may be written ``"4/255"``."""
PositiveLength = Annotated[float, Field(gt=0), AfterValidator(check_length), BeforeValidator(read_length), _LENGTH]
"""A :data:`PixelLength` above 0."""


def _check_range(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError("it needs 0 < low <= high")
    return value


Range = Annotated[tuple[float, float], AfterValidator(_check_range)]
"""``(low, high)`` with 0 < low <= high."""

# ---------------------------------------------------------------------- configurations

_RULES = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
class Configuration:
    """A frozen, checked dataclass; a subclass needs no decorator, only annotated fields.

    Numbers are strict: neither ``True`` nor ``"3"`` is a number, NaN and infinity are refused. Checks that concern
    several fields go into ``__post_init__`` and raise :class:`ReactClipError`. A field whose type is a configuration
    accepts its JSON values too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pydantic.dataclasses.dataclass(cls, frozen=True, repr=False, config=_RULES)
        checked: Callable[..., None] = cls.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            with one_line_errors(cls):
                checked(self, *args, **values)

        cls.__init__ = init  # type: ignore[method-assign]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any) -> Any:
            return value if isinstance(value, ArgsKwargs | cls) else cls.from_dict(value)

        return core_schema.no_info_before_validator_function(read, handler(source))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return cast(Self, dataclasses.replace(cast(Any, self), **changes))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            name: write_length(getattr(self, name)) if _is_length(field) else _plain(getattr(self, name))
            for name, field in _fields(type(self)).items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration with these fields; those left out have their defaults."""
        if not isinstance(data, Mapping):
            raise ReactClipError(f"{_short(data)} is not a mapping of {cls.__name__}; {_known_fields(cls)}")
        # JSON and YAML have no tuples; fields are never lists, so that configurations can be hashed.
        return cls(**{str(key): tuple(value) if isinstance(value, list) else value for key, value in data.items()})

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        storage.write_text(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a configuration, or the ``config`` of a calibration file."""
        data = storage.read_json(Path(path), "check the path, or write it again with save() or calibrate")
        if not isinstance(data, dict):
            raise ReactClipError(f"{path} holds a {type(data).__name__}; a configuration is a JSON object")
        return cls.from_dict(data["config"] if "config" in data and "config" not in _fields(cls) else data)

    def __repr__(self) -> str:
        """The log line and the test id; fields that are ``None`` by default are shown only if they are set."""
        written, parts = self.to_dict(), []
        for name, field in _fields(type(self)).items():
            value = getattr(self, name)
            if name in written and not (value is None and field.default is None):
                parts.append(f"{name}={value!r}" if isinstance(value, Configuration) else f"{name}={written[name]}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _fields(cls: type[Any]) -> dict[str, Any]:
    """Pydantic's descriptions of the fields of a dataclass or model, in order, keyword-only ones last."""
    return dict(sorted(getattr(cls, "__pydantic_fields__", {}).items(), key=lambda item: bool(item[1].kw_only)))


def _is_length(field: Any) -> bool:
    options = (field, *get_args(field.annotation))
    return any(_LENGTH in getattr(option, "metadata", getattr(option, "__metadata__", ())) for option in options)


def _plain(value: Any) -> Any:
    """A field's value as JSON value."""
    if isinstance(value, Configuration):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# ---------------------------------------------------------------------- errors in one line

_LIMITS = {
    "int_type": "it must be a whole number",
    "float_type": "it must be a finite number",
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "tuple_type": "it must be a tuple",
    "dict_type": "it must be a mapping",
    "greater_than": "it must be {number}> {gt:g}",
    "greater_than_equal": "it must be {number}>= {ge:g}",
    "less_than": "it must be {number}< {lt:g}",
    "less_than_equal": "it must be {number}<= {le:g}",
    "too_short": "it needs at least {min_length}",
    "literal_error": "it must be one of {choices}",
}
"""One-line explanations of pydantic's types of errors."""


@contextmanager
def one_line_errors(cls: type[Any]) -> Iterator[None]:
    """Turn pydantic's errors about the fields of ``cls`` into a one-line :class:`ReactClipError`."""
    try:
        yield
    except ValidationError as error:
        raise ReactClipError(explain(cls, error)) from None


def explain(cls: type[Any], error: ValidationError) -> str:
    """One line about the first field of ``cls`` that pydantic refused: its value, the limit and a way out."""
    first, *others = error.errors(include_url=False)
    cause = first.get("ctx", {}).get("error")
    if not first["loc"]:
        return first_line(cause) if cause is not None else first["msg"]
    position = first["loc"][0]
    name = position if isinstance(position, str) else [*_fields(cls), ""][position]
    title = getattr(cls, "kind", cls.__name__)
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{title} has no field {name!r}; {_known_fields(cls)}"
    if first["type"] in ("missing", "missing_argument"):
        return f"{title} needs {name!r}; {_known_fields(cls)}"
    if first["type"] in ("unexpected_positional_argument", "multiple_argument_values"):
        return f"{title} got too many values; {_known_fields(cls)}"
    if isinstance(cause, ReactClipError):
        return f"{name}: {cause}"
    alternatives = [_limit(item) for item in (first, *others) if item["loc"][:1] == first["loc"][:1]]
    limits = " or ".join(dict.fromkeys(alternatives)).replace(" or it must be ", " or ")
    return f"{name} is {_short(first['input'])}; {limits}{'' if cause else _example(cls, name)}"


def _limit(error: ErrorDetails) -> str:
    text, context = _LIMITS.get(error["type"]), error.get("ctx", {})
    if text is not None:
        whole = error["type"].startswith(("greater", "less")) and all(isinstance(n, int) for n in context.values())
        choices = context.get("expected", "").replace(" or ", ", ").replace("'", "")
        return text.format(**context, number="a whole number " if whole else "", choices=choices)
    return first_line(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]


def _example(cls: type[Any], name: str) -> str:
    """The default of a number as an example of what is allowed."""
    field = _fields(cls).get(name)
    default = field.default if field is not None else None
    if isinstance(default, bool) or not isinstance(default, int | float):
        return ""
    return f" (by default {write_length(default) if _is_length(field) else default})"


def _known_fields(cls: type[Any]) -> str:
    names = list(_fields(cls))
    return f"its fields are {', '.join(names)}" if names else "it has no fields"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------- families

C = TypeVar("C", bound="Registered")


class Registry(Generic[C]):
    """The classes of a family by their kinds.

    A kind is the ``kind`` of a class that has been defined. With a ``group`` it is also the name of an entry point in
    that group of any installed package, or ``module:Class``.
    """

    def __init__(self, family: str, group: str = "") -> None:
        self._family = family
        self._group = group
        self._classes: dict[str, type[C]] = {}

    def add(self, cls: type[C]) -> None:
        """Make a class known by its kind."""
        known = self._classes.get(cls.kind, cls)
        if _reference(known) != _reference(cls):
            raise ReactClipError(
                f"{self._family} kind {cls.kind!r} belongs to {_reference(known)}; give {_reference(cls)} another one"
            )
        self._classes[cls.kind] = cls

    def names(self) -> list[str]:
        """All kinds, sorted."""
        return sorted({*self._classes, *self._entry_points()})

    def get(self, kind: Any) -> type[C]:
        """The class of a kind."""
        if isinstance(kind, str) and kind in self._classes:
            return self._classes[kind]
        if isinstance(kind, str) and kind in (points := self._entry_points()):
            return self._load(kind, points[kind].value)
        if isinstance(kind, str) and ":" in kind and self._group:
            return self._load(kind, kind)
        problem = f"the {self._family} has no kind" if kind is None else f"{self._family} {_short(kind)} does not exist"
        own = ", or write module:Class for your own" if self._group else ""
        raise ReactClipError(f"{problem}; choose one of {', '.join(self.names())}{own}")

    def read(self, data: Mapping[str, Any] | str) -> C:
        """One of the family from its kind, or from ``{"kind": kind, field: value, ...}``."""
        values = {"kind": data} if isinstance(data, str) else data
        if not isinstance(values, Mapping):
            raise ReactClipError(f"the {self._family} is {_short(data)}; give its kind, or a mapping with one")
        values = dict(values)
        return self.get(pop_kind(values)).from_dict(values)

    def name_of(self, cls: type[C]) -> str:
        """The name by which :meth:`get` finds a class in any process: its kind, or ``module:Class``."""
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return cls.kind if ours or cls.kind in self._entry_points() else _reference(cls)

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)} if self._group else {}

    def _load(self, kind: str, reference: str) -> type[C]:
        module, _, path = reference.partition(":")
        try:
            loaded: Any = importlib.import_module(module)
            for name in path.split("."):
                loaded = getattr(loaded, name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ReactClipError(f"{self._family} {kind!r} cannot be imported: {first_line(error)}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Registered) and loaded.registry is self):
            raise ReactClipError(f"{reference} is no {self._family}; derive the class from the family's base class")
        if "kind" not in vars(loaded) or kind not in (loaded.kind, reference):
            raise ReactClipError(f"{reference} has no kind of its own that fits; write kind = {kind.split(':')[-1]!r}")
        return cast("type[C]", loaded)


def _reference(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def pop_kind(values: dict[str, Any]) -> Any:
    """Take the kind out of a configuration's values, whatever earlier name its key has; ``None`` if there is none."""
    key = next((key for key in ("kind", *LEGACY_KEYS) if key in values), "kind")
    return values.pop(key, None)


class Registered(Configuration):
    """A configuration that belongs to a family. The family's base class has a ``registry``, its classes a ``kind``."""

    registry: ClassVar[Registry[Any]]
    kind: ClassVar[str]
    label: ClassVar[str]
    """Name of the class in figures and tables; its Python name by default."""
    colour: ClassVar[str | None] = None
    """Colour in figures, such as ``"#0072B2"``; ``None`` lets the figure choose."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "label" not in vars(cls):
            cls.label = cls.__name__
        # A subclass without its own kind must not replace its parent in the registry.
        if "kind" in vars(cls):
            cls.registry.add(cls)

    @property
    def name(self) -> str:
        """Short name for tables: the kind, to which a class may add what tells its configurations apart."""
        return self.kind

    def to_dict(self) -> dict[str, Any]:
        """The kind and the fields as JSON values."""
        return {"kind": self.registry.name_of(type(self)), **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """One of this class from its fields, with or without its kind; a base class needs the kind."""
        if not isinstance(data, Mapping) or "kind" not in vars(cls):
            return cast(Self, cls.registry.read(data))
        values = dict(data)
        kind = pop_kind(values)
        if kind is not None and cls.registry.get(kind) is not cls:
            raise ReactClipError(f"this configuration is for {kind!r}, not {cls.kind!r}")
        return super().from_dict(values)
