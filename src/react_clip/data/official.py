"""Official releases: sets that torchvision reads, and downloads from torchvision or the Hugging Face hub.

The list of photos and labels comes from torchvision; the photos are opened by us, so that a label costs no decoding.
CIFAR's files are pickles, torchvision's own format: it checks their MD5 before it opens them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.labels import ClassIndex
from react_clip.data.registry import DatasetSpec
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

_BY_NAME = {"test": {"split": "test"}, "train": {"split": "train"}}


@dataclass(frozen=True)
class _Reader:
    """How to ask a torchvision class for a split, and where it then keeps its photos and labels."""

    photos: str = "_image_files"
    labels: str = "_labels"
    splits: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: _BY_NAME)


_CIFAR = _Reader("data", "targets", {"test": {"train": False}, "train": {"train": True}})
_WITH_VAL = {**_BY_NAME, "val": {"split": "val"}}

READERS: Mapping[str, _Reader] = {
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "stl10": _Reader("data", "labels"),
    "dtd": _Reader(splits=_WITH_VAL),  # torchvision's default is partition 1, the paper's
    "oxford_pets": _Reader("_images", splits={"test": {"split": "test"}, "train": {"split": "trainval"}}),
    "flowers102": _Reader(splits=_WITH_VAL),
    "fgvc_aircraft": _Reader(splits=_WITH_VAL),
    "stanford_cars": _Reader("_samples", ""),
    "food101": _Reader(),
}
"""The other sets that torchvision downloads are class folders once unpacked, which we read as such."""


def load_torchvision(spec: DatasetSpec, root: Path, split: str, *, download: bool) -> ImageDataset:
    """Read a set through its torchvision class."""
    reader = READERS[spec.name]
    source = _construct(spec, root, download=download, **reader.splits[split])
    pairs = _pairs(source, reader)
    index = ClassIndex(spec.folders, spec.class_names)
    # torchvision numbers the classes it meets; only their names are sure to mean the same to both of us.
    found = [index.find(str(name)) for name in getattr(source, "classes", spec.folders)]
    photos = []
    for number, (photo, label) in enumerate(pairs):
        ours = found[label] if 0 <= label < len(found) else None
        if ours is None:
            raise ReactClipError(
                f"{spec.name} under {root} has the label {label}, which is none of its classes; get it again"
            )
        if isinstance(photo, np.ndarray):
            photos.append(Photo(f"{split}/{number:05d}", ours, photo))
        else:
            path = Path(photo)
            photos.append(Photo(path.relative_to(root).as_posix(), ours, path))
    return ImageDataset(spec.name, split, spec.class_names, spec.folders, spec.templates, tuple(photos))


def download_folders(spec: DatasetSpec, root: Path) -> None:
    """Let torchvision download and unpack a set that we then read as class folders."""
    _construct(spec, root, download=True)


def _construct(spec: DatasetSpec, root: Path, **arguments: object) -> Any:
    datasets = require("torchvision.datasets", f"reading {spec.name}", extra="data")
    try:
        if arguments.get("download"):
            root.mkdir(parents=True, exist_ok=True)
        return getattr(datasets, spec.torchvision)(root, **arguments)
    except ImportError as error:
        raise ReactClipError(
            f"{spec.name} needs {error.name}, which is missing; pip install 'react-clip[data]'"
        ) from error
    except Exception as error:  # torchvision raises RuntimeError, ValueError, URLError, OSError or KeyError as it comes
        reason = str(error).partition(".")[0].strip() or type(error).__name__
        raise ReactClipError(
            f"{spec.name} cannot be read from {root} ({reason}); {spec.how_to_get_under(root)}"
        ) from error


def _pairs(source: Any, reader: _Reader) -> Iterable[tuple[Any, int]]:
    photos = getattr(source, reader.photos)
    if not reader.labels:
        return [(photo, int(label)) for photo, label in photos]
    if isinstance(photos, np.ndarray) and photos.shape[-1] != 3:
        photos = photos.transpose(0, 2, 3, 1)  # STL10 keeps colour first
    return [(photo, int(label)) for photo, label in zip(photos, getattr(source, reader.labels), strict=True)]


def download_from_hub(spec: DatasetSpec, root: Path, split: str) -> None:
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
