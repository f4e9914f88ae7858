"""Load a set by name: from a folder of the user, class folders, shards, tables, or the official release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from react_clip.data.dataset import ImageDataset
from react_clip.data.formats import SHARDS, TABLES, class_folders, find_files, load_folder, load_shards, load_tables
from react_clip.data.official import READERS, construct, download_from_hub, load_torchvision
from react_clip.data.registry import DatasetSpec, default_root, registry
from react_clip.errors import ReactClipError

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
