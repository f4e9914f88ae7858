"""CLIP without a defence, the reference of every table."""

from __future__ import annotations

import torch

from react_clip.defenses.base import Defended, answer
from react_clip.defenses.config import BaseDefense
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier


class Undefended(BaseDefense):
    """Plain CLIP: one forward pass.

    >>> Undefended()
    Undefended()
    """

    kind = "undefended"
    label = "CLIP"
    colour = "#767676"

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return 1, 0

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Plain answers."""
        pixels = clf.encoder.prepare(images)
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            features = clf.encoder.encode_views(pixels)
            never = torch.zeros(len(pixels), dtype=torch.bool, device=pixels.device)
            return answer(clf, features=features, passes=1, gated=never)
