"""Photos on disk: class folders, and tables (Parquet, webdataset shards) read by ``datasets``.

Every photo comes with a label: the name of its folder, or what the table says. Photos stay encoded until they are
opened. ``datasets`` keeps a copy of shards in the cache; no code of a data set is ever run.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from react_clip.choices import PHOTO_SUFFIXES
from react_clip.data.dataset import ImageDataset, Photo, PhotoSource
from react_clip.data.registry import ClassIndex, DatasetSpec, readable_names
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.storage import cache_dir, class_folders
from react_clip.zeroshot import DEFAULT_TEMPLATES

TABLES = ("{split}/*.tar", "{split}/*.parquet", "data/{split}*.parquet", "{split}*.parquet")
"""Patterns of tables below a set's folder."""
SHARD_SUFFIXES = (".tar", ".parquet")
"""Endings of files that hold several photos."""
_LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")


class DamagedTableError(ReactClipError):
    """A table that cannot be opened."""


class Labelled(NamedTuple):
    """A photo with the label its source gives: an index into the source's own class list, or a class name."""

    id: str
    label: object
    source: PhotoSource


def build_dataset(
    rows: Sequence[Labelled], own_names: Sequence[str], name: str, split: str, spec: DatasetSpec | None
) -> ImageDataset:
    """A data set from labelled photos. A known set keeps its own classes in its own order, whichever of them are here.

    ``own_names`` is the source's class list, empty where it has none.
    """
    folders = (tuple(own_names) or _labels_in_use(rows)) if spec is None else spec.folders
    names = readable_names(folders) if spec is None else spec.class_names
    templates = DEFAULT_TEMPLATES if spec is None else spec.templates
    index = ClassIndex(folders, names)
    numbers = _own_numbers(own_names, names, index, name)
    photos = []
    for row in rows:
        label = index.find(row.label) if isinstance(row.label, str) else numbers.get(row.label)
        if label is None:
            raise ReactClipError(f"photo {row.id} of {name} has the label {row.label!r}, none of {len(names)} classes")
        photos.append(Photo(row.id, label, row.source))
    return ImageDataset(name, split, names, tuple(photos), folders, templates)


def _labels_in_use(rows: Sequence[Labelled]) -> tuple[str, ...]:
    words = sorted({row.label for row in rows if isinstance(row.label, str)})
    numbers = [row.label for row in rows if isinstance(row.label, int)]
    return tuple(words) or tuple(str(index) for index in range(max(numbers, default=0) + 1))


def _own_numbers(
    own_names: Sequence[str], names: Sequence[str], index: ClassIndex, set_name: str
) -> dict[object, int | None]:
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


# ---------------------------------------------------------------------- class folders


