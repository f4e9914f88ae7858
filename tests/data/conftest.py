"""A few photos of pets; no test of this room reaches the network or the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from toys import save_photo


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A root with a few photos of three OxfordPets classes in the folder layout, and a class of unequal size."""
    for number, (folder, count) in enumerate({"pug": 6, "Abyssinian": 4, "american_bulldog": 2}.items()):
        for photo in range(count):
            save_photo(tmp_path / "oxford_pets" / "test" / folder / f"{photo}.jpg", 100 * number + photo)
    return tmp_path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test of this room may reach the network or the user's cache."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a test reached for the network: {args}")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setenv("REACT_CLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
