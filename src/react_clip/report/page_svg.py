"""A figure's SVG as part of a page: ids of its own, colours that follow the page, no style that a policy forbids."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_NOT_DRAWN = {f"{{{_SVG}}}{name}" for name in ("metadata", "style", "title")}
_DIGITS = re.compile(r"(\.\d\d)\d+")
"""Hundredths of a point are finer than any screen."""
_FONT = re.compile(
    r"(?:(?P<style>italic|oblique) )?(?:(?P<weight>bold|\d{3}) )?(?P<size>[\d.]+(?:px|pt)?) (?P<family>.+)"
)


def inline_svg(text: str, *, prefix: str, label: str, colours: Mapping[str, str]) -> str:
    """The ``<svg>`` element for a page.

    Args:
        text: an SVG file as matplotlib writes it.
        prefix: put before every id; different for each figure of a page, because matplotlib uses the same ids again.
        label: what screen readers say instead of the drawing.
        colours: colours of the file, by what takes their place, such as ``currentColor``.
    """
    root = ElementTree.fromstring(text)
    wanted = {colour.lower(): replacement for colour, replacement in colours.items()}
    for parent in root.iter():
        for child in [child for child in parent if child.tag in _NOT_DRAWN]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        _style_as_attributes(element)
        if "d" in element.attrib:
            element.set("d", _DIGITS.sub(r"\1", " ".join(element.attrib["d"].split())))
        # Only text keeps its spaces.
        if element.tag not in ("text", "tspan"):
            element.text = (element.text or "").strip()
        element.tail = (element.tail or "").strip() if element.tag != "tspan" else element.tail
        for name, value in list(element.attrib.items()):
            if name == f"{{{_XLINK}}}href":
                del element.attrib[name]
                name = "href"
            element.set(name, _adapted(name, value, prefix, wanted))
    width, height = (root.attrib.pop(name, "") for name in ("width", "height"))
    root.attrib.pop("version", None)
    if "viewBox" not in root.attrib:
        root.set("viewBox", f"0 0 {width.removesuffix('pt')} {height.removesuffix('pt')}")
    # What matplotlib leaves to defaults (black text) and to a style sheet of the file's own.
    root.attrib |= {
        "fill": "currentColor",
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "role": "img",
        "aria-label": label,
    }
    return ElementTree.tostring(root, encoding="unicode")


def _style_as_attributes(element: ElementTree.Element) -> None:
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font" and (font := _FONT.fullmatch(value)):
            element.attrib |= {f"font-{part}": found for part, found in font.groupdict().items() if found}
        elif name and not name.startswith("-"):
            element.set(name, value)


def _adapted(name: str, value: str, prefix: str, colours: Mapping[str, str]) -> str:
    if name == "id":
        return prefix + value
    if name == "href" and value.startswith("#"):
        return f"#{prefix}{value[1:]}"
    if "url(#" in value:
        return value.replace("url(#", f"url(#{prefix}")
    return colours.get(value.lower(), value)
