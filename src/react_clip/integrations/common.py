"""Shared by the integrations: a model, its guard, and the classes over which the guard compares predictions."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from react_clip.bank import LabelBank
from react_clip.defenses import Defense, ReACT, SecondLook, Undefended, resolve_guard
from react_clip.defenses.look_calibration import Photos
from react_clip.encoders import Encoder, load
from react_clip.errors import ReactClipError
from react_clip.noise import Seed, process_secret
from react_clip.preprocess import ImageSource, as_pixels
from react_clip.zeroshot import ZeroShotClassifier

DRIFT_TAU = 0.35
"""Threshold of the gate on r alone: the paper's and Defend-CLIP's; Tables 2 and 3 of the results say what it costs."""

_BATCH = 32

Anchored = TypeVar("Anchored", bound=ReACT)


def drift_only(guard: Anchored, tau: float = DRIFT_TAU) -> Anchored:
    """The guard without J(x): its gate uses the drift alone and needs no class list.

    >>> guard = drift_only(ReACT())
    >>> guard.instability, guard.tau
    (False, 0.35)
    """
    return dataclasses.replace(guard, instability=False, tau=tau)


def resolve_encoder(model: Encoder | str | Path, device: str | torch.device | None = None) -> Encoder:
    """An encoder as it is, or one loaded by its name."""
    if not isinstance(model, Encoder):
        return load(model, device=device)
    if device is not None:
        raise ReactClipError(f"device {str(device)!r} is given with a loaded encoder; load the encoder there instead")
    return model


def resolve_seed(seed: Seed | None) -> Seed:
    """The seed as it is, or the secret of this process, about which the first call logs a line."""
    return _logged_secret() if seed is None else seed


@functools.cache
def _logged_secret() -> bytes:
    logging.getLogger("react_clip.integrations").warning(
        "the noise is keyed by a new random secret: features may differ after a restart; seed=b'...' keeps them"
    )
    return process_secret()


def local_image(source: ImageSource) -> ImageSource:
    """Decode ``data:`` URIs and refuse URLs: fetching them would let callers reach into the service's own network."""
    if not isinstance(source, str):
        return source
    if source.lower().startswith(("http://", "https://", "ftp://")):
        raise ReactClipError(
            f"{_shorten(source)!r} is a URL and is not fetched; download it and give the path or bytes"
        )
    if source.startswith("data:image/"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error:
            raise ReactClipError(f"{_shorten(source)!r} holds no valid base64; give a path or bytes") from None
    return source


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class DefendedFeatures:
    """Defended image features, and plain text features, for search and vector stores.

    The guard compares predictions over ``labels`` or ``class_features``. Without either, SecondLook compares features
    alone; ReACT compares over the label bank's vocabulary if the encoder is the offline tower, and as a default guard
    uses the drift alone for any other encoder (:func:`drift_only`).

    Args:
        model: any name that :func:`react_clip.load` takes, or a loaded encoder.
        guard: a defence; by default the one for the encoder (:func:`react_clip.defenses.default_for`). ``"auto"``
            calibrates SecondLook on ``photos``.
        labels: classes over which the guard compares predictions.
        class_features: the same as ready features ``[K, dim]``.
        seed: a number, or a secret as ``bytes``; by default a secret drawn once per process.
        device: where to load the model; CUDA if there is one by default.
        photos: for ``guard="auto"``: some hundred clean photos like those that will be defended.
    """

    def __init__(
        self,
        model: Encoder | str | Path,
        guard: Defense | str | None = None,
        *,
        labels: Sequence[str] | None = None,
        class_features: Tensor | None = None,
        seed: Seed | None = None,
        device: str | torch.device | None = None,
        photos: Photos | None = None,
    ) -> None:
        self.encoder = encoder = resolve_encoder(model, device)
        self.seed, self.has_own_secret = resolve_seed(seed), isinstance(seed, bytes)
        self.labels = None if labels is None else list(labels)
        self.has_class_features = class_features is not None
        classes = _classes(encoder, labels, class_features)
        chosen = resolve_guard(guard, encoder, photos, features=True)
        if classes is None and _needs_classes(chosen) and _belongs_to_bank(encoder):
            classes = ZeroShotClassifier(encoder, LabelBank.load().vocabulary())
        if classes is None:
            if guard is None and isinstance(chosen, ReACT):
                chosen = drift_only(chosen)
            if _needs_classes(chosen):
                raise ReactClipError(
                    f"the guard {chosen.name!r} compares predictions, and there are no classes; give labels=[...], "
                    "class_features=..., or a guard that needs none: rc.integrations.drift_only(guard)"
                )
            # Such a guard does not use the classes: a single one is always the best.
            classes = ZeroShotClassifier.from_features(encoder, ["anything"], torch.ones(1, encoder.dim))
        self.guard = chosen
        self.classifier = classes

    def of_pixels(self, pixels: Tensor) -> Tensor:
        """Unit features ``[B, dim]`` of pixels in [0, 1]."""
        return self.guard(self.classifier, pixels, seed=self.seed).features

    @torch.no_grad()
    def of_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Unit features of paths, bytes or PIL images, on the CPU; 32 images are in memory at a time."""
        how = self.encoder.preprocessing
        parts = [
            self.of_pixels(as_pixels([local_image(image) for image in images[i : i + _BATCH]], how)).cpu()
            for i in range(0, len(images), _BATCH)
        ]
        return torch.cat(parts) if parts else torch.empty(0, self.encoder.dim)

    @torch.no_grad()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of texts, on the CPU; the offline tower knows the names of its label bank."""
        if not texts:
            return torch.empty(0, self.encoder.dim)
        if _belongs_to_bank(self.encoder):
            return LabelBank.load().features(texts)
        parts = [self.encoder.encode_text(texts[i : i + 256]).cpu() for i in range(0, len(texts), 256)]
        return torch.cat(parts)


def _classes(
    encoder: Encoder, labels: Sequence[str] | None, class_features: Tensor | None
) -> ZeroShotClassifier | None:
    if labels is not None and class_features is not None:
        raise ReactClipError("labels and class_features are both given; choose one")
    if class_features is not None:
        return ZeroShotClassifier.from_features(
            encoder, [f"class {i}" for i in range(len(class_features))], class_features
        )
    if labels is not None:
        return ZeroShotClassifier(encoder, labels)
    return None


def _belongs_to_bank(encoder: Encoder) -> bool:
    return not encoder.has_text and encoder.base == LabelBank.load().encoder


def _needs_classes(guard: Defense) -> bool:
    if isinstance(guard, ReACT):
        return guard.instability and guard.tau is not None
    return not isinstance(guard, SecondLook | Undefended)
