r"""ReACT-CLIP: response-aware correction at test time, Algorithm 2 of the paper.

.. math::
    r = \frac{d_{high} - d_{low}}{d_{low}}, \quad \sigma = a + b r, \quad s = r + J, \quad
    f_{out} = f + 1[s \ge \tau]\,\alpha\,(f_{anc} - f), \quad
    f_{anc} = \tfrac1M \sum_i f(x + \sigma\,\eta_i)

with d the distances that the feature moves under weak and strong noise, r the drift ratio, and J the instability: the
divergence between the predictions for the image and for an augmented view.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from react_clip.augment import WeakAugmentation
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import CalibratedDefense
from react_clip.defenses.view import View
from react_clip.encoders import OPENAI_VIT_B_16
from react_clip.errors import ReactClipError
from react_clip.functional import MAX_INSTABILITY, drift, extrapolate, intervention_score, relative_drift
from react_clip.mappings import Linear, Mapping

LOW, HIGH, AUGMENT, ANCHOR = range(4)
"""Branches of an image's random stream: weak noise, strong noise, augmented view, anchor views. Each purpose has its
own, so that skipping one does not change the others."""

OPENAI_VIT_B_32 = "openai/clip-vit-base-patch32", "open_clip:ViT-B-32/openai", "open_clip:ViT-B-32-quickgelu/openai"
"""All names of the weights that the paper's constants are for."""


class ReACT(CalibratedDefense):
    """The paper's defence; the defaults are its constants (calibrated for ViT-B/32).

    3 encoder passes an image, 1 more where the drift ratio alone does not decide, and ``views`` more where the gate
    opens: 3, 4, 13 or 14. No gradients.

    >>> guard = ReACT(tau=0.4)
    >>> guard.views, guard.alpha, guard.tau, guard.mapping
    (10, 2.0, 0.4, Linear(a=0.03, b=0.042))
    >>> ReACT.from_dict(guard.to_dict()) == guard, ReACT.for_encoder("openai/clip-vit-base-patch32") == ReACT()
    (True, True)
    """

    kind = "react"
    colour = "#0072B2"
    constants: ClassVar[dict[str, str]] = {
        **dict.fromkeys(OPENAI_VIT_B_32, ""),
        **dict.fromkeys(OPENAI_VIT_B_16, "clip-vit-b-16.json"),
    }

    sigma_low: float = 0.02
    """Scale of the weak noise."""
    sigma_high: float = 0.05
    """Scale of the strong noise."""
    probe_samples: Count = 1
    """Noisy views per scale, averaged before the distance is taken."""
    views: Count = 10
    """M, the views behind the anchor."""
    alpha: NonNegative = 2.0
    """Strength of the correction."""
    tau: float | None = 0.7
    """Score from which the gate opens; ``None`` corrects every image."""
    mapping: Mapping = field(default_factory=Linear)
    """From the drift ratio to the anchor's noise scale sigma."""
    instability: bool = True
    """Add J to the score; ``False`` lets the drift ratio decide alone."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    """The augmentation behind J."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma_low < self.sigma_high <= 1:
            raise ReactClipError(
                f"sigma_low is {self.sigma_low} and sigma_high {self.sigma_high}; they need 0 < sigma_low < "
                "sigma_high <= 1 (the paper's are 0.02 and 0.05)"
            )

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Algorithm 2. J lies in [0, ln 2], so it is measured only where it can decide."""
        scales = (self.sigma_low, LOW), (self.sigma_high, HIGH)
        weak, strong = (x.noisy(sigma, stream, self.probe_samples) for sigma, stream in scales)
        f, low, high = x.encode_together(x.image, weak, strong)
        low, high = drift(f, low.mean(1)), drift(f, high.mean(1))
        r = score = relative_drift(low, high)
        j = torch.full_like(r, torch.nan)
        if self.instability and self.tau is not None:
            # The margin covers rounding in r + J: a view that is skipped must not matter.
            undecided = (r < self.tau) & (r >= self.tau - MAX_INSTABILITY - 1e-6 * (1.0 + abs(self.tau)))
            augmented = x.encode(x.drawn(self.augmentation, AUGMENT, recordable=True), where=undecided)
            j = x.instability(f, augmented, where=undecided)
            score = intervention_score(r, j.nan_to_num(0.0))
        gated = x.gate(score, self.tau)
        sigma = self.mapping(r)
        views = x.encode(x.noisy(sigma, ANCHOR, self.views), where=gated)
        features = torch.where(gated[:, None], extrapolate(f, views.mean(1), self.alpha), f)
        names = ("drift_low", "drift_high", "drift", "instability", "score", "sigma")
        return features, dict(zip(names, (low, high, r, j, score, sigma), strict=True))
