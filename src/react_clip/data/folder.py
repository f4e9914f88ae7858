"""Photos in class folders: ``<folder>/<class>/*.jpg``."""

from __future__ import annotations

from pathlib import Path

from react_clip.data.dataset import ImageDataset, Photo
from react_clip.data.labels import ClassIndex, class_of_folder, readable_names
from react_clip.data.spec import DEFAULT_TEMPLATE, DatasetSpec
from react_clip.errors import ReactClipError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp"})


def class_folders(folder: Path) -> list[Path]:
    """The class folders below ``folder``, by name; empty where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def photos_in(folder: Path) -> list[Path]:
    """The photos directly in a class folder, by name."""
    files = (entry for entry in folder.iterdir() if entry.suffix.lower() in EXTENSIONS)
    return sorted(entry for entry in files if entry.is_file() and not entry.name.startswith("."))


def load_folder(folder: Path, name: str, split: str, spec: DatasetSpec | None) -> ImageDataset:
    """Read ``<folder>/<class>/``. A known set keeps its own classes in its own order, whichever of them lie here."""
    present = class_folders(folder)
    notes: tuple[str, ...] = ()
    templates: tuple[str, ...] = (DEFAULT_TEMPLATE,)
    if spec is None:
        folders = tuple(entry.name for entry in present)
        class_names = readable_names(folders)
        labels = {entry: label for label, entry in enumerate(present)}
    else:
        folders, class_names, templates = spec.folders, spec.class_names, spec.templates
        if ignored := [entry.name for entry in present if entry.name in spec.ignored]:
            notes += (f"left out {', '.join(ignored)}, which is no class",)
        labels = _known_labels([entry for entry in present if entry.name not in spec.ignored], spec, folder)
    photos = tuple(
        Photo(path.relative_to(folder).as_posix(), label, path)
        for entry, label in labels.items()
        for path in photos_in(entry)
    )
    if not photos:
        raise ReactClipError(
            f"no photo under {folder} ({len(present)} class folders); put them in {folder}/<class>/, as "
            f"{', '.join(sorted(EXTENSIONS))}"
        )
    if empty := len(labels) - len({photo.label for photo in photos}):
        notes += (f"{empty} class folders hold no photo",)
    return ImageDataset(name, split, class_names, folders, templates, photos, notes)


def _known_labels(present: list[Path], spec: DatasetSpec, folder: Path) -> dict[Path, int]:
    index = ClassIndex(spec.folders, spec.class_names)
    labels = {entry: class_of_folder(index, spec, entry.name) for entry in present}
    known = {entry: label for entry, label in labels.items() if label is not None}
    if unknown := [entry.name for entry in present if entry not in known]:
        raise ReactClipError(
            f"{len(unknown)} folders in {folder} are none of the {spec.classes} classes of {spec.name} "
            f"({', '.join(unknown[:3])}); rename them like {spec.folders[0]!r}, or use folder:{folder}"
        )
    return known
