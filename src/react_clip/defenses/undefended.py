"""CLIP as it is: the reference every table starts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from react_clip.defenses.base import Defended, prepare, unmeasured
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier


@dataclass(frozen=True)
class Undefended:
    """One forward pass, no defence.

    >>> Undefended()
    Undefended()
    """

    @property
    def name(self) -> str:
        """Short name for tables."""
        return "undefended"

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Plain answers."""
        pixels = prepare(clf, images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            features = clf.encoder.encode_views(pixels)
            logits = clf.logits(features)
        nan = unmeasured(pixels)
        zeros = torch.zeros(len(pixels), dtype=torch.long, device=pixels.device)
        return Defended(
            features=features,
            logits=logits,
            drift=nan,
            instability=nan,
            score=nan,
            gated=zeros.bool(),
            sigma=nan,
            passes=zeros + 1,
            backward_passes=zeros,
            class_names=clf.names,
        )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return {"defense": self.name}
