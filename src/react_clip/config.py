"""Configurations: described by typed fields, checked by pydantic, written to and read from JSON values.

A configuration is a frozen dataclass::

    class Blur(Configuration):
        width: Count = 3
        strength: Fraction = 0.5

Every way to make one (a call, :meth:`Configuration.replace`, :meth:`Configuration.from_dict`) checks all fields and
raises a one-line :class:`ReactClipError` that names the value, the limit and a way out.

Defences, attacks and mappings are families of configurations (:class:`Registered`): each class has a ``kind``, and
``{"kind": ..., field: value}`` describes one of the family.
"""

from __future__ import annotations

import dataclasses
import json
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, PlainSerializer, ValidationError
from pydantic_core import ArgsKwargs, CoreSchema, core_schema

from react_clip import storage
from react_clip.errors import ReactClipError, first_line

# ---------------------------------------------------------------------- field types


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


def _check_range(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError("it needs 0 < low <= high")
    return value


Count = Annotated[int, Field(ge=1)]
"""A whole number >= 1."""
Whole = Annotated[int, Field(ge=0)]
"""A whole number >= 0."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Range = Annotated[tuple[float, float], AfterValidator(_check_range)]
"""``(low, high)`` with 0 < low <= high."""
FractionRange = Annotated[tuple[Fraction, Fraction], AfterValidator(_check_range)]
"""``(low, high)`` with 0 < low <= high <= 1."""
_Length = Annotated[float, AfterValidator(check_length), BeforeValidator(read_length), PlainSerializer(write_length)]
PixelLength = Annotated[_Length, Field(ge=0)]
"""A length in pixel values, in [0, 1]; may be written ``"4/255"``."""
PositiveLength = Annotated[_Length, Field(gt=0)]
"""A :data:`PixelLength` above 0."""

# ---------------------------------------------------------------------- configurations

_RULES = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
class Configuration:
    """A frozen, checked dataclass; a subclass needs no decorator, only annotated fields.

    Numbers are strict: neither ``True`` nor ``"3"`` is a number, NaN and infinity are refused. Checks that concern
    several fields go into ``__post_init__`` and raise :class:`ReactClipError`. A field whose type is a configuration
    accepts its JSON values too.
    """

    removed: ClassVar[Mapping[str, Any]] = {}
    """Fields that files of earlier versions have, with the value that still means the same (``...`` for any)."""

    def __init_subclass__(cls, *, described: bool = False, **kwargs: Any) -> None:
        """With ``described`` the descriptions in :func:`fields_of` are the docstrings below the fields."""
        super().__init_subclass__(**kwargs)
        rules = pydantic.ConfigDict(**_RULES, use_attribute_docstrings=described)
        pydantic.dataclasses.dataclass(cls, frozen=True, repr=False, config=rules)
        checked: Callable[..., None] = cls.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            try:
                checked(self, *args, **values)
            except ValidationError as error:
                raise ReactClipError(_explain(cls, error)) from None

        cls.__init__ = init  # type: ignore[method-assign]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any) -> Any:
            return value if isinstance(value, ArgsKwargs | cls) else cls.from_dict(value)

        def write(value: Any, fields: Callable[[Any], Any]) -> Any:
            # A field may hold a subclass of its type, which has fields of its own.
            return {**value._head(), **fields(value)} if type(value) is source else value.to_dict()

        serialization = core_schema.wrap_serializer_function_ser_schema(write)
        return core_schema.no_info_before_validator_function(read, handler(source), serialization=serialization)

    def _head(self) -> dict[str, Any]:
        """Entries that :meth:`to_dict` writes before the fields."""
        return {}

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return cast(Self, dataclasses.replace(cast(Any, self), **changes))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values: dict[str, Any] = cast(Any, self).__pydantic_serializer__.to_python(self, mode="json")
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration with these fields; those left out have their defaults."""
        if not isinstance(data, Mapping):
            raise ReactClipError(f"{_short(data)} is not a mapping of {cls.__name__}; {_known_fields(cls)}")
        # JSON and YAML have no tuples; fields are never lists, so that configurations can be hashed.
        values = {str(key): tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for key, default in cls.removed.items():
            if key in values and values.pop(key) != default and default is not ...:
                raise ReactClipError(f"{_title(cls)} no longer has {key!r} (now always {_short(default)}); remove it")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        storage.write_text(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a configuration, or the ``config`` of a calibration file."""
        data = storage.read_json(Path(path), "check the path, or write it again with save() or calibrate")
        is_calibration = isinstance(data, dict) and "config" in data and "config" not in fields_of(cls)
        return cls.from_dict(data["config"] if is_calibration else data)

    def __repr__(self) -> str:
        """The log line and the test id; fields that are ``None`` by default are shown only if they are set."""
        written, parts = self.to_dict(), []
        for name, field in fields_of(type(self)).items():
            value = getattr(self, name)
            if value is not None or field.default is not None:
                parts.append(f"{name}={value if isinstance(value, Configuration) else written[name]}")
        return f"{type(self).__name__}({', '.join(parts)})"


def fields_of(cls: type[Any]) -> dict[str, Any]:
    """Pydantic's descriptions of the fields, in order."""
    return getattr(cls, "__pydantic_fields__", {})


# ---------------------------------------------------------------------- errors in one line


def _explain(cls: type[Any], error: ValidationError) -> str:
    """One line about the first field of ``cls`` that pydantic refused: its value, what is wrong, and all fields."""
    errors = error.errors(include_url=False)
    first, cause = errors[0], errors[0].get("ctx", {}).get("error")
    if not first["loc"]:  # a check of several fields
        return str(cause)
    position = first["loc"][0]
    name = position if isinstance(position, str) else [*fields_of(cls), "a further value"][position]
    if isinstance(cause, ReactClipError):  # a configuration in this field
        return f"{name}: {cause}"
    if first["type"].startswith("missing"):
        return f"{_title(cls)} needs {name!r}; {_known_fields(cls)}"
    # Several for a field of several types.
    reasons = [each["msg"].removeprefix("Value error, ") for each in errors if each["loc"][:1] == first["loc"][:1]]
    return f"{name} is {_short(first['input'])}: {' or '.join(dict.fromkeys(reasons))}; {_known_fields(cls)}"


def _title(cls: type[Any]) -> str:
    return str(getattr(cls, "kind", cls.__name__))


def _known_fields(cls: type[Any]) -> str:
    names = list(fields_of(cls))
    return f"the fields of {_title(cls)} are {', '.join(names)}" if names else f"{_title(cls)} has no fields"


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."


# ---------------------------------------------------------------------- what other packages offer


def offered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group, of any installed package, by their names."""
    return {point.name: point for point in entry_points(group=group)} if group else {}


def find_offered(group: str, name: str, family: str) -> Any:
    """The object of an entry point, or of ``module:object``; ``None`` for a name that is neither."""
    point = offered(group).get(name)
    reference = point.value if point else name
    if not (group and ":" in reference):
        return None
    try:
        return pkgutil.resolve_name(reference)
    except (ImportError, AttributeError, ValueError) as error:
        raise ReactClipError(f"{family} {name!r} cannot be imported: {first_line(error)}") from error


# ---------------------------------------------------------------------- families

C = TypeVar("C", bound="Registered")


class Registry(Generic[C]):
    """The classes of a family by their kinds.

    A kind is the ``kind`` of a class that has been defined. With a ``group`` it is also the name of an entry point in
    that group of any installed package, or ``module:Class``. ``earlier`` maps kinds in files of earlier versions to
    what they are now: a kind, and fields.
    """

    def __init__(self, family: str, group: str = "", earlier: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._family, self._group, self._earlier = family, group, earlier or {}
        self._classes: dict[str, type[C]] = {}

    def add(self, cls: type[C]) -> None:
        """Make a class known by its kind."""
        known = self._classes.get(cls.kind, cls)
        if _reference(known) != _reference(cls):
            raise ReactClipError(f"{self._family} kind {cls.kind!r} belongs to {_reference(known)}; choose another one")
        self._classes[cls.kind] = cls

    def names(self) -> list[str]:
        """All kinds, sorted."""
        return sorted({*self._classes, *offered(self._group)})

    def get(self, kind: Any) -> type[C]:
        """The class of a kind."""
        if isinstance(kind, str) and kind in self._classes:
            return self._classes[kind]
        found = find_offered(self._group, kind, self._family) if isinstance(kind, str) else None
        if found is not None:
            return self._checked(found, kind)
        problem = f"the {self._family} has no kind" if kind is None else f"{self._family} {_short(kind)} does not exist"
        own = ", or write module:Class for your own" if self._group else ""
        raise ReactClipError(f"{problem}; choose one of {', '.join(self.names())}{own}")

    def read(self, data: Mapping[str, Any] | str) -> C:
        """One of the family from its kind, or from ``{"kind": kind, field: value, ...}``."""
        values = {"kind": data} if isinstance(data, str) else data
        if not isinstance(values, Mapping):
            raise ReactClipError(f"the {self._family} is {_short(data)}; give its kind, or a mapping with one")
        values = {**values, **self._earlier.get(str(values.get("kind")), {})}
        return self.get(values.pop("kind", None)).from_dict(values)

    def name_of(self, cls: type[C]) -> str:
        """The name by which :meth:`get` finds a class in any process: its kind, or ``module:Class``."""
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return cls.kind if ours or cls.kind in offered(self._group) else _reference(cls)

    def _checked(self, found: Any, kind: str) -> type[C]:
        ours = isinstance(found, type) and issubclass(found, Registered) and found.registry is self
        if not ours or "kind" not in vars(found) or kind not in (found.kind, _reference(found)):
            raise ReactClipError(f"{kind} is no {self._family}: it needs the family's base class and a kind of its own")
        return cast("type[C]", found)


def _reference(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


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

    def _head(self) -> dict[str, Any]:
        return {"kind": self.registry.name_of(type(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """One of this class from its fields, with or without its kind; a base class needs the kind."""
        if not isinstance(data, Mapping) or "kind" not in vars(cls):
            return cast(Self, cls.registry.read(data))
        values = dict(data)
        kind = values.pop("kind", None)
        if kind is not None and cls.registry.get(kind) is not cls:
            raise ReactClipError(f"this configuration is for {kind!r}, not {cls.kind!r}")
        return super().from_dict(values)
