"""A data set ready for a run: classifier, pixels, labels, and fingerprints of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from react_clip import data as data_room
from react_clip import encoders
from react_clip.attacks.base import TRANSFER
from react_clip.attacks.problem import check_input
from react_clip.data import ClassFeatures, ImageDataset, Photo, load_class_features
from react_clip.encoders import Encoder
from react_clip.environment import device_name
from react_clip.errors import ReactClipError
from react_clip.evaluation.code import code_digest
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.results import SetInfo
from react_clip.label_table import LabelTable
from react_clip.preprocess import Preprocessing, to_float
from react_clip.storage import tensor_digest
from react_clip.zeroshot import ZeroShotClassifier, check_class_folders

Data = ImageDataset | tuple[Tensor, Tensor]
"""Photos of a data set, or pixels ``[N, 3, S, S]`` in [0, 1] with their labels ``[N]``."""

_FOLDER = "folder:"


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """One set with its classifiers, as the runner needs it."""

    info: SetInfo
    clf: ZeroShotClassifier
    attack_clf: ZeroShotClassifier
    """The classifier that attacks are crafted on: the same classes, perhaps in another precision."""
    pixels: Tensor
    """uint8 ``[N, 3, S, S]``, on the CPU."""
    labels: Tensor

    @property
    def name(self) -> str:
        """The name of the set."""
        return self.info.name

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, rows: slice | Sequence[int] | Tensor) -> Tensor:
        """Float pixels of some images, on the classifier's device."""
        return to_float(self.pixels[rows].to(self.clf.device))

    @cached_property
    def identity(self) -> dict[str, str]:
        """Fingerprints of everything that all results on this set depend on."""
        return {
            "data": self.info.fingerprint,
            "model": self.info.model_fingerprint,
            "attacked_model": _model_fingerprint(self.attack_clf),
            "device": device_name(self.clf.device),
        }

    def code(self, *parts: object) -> str:
        """Digest of the code of both encoders, and of some defences and attacks with the members of suites."""
        members = [member for part in parts for member in getattr(part, "members", ())]
        return code_digest(*map(type, (self.clf.encoder, self.attack_clf.encoder, *parts, *members)))


def _model_fingerprint(clf: ZeroShotClassifier) -> str:
    """Identity of the weights, the precision and the class features."""
    return f"{clf.encoder.fingerprint()}-{tensor_digest(clf.class_features)[:16]}"


def _from_photos(
    dataset: ImageDataset, clf: ZeroShotClassifier, attack_clf: ZeroShotClassifier, source: str, progress: bool
) -> EvaluationSet:
    pixels, labels = dataset.pixels(clf.encoder.preprocessing, progress=progress), torch.tensor(dataset.labels)
    about = (dataset.fingerprint(), source, _model_fingerprint(clf), dataset.notes, tuple(clf.names))
    return EvaluationSet(SetInfo(dataset.name, len(dataset), len(clf.names), *about), clf, attack_clf, pixels, labels)


def from_data(clf: ZeroShotClassifier, attack_clf: ZeroShotClassifier, data: Data, progress: bool) -> EvaluationSet:
    """The set of :func:`react_clip.evaluation.evaluate`: data that must fit a given classifier."""
    if not isinstance(data, ImageDataset):
        photos, names = _checked_photos(clf, data), tuple(clf.names)
        data = ImageDataset("data", "test", names, photos)
    if len(clf.names) != len(data.class_names):
        raise ReactClipError(
            f"the classifier has {len(clf.names)} classes and {data.name} has {len(data.class_names)}; build it from "
            "the set's class_names, or fit the set with dataset.align(class_features)"
        )
    if tuple(clf.names) != data.class_names and sorted(clf.names) == sorted(data.class_names):
        raise ReactClipError(f"the classifier has the classes of {data.name} in another order; build it from them")
    return _from_photos(data, clf, attack_clf, "the caller's classifier", progress)


def load_encoders(recipe: Recipe, device: str | None) -> tuple[Encoder, Encoder]:
    """The defended encoder and the one that attacks are crafted on; the same unless the recipe says otherwise."""
    dtype = recipe.attack_dtype or recipe.dtype
    encoder = attacked = encoders.load(recipe.model, device=device, dtype=recipe.dtype)
    if recipe.transfer_model is not None or dtype != recipe.dtype:
        attacked = encoders.load(recipe.transfer_model or recipe.model, device=device, dtype=dtype)
    if recipe.preprocessing == "paper":
        for each in (encoder, attacked):
            each.preprocessing = Preprocessing.paper(each.image_size)
    return encoder, attacked


def from_recipe(
    recipe: Recipe, encoder: Encoder, attack_encoder: Encoder, root: Path, heads: Path | None, progress: bool
) -> Iterator[EvaluationSet]:
    """The recipe's sets, one after the other, so that only one is in memory."""
    for name in recipe.datasets:
        source = class_source(encoder, data_room.load(name, root=root, split="test"), heads, root)
        clf, dataset = source.classifier(encoder, progress=progress)
        # The limit counts photos that have a class, so it is applied after labels were matched to classes.
        dataset = dataset if recipe.limit is None else dataset.take(recipe.limit)
        attack_clf = _attacked_classifier(recipe, clf, attack_encoder, source, progress)
        yield _from_photos(dataset, clf, attack_clf, source.description, progress)


