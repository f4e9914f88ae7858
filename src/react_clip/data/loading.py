"""Load a set by name: from a folder of the user, class folders, shards, tables, or the official release.

Official releases are read by torchvision, or downloaded by it or from the Hugging Face hub. The list of photos and
labels comes from torchvision; the photos are opened by us, so that a label costs no decoding. CIFAR's files are
pickles, torchvision's own format: it checks their MD5 before it opens them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.formats import SHARDS, TABLES, class_folders, find_files, load_folder, load_shards, load_tables
from react_clip.data.registry import ClassIndex, DatasetSpec, default_root, registry
from react_clip.errors import MissingPackageError, ReactClipError, first_line
from react_clip.optional import require

_FOLDER = "folder:"


def load(
    name: str,
    *,
    root: Path | None = None,
    split: str = "test",
    limit: int | None = None,
    download: bool = False,
    seed: int = 0,
) -> ImageDataset:
    """Load the photos of a set, always in the same order.

    ``name`` is one of ``names()``, a directory below ``root``, or ``folder:PATH``. ``limit`` takes a class-balanced
    subset chosen by ``seed``; the ImageNet sets are cut to five per class as in the paper. Nothing is fetched unless
    ``download`` is set.
    """
    if not split or Path(split).name != split:
        raise ReactClipError(f"split is {split!r}; give a plain name such as 'test' or 'train'")
    root = default_root() if root is None else Path(root).expanduser()
    spec = registry().get(name)
    if name.startswith(_FOLDER):
        dataset = _load_own_folder(name, split)
    elif spec is None:
        dataset = _load_unknown(name, root, split)
    else:
        dataset = _on_disk(name, root, split, spec) or _load_official(spec, root, split, download)
        if split == "test":
            dataset = _as_in_the_paper(dataset, spec, seed)
    return dataset if limit is None else dataset.take(limit, seed)


def _load_own_folder(name: str, split: str) -> ImageDataset:
    folder = Path(name.removeprefix(_FOLDER)).expanduser()
    if not folder.is_dir():
        raise ReactClipError(f"{folder} is not a folder; give folder:PATH with photos in PATH/<class>/")
    inner = folder / split
    return load_folder(inner if class_folders(inner) else folder, name, split, None)


def _load_unknown(name: str, root: Path, split: str) -> ImageDataset:
    """A set that is not in the registry, in a directory below the root."""
    if not name or Path(name).name != name:
        raise ReactClipError(f"data set {name!r} is not a plain name; for a path write folder:{name}")
    if (dataset := _on_disk(name, root, split, None)) is not None:
        return dataset
    if (root / name).is_dir():
        raise ReactClipError(f"{root / name} has no {split} photos; put them in {root / name / split}/<class>/")
    raise ReactClipError(
        f"data set {name!r} is not known, and {root} has no folder of that name; known are "
        f"{', '.join(registry())}; for your own photos use folder:PATH"
    )


def _on_disk(name: str, root: Path, split: str, spec: DatasetSpec | None) -> ImageDataset | None:
    """The set as class folders, shards or tables below the root; None if it is there in none of these forms."""
    folders, splits = [root / name / split], [split]
    if spec is not None and split == "test":
        folders += [root / directory for directory in spec.directories]
        splits = [spec.hub_split, split]
    for folder in folders:
        if class_folders(folder):
            return load_folder(folder, name, split, spec)
    for patterns, read in ((SHARDS, load_shards), (TABLES, load_tables)):
        if files := find_files(root / name, splits, patterns):
            return read(files, name, split, spec)
    return None


def _load_official(spec: DatasetSpec, root: Path, split: str, download: bool) -> ImageDataset:
    """The published release: read by torchvision, or downloaded as class folders, shards or tables."""
    if split not in spec.official_splits:
        raise ReactClipError(
            f"{spec.name} has no official split {split!r} (it has {', '.join(spec.official_splits)}); put your own in "
            f"{root / spec.name / split}/<class>/"
        )
    if spec.name in READERS:
        try:
            # A set that is also on the Hub is there because torchvision's links are dead: it may only read.
            return load_torchvision(spec, root, split, download=download and not spec.hub)
        except ReactClipError:
            if not (download and spec.hub):
                raise
    if download:
        if spec.hub:
            download_from_hub(spec, root, split)
        else:
            construct(spec, root, download=True)
        if (dataset := _on_disk(spec.name, root, split, spec)) is not None:
            return dataset
    raise ReactClipError(f"{spec.name} has no {split} photos under {root}; {spec.how_to_get(root)}")


def _as_in_the_paper(dataset: ImageDataset, spec: DatasetSpec, seed: int) -> ImageDataset:
    """The test photos cut to the paper's number per class, with a note where there are more or fewer than there."""
    if spec.per_class is not None:
        dataset = dataset.take_per_class(spec.per_class, seed)
    if len(dataset) == spec.test_images:
        return dataset
    note = f"{len(dataset):,} photos here, {spec.test_images:,} in the paper"
    return replace(dataset, notes=(*dataset.notes, note))


# ---------------------------------------------------------------------- official releases

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
        raise MissingPackageError(
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
