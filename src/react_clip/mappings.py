r"""From relative cross-noise drift to the anchor-noise scale: :math:`\sigma_{corr}(x) = h(r(x))`.

The paper adopts the linear map and compares it with a logistic and a power law fitted to the same points. Each is a
frozen value object: called on a tensor of drifts it returns the scales; :func:`to_dict` and :func:`from_dict` carry it
through JSON. Scales are held to [0, 1]: noise below zero does not exist, noise beyond the range of the pixels erases
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip.errors import ReactClipError

LARGEST_DRIFT = 1e6
"""Cap on \\|r\\| inside a mapping, so that no power or product of it overflows fp32."""


def _bounded(relative: Tensor) -> Tensor:
    return relative.clamp(-LARGEST_DRIFT, LARGEST_DRIFT)


@dataclass(frozen=True)
class Linear:
    r""":math:`\sigma = a + b r`, with the paper's coefficients for ViT-B/32 as defaults.

    >>> Linear()(torch.tensor([0.0, 1.0, -1.0]))
    tensor([0.0300, 0.0720, 0.0000])
    """

    kind: ClassVar[str] = "linear"
    a: float = 0.03
    b: float = 0.042

    def __post_init__(self) -> None:
        _require_finite(self)

    def __call__(self, relative: Tensor) -> Tensor:
        """Anchor-noise scale per drift."""
        return (self.a + self.b * _bounded(relative)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Constant:
    """The same scale for every image: the fixed anchor of AOM and Defend-CLIP.

    >>> Constant(0.1)(torch.tensor([0.0, 5.0]))
    tensor([0.1000, 0.1000])
    """

    kind: ClassVar[str] = "constant"
    sigma: float = 0.1

    def __post_init__(self) -> None:
        _require_finite(self)
        if not 0 <= self.sigma <= 1:
            raise ReactClipError(f"sigma is {self.sigma}; a constant anchor scale lies in [0, 1], such as 0.1")

    def __call__(self, relative: Tensor) -> Tensor:
        """Anchor-noise scale per drift."""
        return torch.full_like(relative, self.sigma)


@dataclass(frozen=True)
class Logistic:
    r""":math:`\sigma = L / (1 + e^{-k (r - r_0)})`: saturates at ``ceiling``. The paper prints no values; calibrate.

    >>> Logistic(ceiling=0.1, steepness=2.0, midpoint=1.0)(torch.tensor([1.0]))
    tensor([0.0500])
    """

    kind: ClassVar[str] = "logistic"
    ceiling: float
    steepness: float
    midpoint: float

    def __post_init__(self) -> None:
        _require_finite(self)

    def __call__(self, relative: Tensor) -> Tensor:
        """Anchor-noise scale per drift."""
        return (self.ceiling * torch.sigmoid(self.steepness * (_bounded(relative) - self.midpoint))).clamp(0.0, 1.0)


@dataclass(frozen=True)
class PowerLaw:
    r""":math:`\sigma = c \max(r, 0)^p`. The paper prints no values; calibrate.

    >>> PowerLaw(coefficient=0.07, exponent=0.5)(torch.tensor([4.0, -1.0]))
    tensor([0.1400, 0.0000])
    """

    kind: ClassVar[str] = "power_law"
    coefficient: float
    exponent: float

    def __post_init__(self) -> None:
        _require_finite(self)
        if self.exponent <= 0:
            raise ReactClipError(
                f"exponent is {self.exponent}; a power law needs one > 0, or sigma is infinite at r = 0"
            )

    def __call__(self, relative: Tensor) -> Tensor:
        """Anchor-noise scale per drift."""
        return (self.coefficient * _bounded(relative).clamp_min(0.0) ** self.exponent).clamp(0.0, 1.0)


Mapping = Linear | Constant | Logistic | PowerLaw
KINDS: dict[str, type[Mapping]] = {cls.kind: cls for cls in (Linear, Constant, Logistic, PowerLaw)}


def to_dict(mapping: Mapping) -> dict[str, Any]:
    """JSON form of a mapping: its kind and its coefficients.

    >>> to_dict(Linear())
    {'kind': 'linear', 'a': 0.03, 'b': 0.042}
    """
    return {"kind": mapping.kind, **dataclasses.asdict(mapping)}


def from_dict(data: MappingABC[str, Any]) -> Mapping:
    """Read a mapping back from its JSON form.

    >>> from_dict({"kind": "constant", "sigma": 0.1})
    Constant(sigma=0.1)
    """
    coefficients = dict(data)
    kind = coefficients.pop("kind", None)
    if kind not in KINDS:
        raise ReactClipError(f"mapping kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    try:
        return KINDS[kind](**coefficients)
    except TypeError:
        wanted = [field.name for field in dataclasses.fields(KINDS[kind])]
        raise ReactClipError(f"mapping {kind!r} takes {', '.join(wanted)}; got {', '.join(coefficients)}") from None


def _require_finite(mapping: Any) -> None:
    for field in dataclasses.fields(mapping):
        value = getattr(mapping, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ReactClipError(f"{field.name} of the {mapping.kind} mapping is {value!r}; it must be a finite number")
