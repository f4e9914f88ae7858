"""Hugging Face data sets: parquet files as the Hub keeps them, or what ``save_to_disk`` wrote. No remote code, ever."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from react_clip.data.dataset import ImageDataset
from react_clip.data.spec import DatasetSpec
from react_clip.data.tagged import Tagged, build
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

LABELS = ("label", "labels", "fine_label", "cls", "class")


def find_tables(root: Path, name: str, splits: tuple[str, ...]) -> list[Path]:
    """Parquet files, or one ``save_to_disk`` folder, of the first of these splits that has any."""
    folder = root / name
    for split in splits:
        if (folder / split / "state.json").is_file():
            return [folder / split]
        for pattern in (f"{split}/*.parquet", f"data/{split}*.parquet", f"{split}*.parquet"):
            if found := sorted(folder.glob(pattern)):
                return found
    return []


def load_tables(tables: list[Path], name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read tables found by ``find_tables``; photos stay encoded until they are opened."""
    datasets = require("datasets", f"reading {tables[0]}", extra="data")
    try:
        if tables[0].is_dir():
            table = datasets.load_from_disk(str(tables[0]))
        else:
            table = datasets.Dataset.from_parquet([str(path) for path in tables])
    except Exception as error:  # pyarrow and datasets each have a family of their own
        reason = first_line(error)
        raise ReactClipError(f"{tables[0]} cannot be read ({reason}); get it again") from error
    photo_column = next((c for c, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    label_column = next((column for column in LABELS if column in table.features), None)
    if photo_column is None or label_column is None:
        raise ReactClipError(
            f"{tables[0]} has the columns {', '.join(table.column_names)}; a set needs one of images and one called "
            f"{' or '.join(LABELS)}"
        )
    own_names = getattr(table.features[label_column], "names", None) or []
    table = table.cast_column(photo_column, datasets.Image(decode=False))
    tags = table[label_column]
    rows = [Tagged(f"{split}/{row:06d}", tag, partial(_read, table, photo_column, row)) for row, tag in enumerate(tags)]
    return build(rows, own_names, name, split, spec)


def _read(table: Any, column: str, row: int) -> bytes:
    content = table[row][column]["bytes"]
    if content is None:  # a reference to a file or an address elsewhere, which we do not follow
        raise ReactClipError(f"row {row} of the table holds no photo; write the table again with the images embedded")
    return bytes(content)


def fetch(spec: DatasetSpec, root: Path, split: str) -> None:
    """Download the split's shards or parquet files from the Hub into ``<root>/<name>``."""
    hub = require("huggingface_hub", f"downloading {spec.hub}", extra="data")
    theirs = spec.hub_split if split == "test" else split
    try:
        hub.snapshot_download(
            spec.hub,
            repo_type="dataset",
            local_dir=root / spec.name,
            allow_patterns=[f"{theirs}/*.tar", f"data/{theirs}*.parquet", "classnames.txt"],
        )
    except Exception as error:  # network, licence and disk errors of several libraries; all mean the same to the user
        reason = first_line(error)
        raise ReactClipError(f"cannot download {spec.hub} ({reason}); {spec.how_to_get_under(root)}") from error
