"""Load a set by name: from a package outside, a folder of the user, tables, or the official release.

Official releases are read by torchvision; nothing is downloaded, but errors say how. CIFAR's files are pickles,
torchvision's own format: it checks their MD5 before it opens them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from react_clip.config import find_offered
from react_clip.data.dataset import ImageDataset
from react_clip.data.formats import Labelled, build_dataset, find_tables, load_folder, load_tables
from react_clip.data.registry import DatasetSpec, default_root, registry
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.storage import class_folders

GROUP = "react_clip.datasets"
"""Entry points of other packages: ``name = "module:function"``, called as ``function(root, split)``."""
_FOLDER = "folder:"


def load(
    name: str,
    *,
    root: Path | None = None,
    split: str = "test",
    limit: int | None = None,
    seed: int = 0,
) -> ImageDataset:
    """Load the photos of a set, always in the same order.

    The ImageNet sets are cut to five per class as in the paper.

    Args:
        name: one of ``names()``, a directory below ``root``, ``folder:PATH``, the name of an entry point in the group
            ``react_clip.datasets``, or ``module:function`` called as ``function(root, split)``.
        root: folder of the data sets (:func:`default_root`).
        split: ``test``, ``train``, or whatever the set has.
        limit: take a class-balanced subset of this size.
        seed: chooses the subset.
    """
    if not split or Path(split).name != split:
        raise ReactClipError(f"split is {split!r}; give a plain name such as 'test' or 'train'")
    root = default_root() if root is None else Path(root).expanduser()
    spec = registry().get(name)
    if spec is not None:
        dataset = _on_disk(root / name, name, root, split, spec) or _official(spec, root, split)
        if split == "test":
            dataset = _as_in_the_paper(dataset, spec, seed)
    elif not name.startswith(_FOLDER) and (function := find_offered(GROUP, name, "data set")) is not None:
        dataset = function(root, split)
        if not isinstance(dataset, ImageDataset):
            raise ReactClipError(f"data set {name!r} returned a {type(dataset).__name__}; it must be an ImageDataset")
    else:
        dataset = _own(name, root, split)
    return dataset if limit is None else dataset.take(limit, seed)


def _own(name: str, root: Path, split: str) -> ImageDataset:
    """A set of the user: a directory below the root, or ``folder:PATH``, which may hold class folders itself."""
    folder = Path(name.removeprefix(_FOLDER)).expanduser() if name.startswith(_FOLDER) else root / name
    if (dataset := _on_disk(folder, name, root, split, None)) is not None:
        return dataset
    if name.startswith(_FOLDER) and class_folders(folder):
        return load_folder(folder, name, split, None)
    raise ReactClipError(
        f"data set {name!r} is not known, and {folder} has no {split} photos; put them in {folder / split}/<class>/, "
        f"or choose folder:PATH or one of {', '.join(registry())}"
    )


def _on_disk(folder: Path, name: str, root: Path, split: str, spec: DatasetSpec | None) -> ImageDataset | None:
    """A set in class folders or tables; ``None`` where there is neither."""
    folders, splits = [folder / split], [split]
    if spec is not None and split == "test":
        folders += [root / directory for directory in spec.directories]
        splits = [spec.hub_split, split]  # the hub keeps labels of ImageNet for "validation" only
    for each in folders:
        if class_folders(each):
            return load_folder(each, name, split, spec)
    files = find_tables(folder, splits)
    return load_tables(files, name, split, spec) if files else None


def _official(spec: DatasetSpec, root: Path, split: str) -> ImageDataset:
    """The published release, read by torchvision."""
    if split not in spec.official_splits:
        own = root / spec.name / split
        raise ReactClipError(f"{spec.name} has the splits {', '.join(spec.official_splits)}; put {split!r} in {own}")
    if spec.torchvision and not spec.directories:
        return load_torchvision(spec, root, split)
    raise ReactClipError(f"{spec.name} has no {split} photos under {root}; {spec.how_to_get(root)}")


def _as_in_the_paper(dataset: ImageDataset, spec: DatasetSpec, seed: int) -> ImageDataset:
    """The test photos cut to the paper's number per class, with a note where there are more or fewer than there."""
    if spec.per_class is not None:
        dataset = dataset.take_per_class(spec.per_class, seed)
    if len(dataset) == spec.test_images:
        return dataset
    return dataset.with_note(f"{len(dataset):,} photos here, {spec.test_images:,} in the paper")


def load_torchvision(spec: DatasetSpec, root: Path, split: str) -> ImageDataset:
    """Read a set through its torchvision class; no photo is decoded."""
    datasets = require("torchvision.datasets", f"reading {spec.name}", extra="data")
    pets = spec.name == "oxford_pets"
    options: dict[str, Any] = {"split": "trainval" if pets and split == "train" else split}
    if spec.name.startswith("cifar"):
        options = {"train": split == "train"}
    elif spec.name != "stl10" and not pets:
        options["loader"] = Path  # the path stands for the decoded image
    try:
        source: Any = getattr(datasets, spec.torchvision)(root, **options)
    except Exception as error:  # torchvision raises almost anything
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise ReactClipError(f"{spec.name} cannot be read from {root} ({reason}); {spec.how_to_get(root)}") from error
    own_names = [str(name) for name in getattr(source, "classes", ())]
    if pets:  # its torchvision class has no ``loader``
        folder = root / "oxford-iiit-pet"
        lines = (folder / "annotations" / f"{options['split']}.txt").read_text().splitlines()
        parts = [line.split() for line in lines if line.strip()]
        source = [(folder / "images" / f"{stem}.jpg", int(number) - 1) for stem, number, *_ in parts]
    rows = []
    for number in range(len(source)):
        photo, label = source[number]
        if isinstance(photo, Path):
            rows.append(Labelled(photo.relative_to(root).as_posix(), int(label), photo))
        else:
            rows.append(Labelled(f"{split}/{number:05d}", int(label), np.asarray(photo)))
    return build_dataset(rows, own_names, spec.name, split, spec)
