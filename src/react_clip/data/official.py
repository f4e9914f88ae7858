"""Official releases: sets that torchvision reads, and downloads from torchvision or the Hugging Face hub.

The list of photos and labels comes from torchvision; the photos are opened by us, so that a label costs no decoding.
CIFAR's files are pickles, torchvision's own format: it checks their MD5 before it opens them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.labels import ClassIndex
from react_clip.data.registry import DatasetSpec
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

READERS = {
    "cifar10": ("data", "targets"),
    "cifar100": ("data", "targets"),
    "stl10": ("data", "labels"),
    "dtd": ("_image_files", "_labels"),  # torchvision's default is partition 1, the paper's
    "oxford_pets": ("_images", "_labels"),
    "flowers102": ("_image_files", "_labels"),
    "fgvc_aircraft": ("_image_files", "_labels"),
    "stanford_cars": ("_samples", ""),  # pairs of both
    "food101": ("_image_files", "_labels"),
}
"""Attributes in which torchvision's class keeps the photos and their labels.

The other sets that torchvision downloads are class folders once unpacked, which we read as such.
"""


def load_torchvision(spec: DatasetSpec, root: Path, split: str, *, download: bool) -> ImageDataset:
    """Read a set through its torchvision class."""
    source = construct(spec, root, download=download, **_split_argument(spec.name, split))
    index = ClassIndex(spec.folders, spec.class_names)
    # torchvision numbers the classes it meets; only the class names are the same in both libraries.
    classes = [index.find(str(name)) for name in getattr(source, "classes", spec.folders)]
    photos = []
    for number, (photo, index_there) in enumerate(_pairs(source, *READERS[spec.name])):
        label = classes[index_there] if 0 <= index_there < len(classes) else None
        if label is None:
            raise ReactClipError(
                f"{spec.name} under {root} has the label {index_there}, which is none of its classes; get it again"
            )
        if isinstance(photo, np.ndarray):
            photos.append(Photo(f"{split}/{number:05d}", label, photo))
        else:
            photos.append(Photo(Path(photo).relative_to(root).as_posix(), label, Path(photo)))
    return ImageDataset(spec.name, split, spec.class_names, spec.folders, spec.templates, tuple(photos))


def construct(spec: DatasetSpec, root: Path, **arguments: object) -> Any:
    """An object of the set's torchvision class; with ``download=True`` its files are fetched and unpacked first."""
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
        raise ReactClipError(f"{spec.name} cannot be read from {root} ({reason}); {spec.how_to_get(root)}") from error


def _split_argument(name: str, split: str) -> dict[str, object]:
    """The keyword argument with which torchvision's class reads a split."""
    if name.startswith("cifar"):
        return {"train": split == "train"}
    return {"split": "trainval" if name == "oxford_pets" and split == "train" else split}


def _pairs(source: Any, photo_attribute: str, label_attribute: str) -> list[tuple[Any, int]]:
    photos = getattr(source, photo_attribute)
    if not label_attribute:
        return [(photo, int(label)) for photo, label in photos]
    if isinstance(photos, np.ndarray) and photos.shape[-1] != 3:
        photos = photos.transpose(0, 2, 3, 1)  # STL10 keeps colour first
    return [(photo, int(label)) for photo, label in zip(photos, getattr(source, label_attribute), strict=True)]


def download_from_hub(spec: DatasetSpec, root: Path, split: str) -> None:
    """Download the split's shards or parquet files from the Hub into ``<root>/<name>``."""
    hub = require("huggingface_hub", f"downloading {spec.hub}", extra="data")
    hub_split = spec.hub_split if split == "test" else split
    try:
        hub.snapshot_download(
            spec.hub,
            repo_type="dataset",
            local_dir=root / spec.name,
            allow_patterns=[f"{hub_split}/*.tar", f"data/{hub_split}*.parquet", "classnames.txt"],
        )
    except Exception as error:  # network, licence and disk errors of several libraries; all mean the same to the user
        reason = first_line(error)
        raise ReactClipError(f"cannot download {spec.hub} ({reason}); {spec.how_to_get(root)}") from error
