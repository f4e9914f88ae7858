"""The documentation site: it builds strictly, its links lead somewhere, and its reference and search are complete."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import react_clip

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("attacks", "data", "defenses", "encoders", "evaluation", "integrations", "scale")

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of MkDocs, such as a broken link, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: {"", *re.findall(r'(?:id|name)="?([^">\s]+)', text)} for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in set(re.findall(r'<[a-z][^>]*?\s(?:href|src)="?([^">\s]+)', text)):
            address = urlsplit(link)
            if address.scheme:
                broken += [f"{page.relative_to(site)} fetches {link}"] if f'src="{link}"' in text else []
                continue
            file = (page.parent / unquote(address.path)).resolve() if address.path else page
            file = file / "index.html" if file.is_dir() else file
            known = anchors.get(file, {unquote(address.fragment)})
            if not file.is_file() or unquote(address.fragment) not in known:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0] for line in inventory.splitlines()}
    assert "react_clip.defenses.SecondLook.threshold" in documented
    names = {name.rpartition(".")[2] for name in documented}
    modules = [react_clip, *(importlib.import_module(f"react_clip.{name}") for name in PACKAGES)]
    public = {name for module in modules for name in getattr(module, "__all__", ()) if not name.startswith("_")}
    assert {name for name in public if not hasattr(react_clip, name) or callable(getattr(react_clip, name))} <= names


def test_equations_are_rendered_and_no_markup_is_left(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").rglob("*.html")]
    assert any("<math" in page for page in pages)
    markup = (":math:", ".. math", ":class:", ":func:", ":meth:", "<blockquote>")
    assert [word for word in markup for page in pages if word in page] == []


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_dark_mode_and_search_work_in_a_browser(browser: Any, site: Path) -> None:
    # Behind HTTP: browsers let no search worker run from files.
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page(color_scheme="light", viewport={"width": 1300, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        assert page.locator("article img").first.evaluate("image => image.complete && image.naturalWidth > 0")
        page.get_by_title("Dark mode").click()
        page.wait_for_selector("body[data-md-color-scheme=slate]")
        page.locator("input.md-search__input").click()
        page.keyboard.type("leakage")
        page.locator(".md-search-result__item a[href*=leakage]").first.wait_for()
        assert errors == []
        page.close()
        server.shutdown()
