"""Class lists: the preset one, and those that requests bring, kept for a while.

Nothing of a request goes to disk: the library's own cache of class features is for those who own the machine.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from react_clip import functional
from react_clip.bank import LabelBank
from react_clip.encoders.base import Encoder
from react_clip.zeroshot import DEFAULT_TEMPLATES, ZeroShotClassifier

_CHUNK = 32
"""Prompts encoded before images get their turn again: a long list must not hold up everybody else."""

LabelSource = Literal["text", "bank", "preset"]
"""Where the features of a request's labels come from; ``preset`` means that a request cannot bring any."""


@dataclass(frozen=True, eq=False)
class ClassList:
    """Names and their unit features ``[K, D]`` on the encoder's device."""

    names: tuple[str, ...]
    features: Tensor

    @classmethod
    def of(cls, clf: ZeroShotClassifier) -> ClassList:
        """The list of a ready classifier."""
        return cls(clf.names, clf.class_features)

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[B, K]`` of unit features."""
        return functional.logits(features, self.features.to(features.dtype))


def label_source(encoder: Encoder) -> LabelSource:
    """Whether an encoder can name what nobody told it before."""
    if encoder.has_text:
        return "text"
    return "bank" if encoder.base == LabelBank.load().encoder else "preset"


def compute_classes(
    encoder: Encoder, names: tuple[str, ...], templates: tuple[str, ...] | None
) -> Generator[None, None, ClassList]:
    """Class features of checked names in small steps: yields where other work may go first."""
    if not encoder.has_text:
        return ClassList(names, LabelBank.load().features(names).to(encoder.device))
    templates = templates or DEFAULT_TEMPLATES
    # Not str.format: a caller's template must not reach into objects.
    prompts = [template.replace("{}", name) for template in templates for name in names]
    parts = []
    for start in range(0, len(prompts), _CHUNK):
        parts.append(encoder.encode_text(prompts[start : start + _CHUNK]))
        yield
    features = torch.cat(parts).reshape(len(templates), len(names), -1).mean(0)
    return ClassList(names, functional.normalize(features))
