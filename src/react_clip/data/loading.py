"""Load a set by name: from a package outside, a folder of the user, tables, or the official release."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from react_clip.data.dataset import ImageDataset
from react_clip.data.formats import find_tables, load_folder, load_tables
from react_clip.data.official import READ_BY_TORCHVISION, construct, download_from_hub, load_torchvision
from react_clip.data.registry import DatasetSpec, default_root, registry
from react_clip.errors import ReactClipError, first_line
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
        dataset = _on_disk(name, root, split, spec) or _load_official(spec, root, split, download)
        if split == "test":
            dataset = _as_in_the_paper(dataset, spec, seed)
    elif name.startswith(_FOLDER):
        dataset = _load_own_folder(Path(name.removeprefix(_FOLDER)).expanduser(), name, split)
    elif function := _function_outside(name):
        dataset = function(root, split)
        if not isinstance(dataset, ImageDataset):
            raise ReactClipError(f"data set {name!r} returned a {type(dataset).__name__}; it must be an ImageDataset")
    else:
        dataset = _load_unknown(name, root, split)
    return dataset if limit is None else dataset.take(limit, seed)


def _function_outside(name: str) -> Callable[[Path, str], ImageDataset] | None:
    """The function of an entry point, or of ``module:function``."""
    reference = next((point.value for point in entry_points(group=GROUP, name=name)), name)
    module, colon, function = reference.partition(":")
    if not colon or not module.replace(".", "").isidentifier():
        return None
    try:
        loaded: Callable[[Path, str], ImageDataset] = pkgutil.resolve_name(f"{module}:{function}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ReactClipError(f"data set {name!r} cannot be imported: {first_line(error)}") from error
    return loaded


def _load_own_folder(folder: Path, name: str, split: str) -> ImageDataset:
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
    """A set in class folders or tables below the root; ``None`` where there is neither."""
    folders = [root / name / split]
    splits = [split]
    if spec is not None and split == "test":
        folders += [root / directory for directory in spec.directories]
        splits = [spec.hub_split, split]  # the hub keeps labels of ImageNet for "validation" only
    for folder in folders:
        if class_folders(folder):
            return load_folder(folder, name, split, spec)
    files = find_tables(root / name, splits)
    return load_tables(files, name, split, spec) if files else None


def _load_official(spec: DatasetSpec, root: Path, split: str, download: bool) -> ImageDataset:
    """The published release: read by torchvision, or downloaded as class folders or tables."""
    if split not in spec.official_splits:
        raise ReactClipError(
            f"{spec.name} has no official split {split!r} (it has {', '.join(spec.official_splits)}); put your own in "
            f"{root / spec.name / split}/<class>/"
        )
    if spec.name in READ_BY_TORCHVISION:
        try:
            # A set that is also on the hub is there because torchvision's links are dead: it may only read.
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
    return dataset.with_note(f"{len(dataset):,} photos here, {spec.test_images:,} in the paper")
