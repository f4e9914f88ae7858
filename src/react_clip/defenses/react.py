"""ReACT-CLIP: response-aware correction at test time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from react_clip.defenses.anchored import AnchoredDefense


@dataclass(frozen=True)
class ReACT(AnchoredDefense):
    r"""The paper's defence; the defaults are its constants (calibrated for ViT-B/32).

    .. math::
        r = \frac{d_{high} - d_{low}}{d_{low}}, \quad \sigma = a + b r, \quad s = r + J, \quad
        f_{out} = f + 1[s \ge \tau]\,\alpha\,(f_{anc}(\sigma) - f)

    Costs 3, 4, 13 or 14 encoder passes an image, no gradients.

    >>> guard = ReACT(tau=0.4)
    >>> guard.views, guard.alpha, guard.tau, guard.mapping
    (10, 2.0, 0.4, Linear(a=0.03, b=0.042))
    >>> ReACT.from_dict(guard.to_dict()) == guard
    True
    """

    name: ClassVar[str] = "react"
