"""Which class a folder, a file's tag or another library's class name stands for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from react_clip.data.spec import DatasetSpec, read_classes

_NUMBERED_NAME = re.compile(r"(\d+)\.(.+)")
"""Folders such as ``012.colt's foot``: an identifier, a dot and a name."""


def key(text: str) -> str:
    """What is left of a name once case and punctuation are gone: releases disagree on both.

    >>> key("German_Shorthaired") == key("german shorthaired")
    True
    """
    return "".join(letter for letter in text.casefold() if letter.isalnum())


class ClassIndex:
    """Finds a class by its folder first, by its name where only one class bears it."""

    def __init__(self, folders: Sequence[str], names: Sequence[str]) -> None:
        shared = Counter(map(key, names))
        self._by_name = {key(name): index for index, name in enumerate(names) if shared[key(name)] == 1}
        self._by_folder = {key(folder): index for index, folder in enumerate(folders)}

    def find(self, *tags: str) -> int | None:
        """The class that the first matching tag stands for.

        >>> ClassIndex(["n02123045", "n02085620"], ["tabby cat", "Chihuahua"]).find("Tabby_Cat")
        0
        """
        for table in (self._by_folder, self._by_name):
            for tag in tags:
                if (index := table.get(key(tag))) is not None:
                    return index
        return None


def folder_tags(folder: str) -> tuple[str, ...]:
    """The names a class folder may go by.

    >>> folder_tags("012.colt's foot")
    ("012.colt's foot", '012', "colt's foot")
    """
    parts = _NUMBERED_NAME.fullmatch(folder)
    return (folder, *parts.groups()) if parts else (folder,)


def class_of_folder(index: ClassIndex, spec: DatasetSpec, folder: str) -> int | None:
    """The class of a folder of a known set."""
    if spec.numbered and folder.isdecimal() and int(folder) < spec.classes:
        return int(folder)
    return index.find(*folder_tags(folder))


def readable_names(folders: Iterable[str]) -> tuple[str, ...]:
    """Class names for folders of no known set: WordNet ids are looked up, underscores become spaces.

    >>> readable_names(["n01440764", "001.golden_retriever"])
    ('tench', 'golden retriever')
    """
    words = dict(read_classes("imagenet"))
    return tuple(words.get(folder, folder_tags(folder)[-1].replace("_", " ")) for folder in folders)