def _attacked_classifier(
    recipe: Recipe, clf: ZeroShotClassifier, encoder: Encoder, source: ClassSource, progress: bool
) -> ZeroShotClassifier:
    """The same classes on the encoder that images are crafted on.

    Another model has class features of its own where it can make them. An encoder without a text tower and without
    photos to average uses those of the model under test: right for a tower that was finetuned from it, refused where
    the dimension differs.
    """
    if encoder is clf.encoder:
        return clf
    if recipe.threat == TRANSFER:
        check_replayable(encoder, clf.encoder)
        if encoder.has_text:
            return ZeroShotClassifier(encoder, clf.names, templates=source.dataset.templates, unique=False)
        if source.train is not None:
            return source.classifier(encoder, progress=progress)[0]
    return ZeroShotClassifier.from_features(encoder, clf.names, clf.class_features, unique=False)


def check_replayable(source: Encoder, target: Encoder) -> None:
    """Refuse to craft images on an encoder of another image size."""
    if source.image_size != target.image_size:
        raise ReactClipError(
            f"{source.name!r} sees {source.image_size} pixels a side and {target.name!r} {target.image_size}; images "
            "cannot be replayed, so choose a transfer_model of the same size"
        )


def _checked_photos(clf: ZeroShotClassifier, data: tuple[Tensor, Tensor]) -> tuple[Photo, ...]:
    """Photos in 8 bits a channel, as files hold them, of pixels and labels."""
    if not isinstance(data, tuple) or len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
        raise ReactClipError("data is no ImageDataset and no pair of tensors; give (pixels [N, 3, S, S], labels [N])")
    pixels, labels = (part.detach().cpu() for part in data)
    clf.encoder.check(pixels)
    check_input(pixels, labels)
    if not len(labels) or int(labels.max()) >= len(clf.names):
        raise ReactClipError(f"labels are {labels.tolist()!r:.60}; give some, of 0 to {len(clf.names) - 1}")
    arrays = pixels.mul(255.0).round().byte().permute(0, 2, 3, 1).numpy()
    return tuple(Photo(str(row), int(label), arrays[row]) for row, label in enumerate(labels))


# ---------------------------------------------------------------------- class features


@dataclass(frozen=True, eq=False)
class ClassSource:
    """A set whose labels index the classes, and where the class features come from."""

    dataset: ImageDataset
    description: str
    head: ClassFeatures | None = None
    train: tuple[ImageDataset, Path] | None = None
    """The photos to average, and their folder."""

    def classifier(self, encoder: Encoder, *, progress: bool = False) -> tuple[ZeroShotClassifier, ImageDataset]:
        """The classifier, and the set with labels that index its classes."""
        dataset, head = self.dataset, self.head
        if self.train is not None:
            head = _mean_features(encoder, *self.train, progress)
            dataset = dataset.align(head)
        # Real sets have duplicate names (both face classes of Caltech101 are "person"), which count as a tie.
        if head is not None:
            return ZeroShotClassifier.from_features(encoder, head.names, head.features, unique=False), dataset
        templates = dataset.templates if encoder.has_text else None
        return ZeroShotClassifier(encoder, dataset.class_names, templates=templates, unique=False), dataset


def class_source(
    encoder: Encoder, dataset: ImageDataset, heads: Path | None, root: Path, *, average_train: bool = True
) -> ClassSource:
    """Choose a ready head, prompts, the photos of the train split or the label bank, in this order.

    Nothing is encoded yet. ``heads`` is a folder of heads, or one head. Without ``average_train`` the photos of the
    train split are no source of classes.
    """
    own_folder = dataset.name.startswith(_FOLDER)
    folder = Path(dataset.name.removeprefix(_FOLDER)).expanduser() if own_folder else root / dataset.name
    if heads is not None:
        for path in (heads, heads / f"{folder.name}.npz"):
            if path.is_file():
                head = load_class_features(path)
                aligned = dataset.align(head)
                if (dim := head.features.shape[1]) != encoder.dim:
                    raise ReactClipError(
                        f"{path} has features of dimension {dim}; {encoder.name!r} needs {encoder.dim}; give the "
                        "heads made with this model"
                    )
                return ClassSource(aligned, f"head {path.name}", head=head)
    if encoder.has_text:
        return ClassSource(dataset, f"prompts ({' | '.join(dataset.templates)})")
    train = folder / "train"
    if train.is_dir() and average_train:
        check_class_folders(train)  # raises on folders that cannot be averaged
        photos = data_room.load(dataset.name, root=root, split="train")
        return ClassSource(dataset, f"mean features of {len(photos)} train photos", train=(photos, train))
    if encoder.feature_space == LabelTable.load().encoder:
        with suppress(ReactClipError):
            LabelTable.load().features(dataset.class_names)
            return ClassSource(dataset, "label bank")
    missing = f" (it is not in {heads})" if heads is not None else ""
    photos_in = f" nor photos in {train}" if average_train else " nor another split than train"
    raise ReactClipError(
        f"{dataset.name} has no class features: {encoder.name!r} has no text tower, the label bank lacks its names, "
        f"and there is neither {folder.name}.npz in --heads DIR{missing}{photos_in}; add one of them or "
        "use a model with a text tower"
    )


def _mean_features(encoder: Encoder, photos: ImageDataset, folder: Path, progress: bool) -> ClassFeatures:
    """The mean feature of each class folder, under the set's name of that class."""
    averaged = ZeroShotClassifier.from_folder(encoder, folder, progress=progress)
    labels = {PurePosixPath(photo.id).parts[0]: photo.label for photo in photos.photos}
    rows = {labels[name]: row for row, name in enumerate(averaged.names) if name in labels}
    return ClassFeatures(
        names=tuple(photos.class_names[label] for label in rows),
        folders=tuple(photos.folders[label] for label in rows),
        features=averaged.class_features[list(rows.values())].float().cpu(),
    )
