"""The documentation site: it builds strictly, its links lead somewhere, and its reference and search are complete."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import react_clip

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attacks", "bench", "data", "defenses", "encoders", "evaluation", "finetune", "integrations", "scale")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of MkDocs, such as a broken link, fails the build."""
    for package in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason="needs the site's packages: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class Links(HTMLParser):
    """Addresses that a page names, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.targets.add(value)


def test_every_link_leads_to_a_file_and_an_anchor(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 30
    broken = []
    for page, links in pages.items():
        for link in links.targets:
            address = urlsplit(link)
            if address.scheme:
                continue
            file = (page.parent / unquote(address.path)).resolve() if address.path else page
            file = file / "index.html" if file.is_dir() else file
            anchors = pages[file].anchors if file in pages else {unquote(address.fragment)}
            if not file.is_file() or unquote(address.fragment) not in anchors:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_figures_can_be_read_on_a_dark_page(site: Path) -> None:
    figures = [*(site / "figures").rglob("*.svg")]
    assert figures
    assert [figure.name for figure in figures if 'style="background: white"' not in figure.read_text()] == []


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text, page
        assert "fonts.googleapis" not in text, page


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0] for line in inventory.splitlines()}
    assert "react_clip.defenses.SecondLook.threshold" in documented
    missing = []
    for module in (react_clip, *(importlib.import_module(f"react_clip.{name}") for name in PACKAGES)):
        for name in module.__all__:
            if f"{module.__name__}.{name}" not in documented and name != "__version__":
                item = getattr(module, name)  # it may be there under the name of its own module
                if not isinstance(item, ModuleType) and f"{item.__module__}.{item.__qualname__}" not in documented:
                    missing.append(f"{module.__name__}.{name}")
    assert missing == []


def test_docstrings_have_no_markup_left(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html")]
    assert any("<math" in page for page in pages)
    for markup in (":math:", ".. math", ":class:", ":func:", ":meth:", "<blockquote>"):
        assert [page[:200] for page in pages if markup in page] == [], markup


def test_links_to_files_outside_of_the_site_become_paths(site: Path) -> None:
    page = (site / "add-your-defence" / "index.html").read_text(encoding="utf-8")
    assert "<code>recipes/standard.yaml</code>" in page
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="tutorial-production/"' in home
    assert 'href="contributing/"' in home


def test_the_search_index_has_pages_and_docstrings(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    places = {entry["location"] for entry in entries if "SecondLook" in entry["title"] + entry["text"]}
    assert "second-look/" in places
    assert "reference/defenses/#react_clip.defenses.SecondLook" in places


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site behind HTTP: browsers let no search worker run from files."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_dark_mode_and_search_work_in_a_browser(browser: Any, address: str) -> None:
    context = browser.new_context(color_scheme="light", viewport={"width": 1300, "height": 900})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    assert page.locator("article img").first.evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.locator("body").get_attribute("data-md-color-scheme") == "default"
    page.get_by_title("Dark mode").click()
    page.wait_for_selector("body[data-md-color-scheme=slate]")
    page.locator("input.md-search__input").click()
    page.keyboard.type("leakage")
    first = page.locator(".md-search-result__item a").first
    first.wait_for()
    assert "leakage" in str(first.get_attribute("href"))
    assert errors == []
    context.close()
