"""A run's folder: one process at a time, one recipe for ever, and a log of what happened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from react_clip import storage
from react_clip.errors import ReactClipError
from react_clip.evaluation import yaml_text
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.store import ShardStore, log

RECIPE, PER_IMAGE, RESULT, TABLES = "recipe.yaml", "per_image.parquet", "result.json", "tables"
SHARDS = "shards"
_LOG = "run.log"


@contextmanager
def opened(folder: Path, recipe: Recipe) -> Iterator[ShardStore]:
    """Hold the folder for this process and this recipe; gives the store of its shards."""
    with storage.held_folder(folder):
        store = ShardStore(folder / SHARDS)
        _claim(folder, recipe)
        store.sweep()
        with _logged(folder / _LOG):
            yield store


def _claim(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into a fresh folder; refuse a folder that holds another one."""
    place = folder / RECIPE
    ours = recipe.to_dict()
    if not place.exists():
        if taken := [name for name in (RESULT, PER_IMAGE) if (folder / name).exists()]:
            raise ReactClipError(f"{folder} has a {taken[0]} but no {RECIPE}; choose another --out")
        storage.write_text(place, yaml_text.write_mapping(ours))
        return
    try:
        theirs = yaml_text.read_mapping(place)
    except ReactClipError as error:
        raise ReactClipError(f"{error}; the file is damaged: remove it to continue, or choose another --out") from None
    if theirs != ours:
        keys = [key for key in ours if theirs.get(key) != ours[key]]
        raise ReactClipError(
            f"{folder} holds the run {theirs.get('title')!r}, which is not {recipe.title!r} as asked for now (other "
            f"{', '.join(keys) or 'keys'}); choose another --out"
        )


class _QuietFile(logging.FileHandler):
    """A log that a full disk cannot turn into a traceback on the user's terminal."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Drop the line."""


@contextmanager
def _logged(place: Path) -> Iterator[None]:
    try:
        handler = _QuietFile(place, encoding="utf-8", delay=True)
    except OSError:
        yield
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        with suppress(OSError):
            handler.close()
