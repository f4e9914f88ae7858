"""Runs to report on, and a page of theirs in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import toy_run

import react_clip as rc
from react_clip.report.figures import FigureOf, figures_of
from react_clip.report.page import Report, write_report
from react_clip.report.run import Run

HOSTILE = "<img src=x onerror=alert(1)>"
"""A class name that would run code if it ever became markup."""
NAMES = [HOSTILE, "</script><script>alert(2)</script><!--", 'quote " and & amp', "tabby cat", "class \u2713"]


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small complete run with pictures, two draws, two attacks, and class names that nobody should trust."""
    folder = tmp_path_factory.mktemp("runs") / "toy"
    toy_run(folder, names=NAMES, title="Toys & <b>bold</b> claims")
    return folder


@pytest.fixture(scope="session")
def second_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another defence on the same photos."""
    folder = tmp_path_factory.mktemp("runs") / "second"
    toy_run(folder, names=NAMES, defenses={"slow": rc.ReACT(tau=0.1, views=2)})
    return folder


@pytest.fixture(scope="session")
def toy_report(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, list[tuple[str, int, int]]]:
    """The toy's page with some of its figures, written once, and the calls of its progress function."""
    steps: list[tuple[str, int, int]] = []

    def some_figures(run: Run, **options: Any) -> tuple[list[FigureOf], dict[str, str]]:
        found, reasons = figures_of(run, **options)
        return found[::4], reasons

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("react_clip.report.figures.figures_of", some_figures)
        out = tmp_path_factory.mktemp("page")
        return write_report([toy_folder], out, photos=6, progress=lambda *step: steps.append(step)), steps


@pytest.fixture
def toy_copy(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures out: they have their own tests and take most of a report's time."""
    monkeypatch.setattr("react_clip.report.figures.figures_of", lambda run, **options: ([], {}))


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page from disk; anything that it complains about, asks for or pops up fails the test at its end."""
    contexts, complaints, requests = [], [], []

    def open_page(path: Path, fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"alert {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.goto(path.as_uri() + fragment)
        allowed.add(path.as_uri())
        return page

    allowed: set[str] = set()
    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} <= allowed, "a page asks for nothing but itself"
