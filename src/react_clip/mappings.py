r"""From relative cross-noise drift to the anchor-noise scale: :math:`\sigma_{corr}(x) = h(r(x))`.

The paper uses the linear map and compares it with a logistic curve and a power law fitted to the same points. Scales
are clamped to [0, 1]: noise cannot be negative, and noise beyond the range of the pixels erases them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from react_clip.config import Fraction, Positive, Registered, Registry

LARGEST_DRIFT = 1e6
"""Cap on \\|r\\| inside a mapping, so that no power or product of it overflows fp32."""


class Mapping(Registered, ABC):
    """A function from drifts to scales; ``{"kind": "linear", "a": 0.03, "b": 0.042}`` in JSON."""

    registry: ClassVar[Registry[Mapping]] = Registry("mapping")

    def __call__(self, relative: Tensor) -> Tensor:
        """Anchor-noise scale in [0, 1] per relative drift; any shape."""
        return self._scale(relative.clamp(-LARGEST_DRIFT, LARGEST_DRIFT)).clamp(0.0, 1.0)

    @abstractmethod
    def _scale(self, relative: Tensor) -> Tensor:
        """The scale before it is clamped."""


class Linear(Mapping):
    r""":math:`\sigma = a + b r`, with the paper's coefficients for ViT-B/32 as defaults.

    >>> Linear()(torch.tensor([0.0, 1.0, -1.0]))
    tensor([0.0300, 0.0720, 0.0000])
    """

    kind = "linear"
    colour = "#0072B2"
    a: float = 0.03
    b: float = 0.042

    def _scale(self, relative: Tensor) -> Tensor:
        return self.a + self.b * relative


class Constant(Mapping):
    """The same scale for every image: the fixed anchor of AOM and Defend-CLIP.

    >>> Constant(0.1)(torch.tensor([0.0, 5.0]))
    tensor([0.1000, 0.1000])
    """

    kind = "constant"
    colour = "#E69F00"
    sigma: Fraction = 0.1
    """Standard deviation of the anchor's noise, for pixels in [0, 1]."""

    def _scale(self, relative: Tensor) -> Tensor:
        return torch.full_like(relative, self.sigma)


class Logistic(Mapping):
    r""":math:`\sigma = L / (1 + e^{-k (r - r_0)})`: saturates at ``ceiling``. The paper prints no values; calibrate.

    >>> Logistic(ceiling=0.1, steepness=2.0, midpoint=1.0)(torch.tensor([1.0]))
    tensor([0.0500])
    """

    kind = "logistic"
    colour = "#D55E00"
    ceiling: float
    steepness: float
    midpoint: float

    def _scale(self, relative: Tensor) -> Tensor:
        return self.ceiling * torch.sigmoid(self.steepness * (relative - self.midpoint))


class PowerLaw(Mapping):
    r""":math:`\sigma = c \max(r, 0)^p` with p > 0, so it is finite at r = 0. The paper prints no values.

    >>> PowerLaw(coefficient=0.07, exponent=0.5)(torch.tensor([4.0, -1.0]))
    tensor([0.1400, 0.0000])
    """

    kind = "power_law"
    label = "Power law"
    colour = "#009E73"
    coefficient: float
    exponent: Positive

    def _scale(self, relative: Tensor) -> Tensor:
        return self.coefficient * relative.clamp_min(0.0) ** self.exponent
