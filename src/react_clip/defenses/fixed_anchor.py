"""AOM and Defend-CLIP: the same operator as ReACT with one anchor scale for every image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from react_clip.defenses.anchored import AnchoredDefense
from react_clip.mappings import Constant, Mapping


@dataclass(frozen=True)
class AOM(AnchoredDefense):
    r"""Correct every image: :math:`f + 1.2\,(f_{anc}(0.1) - f)`, 11 passes.

    >>> AOM().tau is None, AOM().mapping, AOM().alpha
    (True, Constant(sigma=0.1), 1.2)
    """

    name: ClassVar[str] = "aom"
    alpha: float = 1.2
    tau: float | None = None
    mapping: Mapping = field(default_factory=Constant)
    instability: bool = False


@dataclass(frozen=True)
class DefendCLIP(AOM):
    r"""AOM's correction only where :math:`r(x) \ge 0.35`, with r from ten draws per probe scale, as its code does.

    21 passes for an image it leaves alone, 31 for one it corrects.

    >>> DefendCLIP().tau, DefendCLIP().probe_samples
    (0.35, 10)
    """

    name: ClassVar[str] = "defend-clip"
    tau: float | None = 0.35
    probe_samples: int = 10
