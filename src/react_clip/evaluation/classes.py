"""Where a set's class features come from: a ready head, prompts, or the photos of its train split, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from react_clip.data import Head, ImageDataset, load, load_head
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier, list_class_photos

_FOLDER = "folder:"
_HEAD_SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True, eq=False)
class ClassSource:
    """A set whose labels fit the classes, and how their features are made."""

    dataset: ImageDataset
    description: str
    head: Head | None = None
    train: tuple[ImageDataset, Path] | None = None
    """The photos to average, and the folder they lie in."""

    def classifier(self, encoder: Encoder, *, progress: bool = False) -> tuple[ZeroShotClassifier, ImageDataset]:
        """The classifier, and the set with labels that index its classes."""
        dataset, head = self.dataset, self.head
        if self.train is not None:
            dataset, head = dataset.align(_mean_features(encoder, *self.train, progress))
        # Real sets have duplicate names (both face classes of Caltech101 are "person"): a tie, not a mistake of ours.
        if head is not None:
            return ZeroShotClassifier.from_features(encoder, head.names, head.features, unique=False), dataset
        return ZeroShotClassifier(encoder, dataset.class_names, templates=dataset.templates, unique=False), dataset


def class_source(encoder: Encoder, dataset: ImageDataset, heads: Path | None, root: Path) -> ClassSource:
    """Decide for one set; nothing is encoded yet."""
    own_folder = dataset.name.startswith(_FOLDER)
    place = Path(dataset.name.removeprefix(_FOLDER)).expanduser() if own_folder else root / dataset.name
    if heads is not None:
        for path in (heads / f"{place.name}{suffix}" for suffix in _HEAD_SUFFIXES):
            if path.is_file():
                aligned, head = dataset.align(load_head(path))
                _check_dimension(encoder, head, path)
                return ClassSource(aligned, f"head {path.name}", head=head)
    if encoder.has_text:
        return ClassSource(dataset, f"prompts ({' | '.join(dataset.templates)})")
    train = place / "train"
    if train.is_dir():
        list_class_photos(train)  # complains about what averaging could not use
        photos = load(dataset.name, root=root, split="train")
        return ClassSource(dataset, f"mean features of {len(photos)} train photos", train=(photos, train))
    wanted = f"{place.name}{_HEAD_SUFFIXES[0]} in --heads DIR" + (
        f" (it is not in {heads})" if heads is not None else ""
    )
    raise ReactClipError(
        f"{dataset.name} has no class features: {encoder.name!r} has no text tower, and there is neither {wanted} nor "
        f"photos in {train}; add one of them or use a model with a text tower"
    )


def _mean_features(encoder: Encoder, photos: ImageDataset, folder: Path, progress: bool) -> Head:
    """The mean feature of each class folder, under the name by which the set knows that class."""
    averaged = ZeroShotClassifier.from_folder(encoder, folder, progress=progress)
    labels = {PurePosixPath(photo.id).parts[0]: photo.label for photo in photos.photos}
    rows = {labels[name]: row for row, name in enumerate(averaged.names) if name in labels}
    return Head(
        names=tuple(photos.class_names[label] for label in rows),
        folders=tuple(photos.folders[label] for label in rows),
        features=averaged.class_features[list(rows.values())].float().cpu(),
    )


def _check_dimension(encoder: Encoder, head: Head, path: Path) -> None:
    if head.features.shape[1] != encoder.dim:
        raise ReactClipError(
            f"{path} has features of dimension {head.features.shape[1]}; {encoder.name!r} needs {encoder.dim}; give "
            "the heads made with this model"
        )
