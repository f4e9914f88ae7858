"""Fixtures of all tests: a tiny CLIP, the real tower, the shared photos, an empty cache, and a browser."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two test processes and the servers and workers that they start share a few cores: one thread each, set before torch
# is imported. Programs that tests start inherit it, so that all of them add up floats in the same order.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

import tiny_clip
from programs import Run
from react_clip import Encoder, ReactClipError, encoders, secret
from react_clip.attacks import Attack
from react_clip.cli import main
from react_clip.defenses import Defense

SHARED = Path(__file__).resolve().parents[2] / "shared"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

# No test is timed: on a busy machine an example may take long.
settings.register_profile("no deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no deadline")

MARKED_BY_FIXTURE = {"shared": "shared", "pulled_tower": "tower", "browser": "browser"}
"""Fixture: the marker of every test that uses it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need the real tower, the shared photos or a browser, before ``-m`` selects."""
    for item in items:
        for fixture in MARKED_BY_FIXTURE.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKED_BY_FIXTURE[fixture])


def _one_line(self: ReactClipError, *words: Any) -> None:
    super(ReactClipError, self).__init__(*words)
    assert "\n" not in str(self), "errors of ours are one line"


ReactClipError.__init__ = _one_line  # type: ignore[method-assign]

# Calls without a seed and without a secret have the same noise in every run of the tests.
secret._drawn_secret = lambda: b"the secret that tests draw"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with photos and heads beside the repository."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs the photos and heads of ../shared, which is not here")
    return SHARED


@pytest.fixture(scope="session")
def pulled_tower() -> str:
    """Name of the real ViT-B/16 image tower, which is pulled on first use."""
    try:
        encoders.pull("clip-vit-b-16")
    except ReactClipError as error:
        pytest.skip(f"needs the real ViT-B/16 tower, which cannot be pulled here: {error}")
    return "clip-vit-b-16"


@pytest.fixture(scope="session")
def tower(pulled_tower: str) -> Encoder:
    """The real ViT-B/16 image tower."""
    return encoders.load(pulled_tower, device="cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small complete CLIP in Hugging Face layout."""
    return tiny_clip.write_hf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CLIP with other weights."""
    return tiny_clip.write_hf(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def open_clip_weights(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the small CLIP for open_clip, whose registry then knows the model."""
    return tiny_clip.write_open_clip(tiny_folder, tmp_path_factory.mktemp("open_clip"))


@pytest.fixture(scope="session")
def open_clip_name(open_clip_weights: Path) -> str:
    """The small CLIP through open_clip."""
    return f"open_clip:{tiny_clip.OPEN_CLIP_NAME}/{open_clip_weights}"


@pytest.fixture
def no_new_classes() -> Iterator[None]:
    """Forget the defences and attacks that a test has defined or imported from outside the package."""
    yield
    for known in (Defense.registry._classes, Attack.registry._classes):
        for kind in [kind for kind, cls in known.items() if not cls.__module__.startswith("react_clip.")]:
            del known[kind]


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small CLIP that a test may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that a test can count what is written to it."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("REACT_CLIP_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def command() -> list[str]:
    """Arguments that start the command line in a new process."""
    return [sys.executable, "-m", "react_clip"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium: ``$REACT_CLIP_BROWSER``, one that is installed, or one that Playwright downloaded.

    It ends with its module: while it runs, so does Playwright's event loop, and ``asyncio.run`` fails beside one.
    """
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    installed = os.environ.get("REACT_CLIP_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=installed, args=ARGUMENTS)
        except api.Error as error:
            reason = str(error).splitlines()[0]
            pytest.skip(f"needs a browser (apt-get install chromium, or playwright install chromium): {reason}")
        yield started
        started.close()
