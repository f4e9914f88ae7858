"""The label table: class features from photos, for image towers without a text tower.

One safetensors file inside the package holds one unit feature per name (the normalised mean of the image features of a
few labelled photos) and groups of names ("cat", "car") for what people ask for. ``tools/make_label_table.py`` makes it.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip import functional
from react_clip.errors import MissingFileError, ReactClipError, first_line

TABLE_FILE = Path(__file__).parent / "assets" / "label_table.safetensors"
TENSOR = "features"
_ENDINGS = (("ies", "y"), ("ves", "f"), ("ves", "fe"), ("es", ""), ("s", ""), ("", "s"), ("", "es"))
"""From a plural to its singulars, and from a singular to its plurals: the table says "jeans" and "waffles"."""


def match_key(label: str) -> str:
    """Letters and digits of a label, without case: two spellings of one label have the same key.

    >>> match_key("Jack-o'-Lantern") == match_key("jack_o lantern")
    True
    """
    return "".join(character for character in label.casefold() if character.isalnum())


@dataclass(frozen=True, eq=False, repr=False)
class LabelTable:
    """Named class features for one encoder.

    >>> table = LabelTable.load()
    >>> table
    LabelTable(clip-vit-b-16: 1296 names, 238 groups)
    >>> table.groups["guitar"]
    ('acoustic guitar', 'electric guitar')
    >>> table.features(["cats", "Golden Retriever"]).shape
    torch.Size([2, 512])
    """

    encoder: str
    """Name of the encoder whose features these are; they mean nothing to another one."""
    names: tuple[str, ...]
    """Every entry, unique, lower case."""
    groups: dict[str, tuple[str, ...]]
    """Group name to its members. A group may carry the name of one of its members; as a label it means the group."""
    sets: dict[str, tuple[str, ...]]
    """Data set to the entries its photos went into, in the order of its class folders."""
    _default: tuple[str, ...]
    _matrix: Tensor

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def load(path: Path = TABLE_FILE) -> LabelTable:
        """The table that ships with the package; read once per process."""
        if not path.is_file():
            raise MissingFileError(f"the label table {path} is missing; install react-clip again")
        try:
            with safe_open(path, framework="pt") as stored:
                matrix = stored.get_tensor(TENSOR).float()
                metadata = {key: json.loads(text) for key, text in stored.metadata().items()}
        except (SafetensorError, OSError, ValueError) as error:
            reason = first_line(error)
            raise ReactClipError(f"the label table {path} is damaged ({reason}); install react-clip again") from None
        return LabelTable(
            encoder=metadata["encoder"],
            names=tuple(metadata["names"]),
            groups={group: tuple(members) for group, members in metadata["groups"].items()},
            sets={name: tuple(entries) for name, entries in metadata["sets"].items()},
            _default=tuple(metadata["vocabulary"]),
            # fp16 storage costs a little length; callers are promised unit rows.
            _matrix=functional.normalize(matrix),
        )

    def features(self, labels: Sequence[str]) -> Tensor:
        """Unit fp32 features ``[len(labels), D]`` of entries and groups.

        Case, spaces, hyphens, underscores and a simple plural do not matter. A group's feature is the mean of its
        members' features, scaled to unit length; photos labelled with the very word ("cat") weigh as much as all
        members together.
        """
        if isinstance(labels, str) or not labels:
            raise ReactClipError(f"labels are {labels!r}; give a list of at least one name, such as ['cat', 'dog']")
        return torch.stack([self._feature(self.resolve(label)) for label in labels])

    def vocabulary(self) -> tuple[str, ...]:
        """The default labels: specific things, each under one name."""
        return self._default

    def resolve(self, label: str) -> str:
        """The name of the entry or group for a label.

        >>> LabelTable.load().resolve("Knives")
        'knife'
        """
        key = match_key(label)
        other_numbers = [key.removesuffix(ending) + other for ending, other in _ENDINGS if key.endswith(ending)]
        for candidate in (key, *other_numbers):
            if candidate and candidate in self._lookup:
                return self._lookup[candidate]
        shown = label if len(label) <= 40 else label[:37] + "..."
        raise ReactClipError(
            f"the label table has no {shown!r}{self._nearest(key[:40])}; use one of its names "
            "(English), photos of each class (--photos; ZeroShotClassifier.from_folder) or a model with a text tower"
        )

    def _nearest(self, key: str) -> str:
        # Short names with two letters swapped and names in other languages are less alike than typing errors.
        near = difflib.get_close_matches(key, self._lookup, n=3, cutoff=0.5)
        # "sky" should lead to "skyscraper" too, which is far away in edit distance.
        near += [other for other in self._lookup if len(key) > 2 and key in other and other not in near]
        return f" (near: {', '.join(self._lookup[other] for other in near[:4])})" if near else ""

    def _feature(self, label: str) -> Tensor:
        members = self.groups.get(label, (label,))
        feature = functional.normalize(self._matrix[[self._index[member] for member in members]].mean(0))
        if label in self.groups and label in self._index:
            # The word's own photos differ in kind from those of breeds and models: many are small and blurred. As one
            # member among a hundred they would not count, and small photos would go to whichever group is small.
            feature = functional.normalize(feature + self._matrix[self._index[label]])
        return feature

    @functools.cached_property
    def _lookup(self) -> dict[str, str]:
        """Names and groups by their keys."""
        return {match_key(label): label for label in (*self.names, *self.groups)}

    @functools.cached_property
    def _index(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}

    def __repr__(self) -> str:
        return f"LabelTable({self.encoder}: {len(self.names)} names, {len(self.groups)} groups)"
