"""One set made ready for a run: classifier, pixels, labels, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from react_clip import data as data_room
from react_clip.data import ImageDataset
from react_clip.encoders import Encoder
from react_clip.environment import device_name
from react_clip.errors import ReactClipError
from react_clip.evaluation.classes import ClassSource, class_source
from react_clip.evaluation.images import read_pixels, to_float
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.store import digest_of
from react_clip.evaluation.threats import TRANSFER
from react_clip.zeroshot import ZeroShotClassifier

Data = ImageDataset | tuple[Tensor, Tensor]
"""Photos of a data set, or pixels ``[N, 3, S, S]`` in [0, 1] with their labels ``[N]``."""


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Everything the runner needs to know about one set."""

    name: str
    clf: ZeroShotClassifier
    attack_clf: ZeroShotClassifier
    """What attacks are crafted against: the same classes, perhaps in another precision."""
    pixels: Tensor
    """uint8 or float ``[N, 3, S, S]``, on the CPU."""
    labels: Tensor
    fingerprint: str
    class_source: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, start: int, stop: int) -> Tensor:
        """Float pixels of a range, on the classifier's device."""
        return to_float(self.pixels[start:stop].to(self.clf.device))

    def identity(self) -> dict[str, str]:
        """What every result on this set depends on."""
        return {
            "data": self.fingerprint,
            "model": model_fingerprint(self.clf),
            "attacked_model": model_fingerprint(self.attack_clf),
            "device": device_name(self.clf.device),
        }


def model_fingerprint(clf: ZeroShotClassifier) -> str:
    """The weights, the precision and the class features."""
    return f"{clf.encoder.fingerprint()}-{digest_of(clf.class_features)[:16]}"


def from_data(clf: ZeroShotClassifier, attack_clf: ZeroShotClassifier, data: Data, progress: bool) -> EvaluationSet:
    """The set behind :func:`react_clip.evaluation.evaluate`: a classifier that is ready, and data that must fit it."""
    if isinstance(data, ImageDataset):
        _check_classes(clf, data)
        pixels = read_pixels(data, clf.encoder.image_size, progress=progress)
        name, labels, fingerprint, notes = data.name, torch.tensor(data.labels), data.fingerprint(), data.notes
    else:
        pixels, labels = _checked_pair(clf, data)
        name, notes = "data", ()
        fingerprint = hashlib.sha256(f"{digest_of(pixels)}{digest_of(labels)}".encode()).hexdigest()
    if not len(pixels):
        raise ReactClipError(f"{name} has no images; give at least one")
    if int(labels.min()) < 0 or int(labels.max()) >= len(clf.names):
        raise ReactClipError(
            f"labels span {int(labels.min())} to {int(labels.max())}; the classifier has {len(clf.names)} classes, so "
            f"they must lie in 0 to {len(clf.names) - 1}"
        )
    return EvaluationSet(name, clf, attack_clf, pixels, labels, fingerprint, "the caller's classifier", notes)


def from_recipe(
    recipe: Recipe, encoder: Encoder, attack_encoder: Encoder, root: Path, heads: Path | None, progress: bool
) -> Iterator[EvaluationSet]:
    """The recipe's sets, one after the other, so that only one is in memory."""
    for name in recipe.datasets:
        # The limit counts photos that have a class, so it is applied after the labels are fitted to the classes.
        dataset = data_room.load(name, root=root, split="test")
        source = class_source(encoder, dataset, heads, root)
        clf, dataset = source.classifier(encoder, progress=progress)
        dataset = dataset if recipe.limit is None else dataset.take(recipe.limit)
        yield EvaluationSet(
            name=name,
            clf=clf,
            attack_clf=_source_classifier(clf, attack_encoder, source, progress)
            if recipe.threat == TRANSFER
            else same_classes(clf, attack_encoder),
            pixels=read_pixels(dataset, encoder.image_size, progress=progress),
            labels=torch.tensor(dataset.labels),
            fingerprint=dataset.fingerprint(),
            class_source=source.description,
            notes=dataset.notes,
        )


def same_classes(clf: ZeroShotClassifier, encoder: Encoder) -> ZeroShotClassifier:
    """The classifier with another encoder."""
    if encoder is clf.encoder:
        return clf
    return ZeroShotClassifier.from_features(encoder, clf.names, clf.class_features, unique=False)


def _source_classifier(
    clf: ZeroShotClassifier, encoder: Encoder, source: ClassSource, progress: bool
) -> ZeroShotClassifier:
    """The same classes on the encoder that images are crafted on, with features of its own where it can make them.

    An encoder without a text tower and without photos to average shares those of the model under test: right for a
    tower that was finetuned from it, refused where the dimension says otherwise.
    """
    check_replayable(encoder, clf.encoder)
    if encoder.has_text:
        return ZeroShotClassifier(encoder, clf.names, templates=source.dataset.templates, unique=False)
    if source.train is not None:
        return source.classifier(encoder, progress=progress)[0]
    return same_classes(clf, encoder)


def check_replayable(source: Encoder, target: Encoder) -> None:
    """Refuse to craft on an encoder that sees images of another size."""
    if source.image_size != target.image_size:
        raise ReactClipError(
            f"{source.name!r} sees {source.image_size} pixels a side and {target.name!r} {target.image_size}; images "
            "cannot be replayed, so choose a transfer_model of the same size"
        )


def _check_classes(clf: ZeroShotClassifier, dataset: ImageDataset) -> None:
    if len(clf.names) != len(dataset.class_names):
        raise ReactClipError(
            f"the classifier has {len(clf.names)} classes and {dataset.name} has {len(dataset.class_names)}; build it "
            "from the set's class_names, or fit the set with dataset.align(head)"
        )
    if tuple(clf.names) != dataset.class_names and sorted(clf.names) == sorted(dataset.class_names):
        raise ReactClipError(
            f"the classifier has the classes of {dataset.name} in another order; build it from the set's class_names"
        )


def _checked_pair(clf: ZeroShotClassifier, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple) or len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
        raise ReactClipError("data is no ImageDataset and no pair of tensors; give (pixels [N, 3, S, S], labels [N])")
    pixels, labels = (part.detach().cpu() for part in data)
    clf.encoder.check(pixels)
    if labels.shape != (len(pixels),) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ReactClipError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; {len(pixels)} images need one class index each"
        )
    return pixels.float(), labels.long()