def load_folder(folder: Path, name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read ``<folder>/<class>/``."""
    present = class_folders(folder)
    names = [entry for entry in present if spec is None or entry not in spec.ignored]
    rows = [Labelled(f"{entry}/{path.name}", entry, path) for entry in names for path in present[entry]]
    if not rows:
        raise ReactClipError(f"no photo under {folder} ({len(present)} class folders); put them in {folder}/<class>/")
    return build_dataset(rows, names if spec is None else (), name, split, spec)


# ---------------------------------------------------------------------- tables


def find_tables(folder: Path, splits: Sequence[str]) -> list[Path]:
    """Files of the first pattern and split that match any, by name."""
    matches = (sorted(folder.glob(pattern.format(split=split))) for pattern in TABLES for split in splits)
    return next(filter(None, matches), [])


def load_tables(files: list[Path], name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read Parquet files, or shards with labels in ``.cls`` or ``.json`` members."""
    datasets = require("datasets", f"reading {files[0]}", extra="data")
    table = open_tables(datasets, files)
    photo_column = next((c for c, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    labels, own_names = _labels(table)
    if photo_column is None or not labels:
        raise ReactClipError(
            f"{files[0]} has the columns {', '.join(table.column_names)}; a set needs one of images and one called "
            f"{' or '.join(_LABEL_COLUMNS)} (in shards a .cls or .json member for each photo)"
        )
    if not own_names and (listed := files[0].parent.parent / "classnames.txt").is_file():
        own_names = [line.strip() for line in listed.read_text(encoding="utf-8").split("\n") if line.strip()]
    ids = [f"{split}/{row:06d}" for row in range(len(table))]
    if "__key__" in table.column_names:  # shards
        ids = [f"{Path(url).stem}/{key}" for url, key in zip(table["__url__"], table["__key__"], strict=True)]
    photos = _rows(table, photo_column, datasets)
    rows = [Labelled(*row) for row in zip(ids, labels, photos, strict=True)]
    return build_dataset(rows, own_names, name, split, spec)


def open_tables(datasets: Any, files: list[Path]) -> Any:
    """One ``datasets.Dataset`` of all files."""
    try:
        kind = "webdataset" if files[0].suffix == ".tar" else "parquet"
        cache = str(cache_dir() / "tables")
        return datasets.load_dataset(kind, data_files=list(map(str, files)), split="train", cache_dir=cache)
    except Exception as error:  # pyarrow, tarfile and datasets each have a family of their own
        reason = first_line(error.__cause__ or error)
        raise DamagedTableError(f"{files[0]} cannot be read ({reason}); get it again") from error


def _labels(table: Any) -> tuple[list[object], list[str]]:
    """The label of each row, if there are any, and the names of the labels where the table lists them."""
    for column in _LABEL_COLUMNS:
        if column in table.features:
            return list(table[column]), list(getattr(table.features[column], "names", None) or [])
    documents = table["json"] if "json" in table.features else []
    return [next((row[field] for field in _LABEL_COLUMNS if field in row), None) for row in documents], []


def _rows(table: Any, column: str, datasets: Any) -> list[Callable[[], bytes]]:
    """Functions that read the encoded photo of each row."""
    table = table.cast_column(column, datasets.Image(decode=False))
    return [partial(_read_row, table, column, row) for row in range(len(table))]


def _read_row(table: Any, column: str, row: int) -> bytes:
    content: bytes | None = table[row][column]["bytes"]
    if content is None:  # a reference to a file or an address elsewhere, which we do not follow
        raise ReactClipError(f"row {row} of the table holds no photo; write the table again with the images embedded")
    return content


# ---------------------------------------------------------------------- photos without labels


def find_photos(path: Path) -> ImageDataset:
    """The photos of a folder with everything below it, in files, tar shards (webdataset's layout) and Parquet files.

    They have no labels. A shard that cannot be read counts as one photo that cannot be read.
    """
    suffixes = (*PHOTO_SUFFIXES, *SHARD_SUFFIXES)
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix.lower() in suffixes)
    found = [photo for file in files for photo in _photos_of(file, str(file.relative_to(path.parent)))]
    if not found:
        raise ReactClipError(f"{path} holds no photos ({', '.join(suffixes)}); give another folder or file")
    return ImageDataset(path.name, "train", ("photo",), tuple(found))


def _photos_of(file: Path, name: str) -> Iterator[Photo]:
    try:
        if file.suffix.lower() == ".tar":
            with file.open("rb") as stream:
                for member, start, size in tar_photos(stream):
                    yield Photo(f"{name}/{member}", 0, partial(_read_part, file, start, size))
            return
        if file.suffix.lower() == ".parquet":
            datasets = require("datasets", f"reading {file}", extra="data")
            table = open_tables(datasets, [file])
            rows = _rows(table, _photo_column(file, table, datasets), datasets)
            yield from (Photo(f"{name}#{number}", 0, read) for number, read in enumerate(rows))
            return
    except (OSError, tarfile.TarError, DamagedTableError):
        pass  # below it is named among what cannot be read, because it is no image
    yield Photo(name, 0, file)


def tar_photos(stream: Any) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and length of each photo in a tar shard."""
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(PHOTO_SUFFIXES):
                yield member.name, member.offset_data, member.size
            archive.members.clear()  # type: ignore[attr-defined]  # the index of a large shard would fill the memory
        # tarfile takes a damaged header for the end of the archive, which would lose what follows in silence.
        stream.seek(archive.offset)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"the header at byte {archive.offset:,} is damaged")


def _read_part(file: Path, start: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(length)


def _photo_column(file: Path, table: Any, datasets: Any) -> str:
    """The first column of images, of bytes, or of structs with bytes as Hugging Face writes them."""
    for name, kind in table.features.items():
        fields = kind if isinstance(kind, dict) else {"bytes": kind}
        if isinstance(kind, datasets.Image) or str(getattr(fields.get("bytes"), "dtype", "")).endswith("binary"):
            return str(name)
    raise ReactClipError(f"{file} has the columns {', '.join(table.column_names)}; none holds images or bytes")
