"""Match folders, file labels and class names of other libraries to classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from react_clip.bank import match_key
from react_clip.data.registry import read_classes

_NUMBERED_NAME = re.compile(r"(\d+)\.(.+)")
"""Folders such as ``012.colt's foot``: an identifier, a dot and a name."""


class ClassIndex:
    """Finds a class by its folder name, else by its class name where that is unique.

    With ``numbered`` a folder may also be called by the index of its class.
    """

    def __init__(self, folders: Sequence[str], names: Sequence[str], *, numbered: bool = False) -> None:
        shared = Counter(map(match_key, names))
        self._by_name = {match_key(name): index for index, name in enumerate(names) if shared[match_key(name)] == 1}
        self._by_folder = {match_key(folder): index for index, folder in enumerate(folders)}
        if numbered:
            self._by_folder |= {str(index): index for index in range(len(folders))}

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
        return None


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
