"""The registry of the paper's sets: classes, splits, prompts and sources, and the classes that labels mean."""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from react_clip.errors import ReactClipError
from react_clip.label_table import match_key
from react_clip.storage import cache_dir
from react_clip.zeroshot import DEFAULT_TEMPLATES


@dataclass(frozen=True)
class DatasetSpec:
    """One of the paper's sets; ``classes`` and ``test_images`` are the paper's numbers, not those on disk."""

    name: str
    classes: int
    test_images: int
    group: Literal["downstream", "imagenet"]
    page: str
    templates: tuple[str, ...] = DEFAULT_TEMPLATES
    per_class: int | None = None
    """Photos per class in the test split; None takes all."""
    official_splits: tuple[str, ...] = ("test",)
    """Splits of the official release (the paper's test data is always called ``test`` here)."""
    torchvision: str = ""
    """Class of ``torchvision.datasets`` that downloads the set and, where there are no directories, reads it."""
    directories: tuple[str, ...] = ()
    """Folders below the root into which the official archive unpacks its class folders: the ``test`` split."""
    hub_split: str = "test"
    """Name of our ``test`` split in tables from the Hugging Face hub, which lie in ``<root>/<name>``."""
    archive: str = ""
    """Shell command that fetches the set, with ``{root}`` for the root folder; torchvision's where it is empty."""
    class_list: str = ""
    """File in ``classes/``, where it is not the set's own."""
    ignored: tuple[str, ...] = ()
    """Folders of the release that are no class."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names for the prompts, in index order."""
        return tuple(label for _, label in read_classes(self.class_list or self.name))

    @property
    def folders(self) -> tuple[str, ...]:
        """The release's own identifier of each class (folder name, WordNet id), in index order."""
        return tuple(folder for folder, _ in read_classes(self.class_list or self.name))

    def how_to_get(self, root: Path) -> str:
        """The command that fetches the set into ``root``, and the page it comes from."""
        program = f"from torchvision.datasets import {self.torchvision} as get; get('{root}', download=True)"
        command = self.archive.format(root=root) or f'python -c "{program}"'
        return f"run: {command} (about the set: {self.page})"


@cache
def read_classes(name: str) -> tuple[tuple[str, str], ...]:
    """The ``(folder, class name)`` pairs of ``classes/<name>.txt``, in the official index order.

    >>> read_classes("stl10")[2]
    ('car', 'car')
    """
    text = files("react_clip.data").joinpath("classes", f"{name}.txt").read_text(encoding="utf-8")
    pairs = (line.split("\t") for line in text.splitlines())
    return tuple((folder, label) for folder, label in pairs)


@cache
def registry() -> dict[str, DatasetSpec]:
    """Every set of ``sets.toml`` by name."""
    text = files("react_clip.data").joinpath("sets.toml").read_text(encoding="utf-8")
    entry = TypeAdapter(DatasetSpec)
    return {name: entry.validate_python({"name": name, **fields}) for name, fields in tomllib.loads(text).items()}


def names() -> list[str]:
    """The names of the paper's 17 sets, the downstream ones first.

    >>> len(names()), names()[0], names()[-1]
    (17, 'cifar10', 'imagenet_sketch')
    """
    return list(registry())


def get(name: str) -> DatasetSpec:
    """The registry's entry for a set.

    >>> get("eurosat").classes, get("eurosat").test_images, get("eurosat").templates
    (10, 27000, ('A centered satellite photo of {}.',))
    """
    if name not in registry():
        raise ReactClipError(f"data set {name!r} is not known; it is one of {', '.join(registry())}")
    return registry()[name]


def default_root() -> Path:
    """Folder of the data sets: ``$REACT_CLIP_DATA``, else ``data`` in the user's cache."""
    chosen = os.environ.get("REACT_CLIP_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir() / "data"


# ---------------------------------------------------------------------- labels

_NUMBERED_NAME = re.compile(r"(\d+)\.(.+)")
"""Folders such as ``012.colt's foot``: an identifier, a dot and a name."""


class ClassIndex:
    """Finds a class by its folder name, else by its class name where that is unique, else by its index in digits."""

    def __init__(self, folders: Sequence[str], names: Sequence[str]) -> None:
        shared = Counter(map(match_key, names))
        self._by_name = {match_key(name): index for index, name in enumerate(names) if shared[match_key(name)] == 1}
        self._by_folder = {match_key(folder): index for index, folder in enumerate(folders)}
        self._by_index = {str(index): index for index in range(len(folders))}

    def find(self, *tags: str) -> int | None:
        """Index of the class that matches one of the tags, the first tag first; None if there is none.

        >>> index = ClassIndex(["n02123045", "n02085620"], ["tabby cat", "Chihuahua"])
        >>> index.find("Tabby_Cat"), index.find("014.chihuahua"), index.find("teapot")
        (0, 1, None)
        """
        words = [word for tag in tags for word in _tag_parts(tag)]
        for table in (self._by_folder, self._by_name):
            for word in words:
                if (index := table.get(match_key(word))) is not None:
                    return index
        return self._by_index.get(tags[0])


def _tag_parts(tag: str) -> tuple[str, ...]:
    """A tag and, for a numbered one, its two parts."""
    parts = _NUMBERED_NAME.fullmatch(tag)
    return (tag, *parts.groups()) if parts else (tag,)


def readable_names(folders: Iterable[str]) -> tuple[str, ...]:
    """Class names for folders of no known set: WordNet ids are looked up, underscores become spaces.

    >>> readable_names(["n01440764", "001.golden_retriever"])
    ('tench', 'golden retriever')
    """
    words = dict(read_classes("imagenet"))
    return tuple(words.get(folder, _tag_parts(folder)[-1].replace("_", " ")) for folder in folders)
