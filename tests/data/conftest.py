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
def own_cache(own_cache: Path) -> None:
    """No test of this room uses the user's cache."""
