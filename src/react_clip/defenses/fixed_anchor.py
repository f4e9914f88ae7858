"""AOM and Defend-CLIP: the same operator as ReACT with one anchor scale for every image."""

from __future__ import annotations

from dataclasses import field

from react_clip.config import Count, NonNegative
from react_clip.defenses.react import ReACT
from react_clip.mappings import Constant, Mapping


class AOM(ReACT):
    r"""Correct every image: :math:`f + 1.2\,(f_{anc}(0.1) - f)`, 11 passes.

    >>> AOM().tau is None, AOM().mapping, AOM().alpha
    (True, Constant(sigma=0.1), 1.2)
    """

    kind = "aom"
    colour = "#E69F00"
    alpha: NonNegative = 1.2
    tau: float | None = None
    mapping: Mapping = field(default_factory=Constant)
    instability: bool = False


class DefendCLIP(AOM):
    r"""AOM's correction only where :math:`r(x) \ge 0.35`, with r from ten draws per probe scale, as its code does.

    21 passes for an image it leaves alone, 31 for one it corrects.

    >>> DefendCLIP().tau, DefendCLIP().probe_samples
    (0.35, 10)
    """

    kind = "defend-clip"
    label = "Defend-CLIP"
    colour = "#56B4E9"
    tau: float | None = 0.35
    probe_samples: Count = 10
