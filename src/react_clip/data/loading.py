"""Load a set by name: from a package outside, a folder of the user, tables, or the official release.

Official releases are read by torchvision, or downloaded by it or from the Hugging Face hub. CIFAR's files are pickles,
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
    download: bool = False,
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
        download: fetch the set if it is not there.
        seed: chooses the subset.
    """
    if not split or Path(split).name != split:
        raise ReactClipError(f"split is {split!r}; give a plain name such as 'test' or 'train'")
    root = default_root() if root is None else Path(root).expanduser()
    spec = registry().get(name)
    if spec is not None:
        dataset = _on_disk(root / name, name, root, split, spec) or _official(spec, root, split, download)
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


def _official(spec: DatasetSpec, root: Path, split: str, download: bool) -> ImageDataset:
    """The published release: read by torchvision, or downloaded as tables or as an archive of class folders."""
    if split not in spec.official_splits:
        raise ReactClipError(
            f"{spec.name} has no official split {split!r} (it has {', '.join(spec.official_splits)}); put your own in "
            f"{root / spec.name / split}/<class>/"
        )
    if download and spec.hub:
        download_from_hub(spec, root, split)
    elif spec.torchvision and not spec.directories:
        return load_torchvision(spec, root, split, download=download)
    elif download:
        construct(spec, root, download=True)
    if (dataset := _on_disk(root / spec.name, spec.name, root, split, spec)) is not None:
        return dataset
    raise ReactClipError(f"{spec.name} has no {split} photos under {root}; {spec.how_to_get(root)}")


def _as_in_the_paper(dataset: ImageDataset, spec: DatasetSpec, seed: int) -> ImageDataset:
    """The test photos cut to the paper's number per class, with a note where there are more or fewer than there."""
    if spec.per_class is not None:
        dataset = dataset.take_per_class(spec.per_class, seed)
    if len(dataset) == spec.test_images:
        return dataset
    return dataset.with_note(f"{len(dataset):,} photos here, {spec.test_images:,} in the paper")


# ---------------------------------------------------------------------- official releases


def load_torchvision(spec: DatasetSpec, root: Path, split: str, *, download: bool) -> ImageDataset:
    """Read a set through its torchvision class; no photo is decoded."""
    pets = spec.name == "oxford_pets"
    options: dict[str, Any] = {"split": "trainval" if pets and split == "train" else split}
    if spec.name.startswith("cifar"):
        options = {"train": split == "train"}
    elif spec.name != "stl10" and not pets:
        options["loader"] = Path  # the path stands for the decoded image
    source: Any = construct(spec, root, download=download, **options)
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


def construct(spec: DatasetSpec, root: Path, **options: Any) -> Any:
    """An object of the set's torchvision class; with ``download=True`` its files are fetched and unpacked first."""
    datasets = require("torchvision.datasets", f"reading {spec.name}", extra="data")
    try:
        if options.get("download"):
            root.mkdir(parents=True, exist_ok=True)
        return getattr(datasets, spec.torchvision)(root, **options)
    except Exception as error:  # torchvision raises almost anything
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise ReactClipError(f"{spec.name} cannot be read from {root} ({reason}); {spec.how_to_get(root)}") from error


def download_from_hub(spec: DatasetSpec, root: Path, split: str) -> None:
    """Download the split's shards or Parquet files from the hub into ``<root>/<name>``."""
    hub = require("huggingface_hub", f"downloading {spec.hub}", extra="data")
    hub_split = spec.hub_split if split == "test" else split
    patterns = [f"{hub_split}/*.tar", f"data/{hub_split}*.parquet", "classnames.txt"]
    try:
        hub.snapshot_download(spec.hub, repo_type="dataset", local_dir=root / spec.name, allow_patterns=patterns)
    except Exception as error:  # network, licence and disk errors of several libraries; all mean the same to the user
        raise ReactClipError(f"cannot download {spec.hub} ({first_line(error)}); {spec.how_to_get(root)}") from error
