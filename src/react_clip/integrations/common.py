"""Shared by the integrations: a model, its guard, and the classes over which the guard compares predictions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from react_clip.defenses import Defense, ReACT, default_for
from react_clip.encoders import Encoder, load
from react_clip.errors import ReactClipError
from react_clip.preprocess import ImageSource, from_data_uri
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


def as_encoder(model: Encoder | str | Path) -> Encoder:
    """An encoder as it is, or one loaded by its name."""
    return model if isinstance(model, Encoder) else load(model)


def noted_seed(seed: Seed | None, secret: bytes | None) -> Seed:
    """The seed or the secret; a line in the log where the secret was drawn."""
    if was_drawn(key := seed_or_secret(seed, secret)):
        logging.getLogger("react_clip.integrations").warning(
            "the noise is keyed by a new random secret: features may differ after a restart; secret=b'...' keeps them"
        )
    return key


def local_image(source: ImageSource) -> ImageSource:
    """Decode ``data:`` URIs and refuse URLs: fetching them would let callers reach into the service's own network."""
    is_address = isinstance(source, str) and source.lower().startswith(("data:", "http://", "https://", "ftp://"))
    return from_data_uri(str(source)) if is_address else source


class DefendedFeatures:
    """Defended image features, and plain text features, for search and vector stores.

    The guard compares predictions over ``labels``. Without them, SecondLook compares features alone, and ReACT as the
    default guard uses the drift alone (:func:`drift_only`).

    Args:
        model: any name that :func:`react_clip.load` takes, or a loaded encoder.
        guard: a defence; by default the one for the encoder (:func:`react_clip.defenses.default_for`).
        labels: classes over which the guard compares predictions.
        seed: of the noise, where others shall be able to repeat it.
        secret: key of the noise, instead of a seed; by default that of the process.
    """

    def __init__(
        self,
        model: Encoder | str | Path,
        guard: Defense | None = None,
        *,
        labels: Sequence[str] | None = None,
        seed: Seed | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.encoder = as_encoder(model)
        self.seed, self.has_own_secret = noted_seed(seed, secret), isinstance(secret or seed, bytes)
        self.labels = None if labels is None else list(labels)
        self.classifier = None if labels is None else ZeroShotClassifier(self.encoder, labels)
        self.guard = guard or default_for(self.encoder)
        if self.classifier is None and isinstance(self.guard, ReACT) and self.guard.instability:
            if guard is not None:
                raise ReactClipError(
                    f"the guard {self.guard.name!r} compares predictions, and there are no classes; give labels=[...], "
                    "or a guard that needs none: rc.integrations.drift_only(guard)"
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
