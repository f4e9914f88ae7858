"""The forms in which photos lie on disk: class folders, webdataset shards, Hugging Face tables.

Photos in shards and tables carry a label instead of lying in a class folder. Shards are indexed once and their members
are then read in place; webdataset itself only streams, which would read a whole set to open one photo. Tables are
Parquet files as the Hub keeps them, or the output of ``save_to_disk``; no code of a repository is ever run.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.registry import DEFAULT_TEMPLATE, ClassIndex, DatasetSpec, readable_names
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

SHARDS = ("{split}/*.tar",)
TABLES = ("{split}/state.json", "{split}/*.parquet", "data/{split}*.parquet", "{split}*.parquet")
"""Patterns of shards and tables below a set's folder; ``save_to_disk`` writes a ``state.json``."""
_LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")


def class_folders(folder: Path) -> list[Path]:
    """The class folders below ``folder``, by name; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def load_folder(folder: Path, name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read ``<folder>/<class>/``. A known set keeps its own classes in its own order, whichever of them lie here."""
    present = class_folders(folder)
    notes: tuple[str, ...] = ()
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    if spec is None:
        folders = tuple(entry.name for entry in present)
        class_names = readable_names(folders)
        labels = {entry: label for label, entry in enumerate(present)}
    else:
        folders, class_names, templates = spec.folders, spec.class_names, spec.templates
        if ignored := [entry.name for entry in present if entry.name in spec.ignored]:
            notes += (f"left out {', '.join(ignored)}, which is no class",)
        labels = _known_labels([entry for entry in present if entry.name not in spec.ignored], spec, folder)
    photos = tuple(
        Photo(path.relative_to(folder).as_posix(), label, path)
        for entry, label in labels.items()
        for path in sorted(entry.iterdir())
        if path.suffix.lower() in PHOTO_SUFFIXES and path.is_file() and not path.name.startswith(".")
    )
    if not photos:
        raise ReactClipError(
            f"no photo under {folder} ({len(present)} class folders); put them in {folder}/<class>/, as "
            f"{', '.join(PHOTO_SUFFIXES)}"
        )
    if empty := len(labels) - len({photo.label for photo in photos}):
        notes += (f"{empty} class folders hold no photo",)
    return ImageDataset(name, split, class_names, folders, templates, photos, notes)


def _known_labels(present: list[Path], spec: DatasetSpec, folder: Path) -> dict[Path, int]:
    """The class of each folder of a known set."""
    index = ClassIndex(spec.folders, spec.class_names, numbered=spec.numbered)
    labels = {entry: label for entry in present if (label := index.find(entry.name)) is not None}
    if unknown := [entry.name for entry in present if entry not in labels]:
        raise ReactClipError(
            f"{len(unknown)} folders in {folder} are none of the {spec.classes} classes of {spec.name} "
            f"({', '.join(unknown[:3])}); rename them like {spec.folders[0]!r}, or use folder:{folder}"
        )
    return labels


# ---------------------------------------------------------------------- shards and tables


@dataclass(frozen=True)
class Tagged:
    """A photo with the label its source gives: an index into the source's own class list, or a class name."""

    id: str
    tag: object
    read: Callable[[], bytes]


