"""Photos that carry a label instead of lying in a class folder: rows of a table, members of an archive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.labels import ClassIndex
from react_clip.data.spec import DEFAULT_TEMPLATE, DatasetSpec
from react_clip.errors import ReactClipError


@dataclass(frozen=True)
class Tagged:
    """A photo before its label is understood: an index into the source's own class list, a name, or nothing of use."""

    id: str
    tag: object
    read: Callable[[], bytes]


def build(
    rows: Sequence[Tagged], own_names: Sequence[str], name: str, split: str, spec: DatasetSpec | None
) -> ImageDataset:
    """Labelled photos from tagged ones; ``own_names`` is the source's class list, empty where it has none."""
    if not rows:
        raise ReactClipError(f"{name} has no {split} photo in its files; get it again")
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    if spec is None:
        names = folders = tuple(own_names) or _names_in_use(rows)
    else:
        names, folders, templates = spec.class_names, spec.folders, spec.templates
    label_of = _labeller(own_names, names, folders, name)
    photos = []
    for row in rows:
        label = label_of(row.tag)
        if label is None:
            raise ReactClipError(
                f"photo {row.id} of {name} has the label {row.tag!r}, which is none of its {len(names)} classes "
                f"(0 to {len(names) - 1}, or a name such as {folders[0]!r}); correct the label"
            )
        photos.append(Photo(row.id, label, row.read))
    return ImageDataset(name, split, names, folders, templates, tuple(photos))


def _names_in_use(rows: Sequence[Tagged]) -> tuple[str, ...]:
    words = sorted({row.tag for row in rows if isinstance(row.tag, str)})
    numbers = [row.tag for row in rows if isinstance(row.tag, int)]
    return tuple(words) if words else tuple(str(index) for index in range(max([0, *numbers]) + 1))


def _labeller(
    own_names: Sequence[str], names: Sequence[str], folders: Sequence[str], set_name: str
) -> Callable[[object], int | None]:
    index = ClassIndex(folders, names)
    translated = [index.find(own) for own in own_names]
    # Another list of the same length with other words ("tench, Tinca tinca") is in the official order; a shorter or
    # reordered one is understood by its words.
    by_words = None not in translated and len(set(translated)) == len(translated)
    if own_names and not by_words and len(own_names) != len(names):
        raise ReactClipError(
            f"{set_name} has {len(names)} classes, but its files list {len(own_names)} others, such as "
            f"{own_names[0]!r}; use the files of that set, or another name for yours"
        )
    table = translated if own_names and by_words else list(range(len(names)))

    def label_of(tag: object) -> int | None:
        if isinstance(tag, str):
            return index.find(tag)
        return table[tag] if isinstance(tag, int) and 0 <= tag < len(table) else None

    return label_of
