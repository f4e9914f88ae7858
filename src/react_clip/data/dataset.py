"""Labelled photos from any source, opened on demand, with deterministic subsets; ready-made class features."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from react_clip.data.registry import ClassIndex
from react_clip.errors import ReactClipError, first_line
from react_clip.preprocess import Preprocessing, read_image, to_8bit
from react_clip.zeroshot import DEFAULT_TEMPLATES

PhotoSource = Path | NDArray[np.uint8] | Callable[[], bytes]


@dataclass(frozen=True, eq=False)
class ClassFeatures:
    """``features[k]``, of ``[classes, dim]``, is the class called ``names[k]``, whose photos lie in ``folders[k]``."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    features: Tensor

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or not 0 < len(self.names) == len(self.folders) == len(self.features):
            raise ReactClipError(f"{len(self.names)} names need as many rows, not shape {tuple(self.features.shape)}")


def load_class_features(path: str | Path) -> ClassFeatures:
    """Read an ``.npz`` with the arrays ``names``, ``features`` and, unless they equal the names, ``folders``."""
    if not Path(path).is_file():
        raise ReactClipError(f"no class features at {path}; give a .npz file with names and features")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = tuple(map(str, arrays["names"].tolist()))
            folders = tuple(map(str, arrays["folders"].tolist())) if "folders" in arrays.files else names
            return ClassFeatures(names, folders, torch.as_tensor(arrays["features"], dtype=torch.float32))
    except (OSError, ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ReactClipError(f"{path} holds no class features ({first_line(error)}); write it again") from error


@dataclass(frozen=True, eq=False)
class Photo:
    """One image: an id that does not depend on the root folder, its class index, and its file, pixels or bytes."""

    id: str
    label: int
    source: PhotoSource

    def content(self) -> bytes:
        """Bytes of the encoded file, or of the raw pixels where there is no file."""
        if isinstance(self.source, np.ndarray):
            return self.source.tobytes()
        try:
            return self.source.read_bytes() if isinstance(self.source, Path) else self.source()
        except OSError as error:
            raise ReactClipError(f"photo {self.id} cannot be read: {error.strerror}; was it moved?") from error

    def open(self) -> Image.Image:
        """The decoded image; the error for an unreadable one names the photo."""
        try:
            if isinstance(self.source, np.ndarray):
                return read_image(Image.fromarray(self.source))
            return read_image(self.source if isinstance(self.source, Path) else self.content())
        except ReactClipError as error:
            raise ReactClipError(f"photo {self.id}: {error}; replace it or remove it from the set") from error


@dataclass(frozen=True, eq=False, repr=False)
class ImageDataset:
    """Photos with labels that index ``class_names``; ``dataset[i]`` is an image and its label, as in torchvision.

    Args:
        name: of the set, for tables.
        split: such as ``test``.
        class_names: for the prompts.
        photos: in a fixed order.
        folders: the identifier of each class in the release; by default its name.
        templates: prompts with ``{}`` for the class name.
        notes: what was left out and why, one line each.
    """

    name: str
    split: str
    class_names: tuple[str, ...]
    photos: tuple[Photo, ...]
    folders: tuple[str, ...] = ()
    templates: tuple[str, ...] = DEFAULT_TEMPLATES
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "folders", self.folders or self.class_names)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.photos[index].open(), self.photos[index].label

    def __repr__(self) -> str:
        notes = "".join(f"; {note}" for note in self.notes)
        return f"<{self.name} {self.split}: {len(self)} photos of {len(self.class_names)} classes{notes}>"

    @property
    def labels(self) -> list[int]:
        """One class index per photo."""
        return [photo.label for photo in self.photos]

    def pixels(self, how: Preprocessing, *, progress: bool = False) -> Tensor:
        """All photos as uint8 ``[N, 3, size, size]``, resized as an encoder wants it (``encoder.preprocessing``)."""
        stack = torch.empty(len(self), 3, how.size, how.size, dtype=torch.uint8)

        def read(index: int) -> None:
            stack[index] = to_8bit(self.photos[index].open(), how)

        # Pillow decodes and resizes outside Python's lock, so threads do help.
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            done = pool.map(read, range(len(self)))
            for _ in tqdm(done, f"{self.name}: photos", len(self), unit="photo", leave=False, disable=not progress):
                pass
        return stack

    def fingerprint(self) -> str:
        """SHA-256 of class names, ids, labels and every photo's content: the same one means the same data."""
        digest = hashlib.sha256(json.dumps([self.class_names, self.folders]).encode())
        for photo in self.photos:
            digest.update(json.dumps([photo.id, photo.label]).encode())
            digest.update(hashlib.sha256(photo.content()).digest())
        return digest.hexdigest()

    def take(self, limit: int, seed: int = 0) -> ImageDataset:
        """``limit`` photos, the classes as equal as can be; a smaller limit takes a part of what a larger one takes."""
        if limit < 1:
            raise ReactClipError(f"limit is {limit}; the least is 1; leave it out to take all {len(self)} photos")
        ranks = _ranks(self.photos, seed)
        turns = sorted(range(len(self)), key=lambda i: (ranks[i], _draw(seed, f"class {self.photos[i].label}")))
        return self._choose(sorted(turns[:limit]), f"took {min(limit, len(self))} of {len(self)} photos (seed {seed})")

    def take_per_class(self, count: int, seed: int = 0) -> ImageDataset:
        """At most ``count`` photos of each class."""
        chosen = [i for i, rank in enumerate(_ranks(self.photos, seed)) if rank < count]
        short = sum(size < count for size in Counter(self.labels).values())
        note = f"took {count} photos per class, {len(chosen)} of {len(self)} (seed {seed})"
        return self._choose(chosen, f"{note}; {short} classes have fewer" if short else note)

    def align(self, classes: ClassFeatures) -> ImageDataset:
        """Relabel to the rows of class features, matched by folder, else by name; other photos are dropped.

        All rows are kept, also those no photo belongs to: a harder vocabulary is the user's choice. If fewer than half
        of the set's classes have a row, the two do not belong together.
        """
        index = ClassIndex(classes.folders, classes.names)
        pairs = enumerate(zip(self.folders, self.class_names, strict=True))
        matches = {old: index.find(folder, name) for old, (folder, name) in pairs}
        present = set(self.labels)
        lost = [self.folders[old] for old in sorted(present) if matches[old] is None]
        if 2 * (known := len(present) - len(lost)) < len(present):
            raise ReactClipError(f"the features know {known} of {len(present)} classes of {self.name}; give its own")
        photos = tuple(
            replace(photo, label=label) for photo in self.photos if (label := matches[photo.label]) is not None
        )
        aligned = replace(self, class_names=classes.names, folders=classes.folders, photos=photos)
        if lost:
            dropped = f"dropped {len(self) - len(photos)} photos of {len(lost)} classes without features"
            aligned = aligned.with_note(f"{dropped}: {', '.join(lost)}")
        if idle := len(classes.names) - len({photo.label for photo in photos}):
            aligned = aligned.with_note(f"{idle} of the {len(classes.names)} classes with features have no photo here")
        return aligned

    def with_note(self, note: str) -> ImageDataset:
        """The same set with one more note."""
        return replace(self, notes=(*self.notes, note))

    def _choose(self, indices: Sequence[int], note: str) -> ImageDataset:
        if len(indices) == len(self):
            return self
        return replace(self, photos=tuple(self.photos[i] for i in indices)).with_note(note)


def _draw(seed: int, text: str) -> bytes:
    """A random number that depends on the seed and the item only, not on a library's generator or the order."""
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def _ranks(photos: Sequence[Photo], seed: int) -> list[int]:
    """Each photo's position in a random order of its class."""
    ranks, met = [0] * len(photos), Counter[int]()
    for index in sorted(range(len(photos)), key=lambda i: _draw(seed, photos[i].id)):
        ranks[index] = met[photos[index].label]
        met[photos[index].label] += 1
    return ranks
