r"""Defences with an anchor of one noise scale for all images: AOM, and Defend-CLIP, which is AOM behind a gate."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defense
from react_clip.defenses.react import ANCHOR, ReACT
from react_clip.defenses.view import View
from react_clip.functional import extrapolate
from react_clip.mappings import Constant, Mapping


class AOM(Defense):
    r"""Correct every image: :math:`f + 1.2\,(f_{anc}(0.1) - f)`, 11 passes.

    >>> AOM()
    AOM(views=10, alpha=1.2, mapping=Constant(sigma=0.1))
    """

    kind = "aom"
    colour = "#E69F00"
    removed: ClassVar[dict[str, Any]] = {
        **Defense.removed,
        **{"instability": False, "tau": None},
        **dict.fromkeys(("sigma_low", "sigma_high", "probe_samples", "augmentation"), ...),
    }

    views: Count = 10
    """M, the views behind the anchor."""
    alpha: NonNegative = 1.2
    """Strength of the correction."""
    mapping: Constant = field(default_factory=Constant)
    """The anchor's noise scale."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The extrapolated features."""
        f, views = x.encode_together(x.image, x.noisy(self.mapping.sigma, ANCHOR, self.views))
        return extrapolate(f, views.mean(1), self.alpha), {"sigma": torch.full_like(f[:, 0], self.mapping.sigma)}


class DefendCLIP(ReACT):
    r"""AOM's correction only where :math:`r \ge 0.35`, with r from ten noisy views per scale, as its code does.

    21 passes for an image it leaves alone, 31 for one it corrects.

    >>> DefendCLIP().tau, DefendCLIP().probe_samples, DefendCLIP().mapping
    (0.35, 10, Constant(sigma=0.1))
    """

    kind = "defend-clip"
    label = "Defend-CLIP"
    colour = "#56B4E9"
    constants: ClassVar[dict[str, str]] = {}
    probe_samples: Count = 10
    alpha: NonNegative = 1.2
    tau: float | None = 0.35
    mapping: Mapping = field(default_factory=Constant)
    instability: bool = False