def find_files(folder: Path, splits: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """Files of the first split and pattern that match any, by name."""
    matches = (sorted(folder.glob(pattern.format(split=split))) for split in splits for pattern in patterns)
    return next(filter(None, matches), [])


def build_dataset(
    rows: Sequence[Tagged], own_names: Sequence[str], name: str, split: str, spec: DatasetSpec | None
) -> ImageDataset:
    """A data set from tagged photos; ``own_names`` is the source's class list, empty where it has none."""
    if not rows:
        raise ReactClipError(f"{name} has no {split} photo in its files; get it again")
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    if spec is None:
        names = folders = tuple(own_names) or _names_in_use(rows)
    else:
        names, folders, templates = spec.class_names, spec.folders, spec.templates
    index = ClassIndex(folders, names)
    numbers = _own_numbers(own_names, names, index, name)
    photos = []
    for row in rows:
        label = index.find(row.tag) if isinstance(row.tag, str) else None
        if isinstance(row.tag, int):
            label = numbers.get(row.tag)
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


def _own_numbers(
    own_names: Sequence[str], names: Sequence[str], index: ClassIndex, set_name: str
) -> dict[int, int | None]:
    """The class of each number that the source uses."""
    translated = [index.find(own) for own in own_names]
    if own_names and None not in translated and len(set(translated)) == len(translated):
        return dict(enumerate(translated))
    # Another list of the same length with other words ("tench, Tinca tinca") is in the official order.
    if own_names and len(own_names) != len(names):
        raise ReactClipError(
            f"{set_name} has {len(names)} classes, but its files list {len(own_names)} others, such as "
            f"{own_names[0]!r}; use the files of that set, or another name for yours"
        )
    return {number: number for number in range(len(names))}


def load_shards(shards: list[Path], name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read shards; ``classnames.txt`` above them, where there is one, is the class list their indices mean."""
    rows = [row for shard in shards for row in _index_shard(shard)]
    listed = shards[0].parent.parent / "classnames.txt"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    return build_dataset(rows, [line for line in lines if line.strip()], name, split, spec)


def _index_shard(shard: Path) -> list[Tagged]:
    rows = []
    try:
        with tarfile.open(shard, "r:") as archive:
            samples: dict[str, dict[str, tarfile.TarInfo]] = {}
            for member in archive:
                if member.isfile():
                    # Webdataset's rule: everything after the first dot of the file name is the extension.
                    path = PurePosixPath(member.name)
                    stem, _, extension = path.name.partition(".")
                    samples.setdefault((path.parent / stem).as_posix(), {})[extension.lower()] = member
            for sample, members in samples.items():
                photo = next((m for m in members.values() if m.name.lower().endswith(PHOTO_SUFFIXES)), None)
                if photo is not None:
                    read = partial(_read_member, shard, photo.offset_data, photo.size)
                    rows.append(Tagged(f"{shard.stem}/{sample}", _tag(archive, members, sample), read))
    except (tarfile.TarError, OSError) as error:
        raise ReactClipError(f"shard {shard} cannot be read ({error}); get it again") from error
    return rows


def _tag(archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo], sample: str) -> int | str:
    """The label of a sample: the content of its ``.cls`` file, or a field of its ``.json`` file."""
    for extension in ("cls", "json"):
        if (member := members.get(extension)) is None or (stream := archive.extractfile(member)) is None:
            continue
        text = stream.read().decode("utf-8", errors="replace").strip()
        try:
            tag = json.loads(text)
        except json.JSONDecodeError:
            tag = text  # a class name, written bare
        if isinstance(tag, dict):
            tag = next((tag[field] for field in ("cls", "label", "class") if field in tag), None)
        if isinstance(tag, int | str):
            return tag
    raise ReactClipError(
        f"photo {sample} in {archive.name!s} has no label; add {sample}.cls with a class index, or {sample}.json with "
        '{"label": ...}'
    )


def _read_member(shard: Path, offset: int, size: int) -> bytes:
    with shard.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)


def load_tables(tables: list[Path], name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read Parquet files or a ``save_to_disk`` folder; photos stay encoded until they are opened."""
    datasets = require("datasets", f"reading {tables[0]}", extra="data")
    try:
        if tables[0].suffix == ".json":
            table = datasets.load_from_disk(str(tables[0].parent))
        else:
            table = datasets.Dataset.from_parquet([str(path) for path in tables])
    except Exception as error:  # pyarrow and datasets each have a family of their own
        raise ReactClipError(f"{tables[0]} cannot be read ({first_line(error)}); get it again") from error
    photo_column = next((c for c, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    label_column = next((column for column in _LABEL_COLUMNS if column in table.features), None)
    if photo_column is None or label_column is None:
        raise ReactClipError(
            f"{tables[0]} has the columns {', '.join(table.column_names)}; a set needs one of images and one called "
            f"{' or '.join(_LABEL_COLUMNS)}"
        )
    own_names = getattr(table.features[label_column], "names", None) or []
    table = table.cast_column(photo_column, datasets.Image(decode=False))
    rows = [
        Tagged(f"{split}/{row:06d}", tag, partial(_read_row, table, photo_column, row))
        for row, tag in enumerate(table[label_column])
    ]
    return build_dataset(rows, own_names, name, split, spec)


def _read_row(table: Any, column: str, row: int) -> bytes:
    content = table[row][column]["bytes"]
    if content is None:  # a reference to a file or an address elsewhere, which we do not follow
        raise ReactClipError(f"row {row} of the table holds no photo; write the table again with the images embedded")
    return bytes(content)
