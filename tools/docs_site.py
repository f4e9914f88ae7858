"""Hooks of MkDocs and an extension of griffe for the documentation site.

``mkdocs.yml`` names this file twice: as hooks of MkDocs (pages from outside of ``docs/``, links that leave it) and as
extension of griffe, which reads docstrings without importing anything (roles, examples and equations).
"""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
}
"""Files outside of ``docs/`` that are pages of the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]+)`")
INLINE_MATH = re.compile(r":math:`([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
BLOCK_MATH = re.compile(r"^\.\. math::[ ]*(.*(?:\n[ ]+\S.*)*)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of ``docs/``."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to where their files are on the site; those of files that are not on it become their paths."""
    sources = {site: ROOT / source for source, site in PAGES.items()}
    folder = sources.get(page.file.src_uri, DOCS / page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups(default="")
        file = Path(os.path.normpath(folder / target))
        if not file.exists():
            return link[0]  # MkDocs reports it
        path = file.relative_to(ROOT).as_posix()
        if path in PAGES or file.is_relative_to(DOCS):
            there = DOCS / PAGES[path] if path in PAGES else file
            here = (DOCS / page.file.src_uri).parent
            return f"{image}[{text}]({Path(os.path.relpath(there, here)).as_posix()}{anchor})"
        named = text.strip("`/") in path
        return f"`{path}`" if named else f"{text} (`{path}`)"

    return LINK.sub(rewrite, markdown)


class Docstrings(griffe.Extension):
    """Turn examples and roles in docstrings into code, and equations into MathML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = BLOCK_MATH.sub(lambda found: _mathml(textwrap.dedent(found[1]), "block"), obj.docstring.value)
            text = INLINE_MATH.sub(lambda found: _mathml(found[1], "inline"), text)
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)
            obj.docstring.value = ROLE.sub(r"`\1`", text)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Export what the ``__init__.pyi`` of lazily imported packages name: griffe only knows ``__all__``."""
        self.on_object(obj=pkg)  # griffe calls it for everything but the package itself
        for module in (pkg, pkg["finetune"], pkg["integrations"]):
            module.exports = [name for name, member in module.members.items() if member.is_alias]


def _mathml(latex: str, display: str) -> str:
    # One line: Markdown takes a line that is indented by four spaces for code.
    return " ".join(convert(latex, display=display).split("\n"))
