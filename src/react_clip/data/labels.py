"""Match folders, file labels and class names of other libraries to classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from react_clip.bank import match_key
from react_clip.data.registry import DatasetSpec, read_classes

_NUMBERED_NAME = re.compile(r"(\d+)\.(.+)")
"""Folders such as ``012.colt's foot``: an identifier, a dot and a name."""


class ClassIndex:
    """Finds a class by its folder name, else by its class name where that is unique."""

    def __init__(self, folders: Sequence[str], names: Sequence[str]) -> None:
        shared = Counter(map(match_key, names))
        self._by_name = {match_key(name): index for index, name in enumerate(names) if shared[match_key(name)] == 1}
        self._by_folder = {match_key(folder): index for index, folder in enumerate(folders)}

    def find(self, *tags: str) -> int | None:
        """Index of the class that matches one of the tags, the first tag first; None if there is none.

        >>> ClassIndex(["n02123045", "n02085620"], ["tabby cat", "Chihuahua"]).find("Tabby_Cat")
        0
        """
        for table in (self._by_folder, self._by_name):
            for tag in tags:
                if (index := table.get(match_key(tag))) is not None:
                    return index
        return None


def folder_tags(folder: str) -> tuple[str, ...]:
    """A folder's name and, for a numbered one, its two parts.

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
