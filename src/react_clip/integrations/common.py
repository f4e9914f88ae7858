"""Shared by the integrations: a model, its guard, and the classes over which the guard compares predictions."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from react_clip.defenses import Defense, ReACT, resolve_guard
from react_clip.encoders import Encoder, load
from react_clip.errors import ReactClipError
from react_clip.preprocess import Images, ImageSource
from react_clip.secret import Seed, seed_or_secret, was_drawn
from react_clip.zeroshot import ZeroShotClassifier

DRIFT_TAU = 0.35
"""Threshold of the gate on r alone: the paper's and Defend-CLIP's; Tables 2 and 3 of the results say what it costs."""

_BATCH = 32


def drift_only(guard: ReACT, tau: float = DRIFT_TAU) -> ReACT:
    """The guard without the instability J(x): its gate uses the drift alone and needs no class list.

    >>> guard = drift_only(ReACT())
    >>> guard.instability, guard.tau
    (False, 0.35)
    """
    return guard.replace(instability=False, tau=tau)


def resolve_encoder(model: Encoder | str | Path, device: str | torch.device | None = None) -> Encoder:
    """An encoder as it is, or one loaded by its name."""
    if not isinstance(model, Encoder):
        return load(model, device=device)
    if device is not None:
        raise ReactClipError(f"device {str(device)!r} is given with a loaded encoder; load the encoder there instead")
    return model


def noted_seed(seed: Seed | None, secret: bytes | None) -> Seed:
    """The seed or the secret; a line in the log where the secret was drawn."""
    if was_drawn(key := seed_or_secret(seed, secret)):
        logging.getLogger("react_clip.integrations").warning(
            "the noise is keyed by a new random secret: features may differ after a restart; secret=b'...' keeps them"
        )
    return key


def local_image(source: ImageSource) -> ImageSource:
    """Decode ``data:`` URIs and refuse URLs: fetching them would let callers reach into the service's own network."""
    if isinstance(source, str) and source.lower().startswith(("http://", "https://", "ftp://")):
        raise ReactClipError(f"{source[:60]!r} is a URL and is not fetched; download it and give the path or bytes")
    if isinstance(source, str) and source.startswith("data:image/"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error:
            raise ReactClipError(f"{source[:60]!r} holds no valid base64; give a path or bytes") from None
    return source


class DefendedFeatures:
    """Defended image features, and plain text features, for search and vector stores.

    The guard compares predictions over ``labels`` or ``class_features``. Without either, SecondLook compares features
    alone, and ReACT as the default guard uses the drift alone (:func:`drift_only`).

    Args:
        model: any name that :func:`react_clip.load` takes, or a loaded encoder.
        guard: a defence; by default the one for the encoder (:func:`react_clip.defenses.default_for`). ``"auto"``
            calibrates SecondLook on ``photos``.
        labels: classes over which the guard compares predictions.
        class_features: the same as ready features ``[K, dim]``.
        seed: of the noise, where others shall be able to repeat it.
        secret: key of the noise, instead of a seed; by default that of the process.
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
        secret: bytes | None = None,
        device: str | torch.device | None = None,
        photos: Images | None = None,
    ) -> None:
        if labels is not None and class_features is not None:
            raise ReactClipError("labels and class_features are both given; choose one")
        self.encoder = resolve_encoder(model, device)
        self.seed, self.has_own_secret = noted_seed(seed, secret), isinstance(secret or seed, bytes)
        self.labels = None if labels is None else list(labels)
        self.classifier: ZeroShotClassifier | None = None
        if class_features is not None:
            names = [f"class {i}" for i in range(len(class_features))]
            self.classifier = ZeroShotClassifier.from_features(self.encoder, names, class_features)
        elif labels is not None:
            self.classifier = ZeroShotClassifier(self.encoder, labels)
        self.guard = resolve_guard(guard, self.encoder if self.classifier is None else self.classifier, photos)
        if self.classifier is None and isinstance(self.guard, ReACT) and self.guard.instability:
            if guard is not None:
                raise ReactClipError(
                    f"the guard {self.guard.name!r} compares predictions, and there are no classes; give labels=[...], "
                    "class_features=..., or a guard that needs none: rc.integrations.drift_only(guard)"
                )
            self.guard = drift_only(self.guard)

    def of_pixels(self, pixels: Tensor) -> Tensor:
        """Unit features ``[B, dim]`` of pixels in [0, 1]."""
        return self.guard.run(self.encoder, self.encoder.prepare(pixels), self.seed, self.classifier).features

    @torch.no_grad()
    def of_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Unit features of paths, bytes or PIL images, on the CPU; 32 images are in memory at a time."""
        batches = [images[start : start + _BATCH] for start in range(0, len(images), _BATCH)]
        prepared = (self.encoder.prepare([local_image(image) for image in batch]) for batch in batches)
        return torch.cat([torch.empty(0, self.encoder.dim), *(self.of_pixels(pixels).cpu() for pixels in prepared)])

    @torch.no_grad()
    def of_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of texts, on the CPU; the offline tower knows the names of its label table."""
        if not texts:
            return torch.empty(0, self.encoder.dim)
        if not self.encoder.has_text:
            return ZeroShotClassifier(self.encoder, texts, unique=False).class_features.cpu()
        return self.encoder.encode_text(texts).cpu()
