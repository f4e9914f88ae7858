"""Images made elsewhere as an attack: read from files, held to the budget and judged like any other."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from react_clip import storage
from react_clip.attacks.base import ADAPTIVE, OBLIVIOUS, TRANSFER, Attack
from react_clip.attacks.problem import Problem
from react_clip.config import Configuration
from react_clip.errors import ReactClipError, first_line
from react_clip.preprocess import read_image, to_float, to_image

MANIFEST = "manifest.json"


class Manifest(Configuration):
    """Which image belongs to which photo."""

    images: dict[str, str]
    """Files, or rows of tensors, by the SHA-256 of the clean photo's pixels."""
    sha256: dict[str, str]
    """SHA-256 of each file."""


class Imported(Attack):
    """Adversarial images of a folder with a ``manifest.json``, such as :meth:`write` makes; each photo needs one.

    The manifest names the image of each clean photo, which it knows by the SHA-256 of its pixels at the encoder's size
    (RGB bytes, row by row), and the SHA-256 of each file. An image is a PNG file, or a row of the tensor ``images``
    (uint8 ``[N, 3, S, S]``) of a safetensors file::

        {"images": {"5f70bf18...": "0.png", "2c26b46b...": "more.safetensors#0"}, "sha256": {"0.png": "9c1f0c6e..."}}
    """

    kind: ClassVar[str] = "imported"
    threats: ClassVar[tuple[str, ...]] = (OBLIVIOUS, TRANSFER, ADAPTIVE)
    folder: str = ""
    """The folder."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ReactClipError("imported needs 'folder', which holds the images and their manifest.json")

    def __repr__(self) -> str:
        """The configuration with the digest of the manifest: other images are another attack."""
        return f"{super().__repr__()} {hashlib.sha256(repr(self._manifest).encode()).hexdigest()}"

    @property
    def name(self) -> str:
        """``imported-`` and the name of the folder."""
        return f"{self.kind}-{Path(self.folder).name}"

    @staticmethod
    def write(folder: str | Path, photos: Tensor, images: Tensor) -> Path:
        """Write images ``[N, 3, S, S]`` in [0, 1] of clean photos into a new folder as PNG files, with the manifest."""
        folder, listed, digests = Path(folder), dict[str, str](), dict[str, str]()
        storage.check_new_folder(folder)
        for number, (photo, image) in enumerate(zip(photos, images, strict=True)):
            name = listed[photo_digest(photo)] = f"{number:06d}.png"
            with storage.atomic_path(folder / name) as temporary:
                to_image(image).save(temporary, format="PNG")
            digests[name] = storage.sha256_of(folder / name)
        Manifest(listed, digests).save(folder / MANIFEST)
        return folder / MANIFEST

    def search(self, problem: Problem) -> Tensor:
        """The images of these photos; refused where one is missing, changed, or leaves the budget."""
        listed, names, intact = self._manifest.images, [], set[Path]()
        for photo in problem.x:
            if (digest := photo_digest(photo)) not in listed:
                raise ReactClipError(
                    f"{self.folder} has no image of the photo with SHA-256 {digest}; every attacked photo needs one, "
                    "at the encoder's size"
                )
            names.append(listed[digest])
        return torch.stack([self._image(name, problem.x.shape[-1], intact) for name in names]).to(problem.x)

    @cached_property
    def _manifest(self) -> Manifest:
        return Manifest.load(Path(self.folder) / MANIFEST)

    def _image(self, name: str, size: int, intact: set[Path]) -> Tensor:
        """One image ``[3, S, S]`` in [0, 1]; ``intact`` collects the files whose hash was compared."""
        file, _, row = name.partition("#")
        path = Path(self.folder) / file
        if path not in intact:
            intact.add(storage.verified(Path(self.folder), file, self._manifest.sha256.get(file)))
        try:
            if row:
                with safe_open(path, framework="pt") as stored:
                    image = stored.get_slice("images")[int(row)]
            else:
                image = torch.from_numpy(np.array(read_image(path))).permute(2, 0, 1)
        except (OSError, SafetensorError, ValueError, IndexError) as error:
            raise ReactClipError(f"{path} cannot be read ({first_line(error)}); get it again") from None
        if image.dtype != torch.uint8 or image.shape != (3, size, size):
            raise ReactClipError(
                f"{path} holds no image of {size} x {size} pixels in 8 bits; resize nothing, attack it"
            )
        return to_float(image)


def photo_digest(photo: Tensor) -> str:
    """SHA-256 of the RGB bytes of an image ``[3, S, S]`` in [0, 1]."""
    return hashlib.sha256(photo.mul(255.0).round().byte().permute(1, 2, 0).cpu().numpy().tobytes()).hexdigest()
