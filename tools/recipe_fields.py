"""Tables of docs/recipe-fields.md: the fields of a recipe, of its attacks and of its defences, from their schemas."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import griffe
import yaml
from doc_tables import table
from pydantic import TypeAdapter

from react_clip import attacks, defenses
from react_clip.attacks import Attack
from react_clip.config import Configuration, Registered
from react_clip.defenses import BaseDefense
from react_clip.evaluation import Recipe
from react_clip.mappings import Mapping

SOURCES = Path(__file__).resolve().parents[1] / "src"
SMALLEST = {"model": "clip-vit-b-16", "datasets": ["oxford_pets"], "defenses": ["undefended"]}
BASIC = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "`null`"}
ENTRIES = {"LabelledAttack": "[attacks](#attacks)", "LabelledDefense": "[defences](#defences)", "Attack": "attacks"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def fields(section: str) -> str:
    """One section of the page: ``recipe``, ``attacks``, ``defenses`` or ``parts`` (configurations in fields)."""
    kinds = {
        "attacks": [Attack.registry.get(kind) for kind in attacks.names()],
        "defenses": [BaseDefense.registry.get(kind) for kind in defenses.names()],
    }
    if section == "recipe":
        return _field_table(Recipe)
    if section == "parts":
        found = [part for classes in ([Recipe], *kinds.values()) for cls in classes for part in _parts(cls)]
        return _chapters(dict.fromkeys(found))
    return _chapters(cls for cls in kinds[section] if cls.__module__.startswith("react_clip."))


def _chapters(classes: Iterable[type[Any]]) -> str:
    chapters = []
    for cls in classes:
        summary = _plain((cls.__doc__ or "").partition("\n\n")[0])
        title = getattr(cls, "kind", cls.__name__)
        chapters.append(f"### {'Mapping: ' * issubclass(cls, Mapping)}{title}\n\n{summary}\n")
        chapters[-1] += f"\n{_field_table(cls)}" if cls.__pydantic_fields__ else ""
    return "\n".join(chapters)


def _parts(cls: type[Any]) -> list[type[Any]]:
    """Configurations that are values of fields of ``cls``; a family stands for its classes."""
    parts: list[type[Any]] = []
    for field in cls.__pydantic_fields__.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Configuration) and part.__name__ not in ENTRIES:
                family = part.registry.names() if issubclass(part, Registered) else ()
                parts += [part.registry.get(kind) for kind in family] or [part]
    return parts


def _field_table(cls: type[Any]) -> str:
    properties = TypeAdapter(cls).json_schema()["properties"]
    required = [name for name, field in cls.__pydantic_fields__.items() if field.is_required()]
    example = Recipe.from_dict(SMALLEST) if cls is Recipe else None if required else cls()
    defaults = example.to_dict() if example is not None else {}
    rows = []
    for name, schema in properties.items():
        value = defaults.get(name, schema.get("default"))
        default = "required" if name in required else f"`{_yaml(value)}`"
        is_length = isinstance(value, str) and schema.get("type") == "number"
        kind = "number or `n/255`" + _limits(schema) if is_length else _type(schema)
        rows.append([f"`{name}`", kind, default, _meaning(cls, name)])
    return "\n".join(table(["field", "value", "default", "meaning"], rows, words=4)) + "\n"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{_yaml(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return ENTRIES.get(name, f"`{name}`")
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return BASIC[schema["type"]] + _limits(schema)


def _limits(schema: dict[str, Any]) -> str:
    return ",".join(f" {sign} {schema[key]:,}" for key, sign in LIMITS.items() if key in schema)


def _yaml(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [item["kind"] for item in value]
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return str(text).removesuffix("\n...\n").strip()


@functools.cache
def _sources() -> griffe.Module:
    package = griffe.load("react_clip", search_paths=[SOURCES], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    return package


def _meaning(cls: type[Any], name: str) -> str:
    """The docstring below the field, of the class or the nearest base class that has one."""
    for base in cls.__mro__:
        if not base.__module__.startswith("react_clip."):
            continue
        source = _sources()[f"{base.__module__}.{base.__qualname__}".removeprefix("react_clip.")]
        if name in source.members and source.members[name].docstring is not None:
            return _plain(source.members[name].docstring.value)
    return ""


def _plain(docstring: str) -> str:
    """A docstring as one line of Markdown."""
    text = re.sub(r":(?:\w+):`~?([^`]+)`", r"`\1`", " ".join(docstring.split()))
    return text.replace("``", "`").replace("|", "\\|")
