"""Official releases: read by torchvision, or downloaded by it or from the Hugging Face hub.

CIFAR's files are pickles, torchvision's own format: it checks their MD5 before it opens them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from react_clip.data.dataset import ImageDataset
from react_clip.data.formats import Labelled, build_dataset
from react_clip.data.registry import DatasetSpec
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

READ_BY_TORCHVISION = (
    *("cifar10", "cifar100", "stl10", "dtd", "oxford_pets", "flowers102"),
    *("fgvc_aircraft", "stanford_cars", "food101"),
)
"""The other sets that torchvision downloads are class folders once unpacked, which are read as such."""


def load_torchvision(spec: DatasetSpec, root: Path, split: str, *, download: bool) -> ImageDataset:
    """Read a set through its torchvision class; no photo is decoded."""
    options: dict[str, Any] = {"split": split}
    if spec.name.startswith("cifar"):
        options = {"train": split == "train"}
    elif spec.name == "oxford_pets":
        options = {"split": "trainval" if split == "train" else split}
    elif spec.name != "stl10":
        options["loader"] = Path  # the path stands for the decoded image
    source = construct(spec, root, download=download, **options)
    rows = []
    for number, (photo, label) in enumerate(_photos(spec.name, source, root, options)):
        name = f"{split}/{number:05d}" if isinstance(photo, np.ndarray) else photo.relative_to(root).as_posix()
        rows.append(Labelled(name, int(label), photo))
    return build_dataset(rows, [str(name) for name in getattr(source, "classes", ())], spec.name, split, spec)


def _photos(name: str, source: Any, root: Path, options: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
    """Pixels or file of each photo, and its label."""
    if name.startswith("cifar"):
        return zip(source.data, source.targets, strict=True)
    if name == "stl10":
        return zip(source.data.transpose(0, 2, 3, 1), source.labels, strict=True)  # it keeps colour first
    if name == "oxford_pets":  # its torchvision class has no ``loader``
        folder = root / "oxford-iiit-pet"
        lines = (folder / "annotations" / f"{options['split']}.txt").read_text().split("\n")
        parts = [line.split() for line in lines if line.strip()]
        return [(folder / "images" / f"{stem}.jpg", int(number) - 1) for stem, number, *_ in parts]
    return (source[index] for index in range(len(source)))


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
