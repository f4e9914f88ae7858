"""The equations of the paper as pure tensor functions.

Shapes: a feature tensor is ``[B, D]`` with unit rows, a logit or probability tensor ``[B, K]``, everything else one
value per image, ``[B]``. Nothing here draws random numbers or calls an encoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

LOGIT_SCALE = 100.0
"""1 / temperature of CLIP's softmax (the paper's 1 / gamma)."""

MAX_INSTABILITY = math.log(2.0)
"""Largest value the Jensen-Shannon divergence can take, in nats."""

SMALLEST_DRIFT = 1e-6
"""Floor for the denominator of r: below it a drift of unit fp32 features is rounding, not a response."""


def normalize(features: Tensor) -> Tensor:
    r"""Scale each row to unit length: :math:`f / \lVert f \rVert_2`.

    >>> normalize(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    return F.normalize(features, dim=-1)


def logits(features: Tensor, class_features: Tensor) -> Tensor:
    r"""Zero-shot logits :math:`100 \cos(f_v, f_t^k)` of unit features.

    >>> logits(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[100.,   0.]])
    """
    return LOGIT_SCALE * features @ class_features.T


def drift(features: Tensor, noisy_features: Tensor) -> Tensor:
    r"""Displacement under a probe: :math:`d_s(x) = \lVert f_v(x^{(\sigma_s)}) - f_v(x) \rVert_2`.

    >>> drift(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([1.4142])
    """
    distance: Tensor = torch.linalg.vector_norm(noisy_features - features, dim=-1)
    return distance


def relative_drift(drift_low: Tensor, drift_high: Tensor) -> Tensor:
    r"""Relative cross-noise drift :math:`r(x) = (d_{high} - d_{low}) / d_{low}`, the correction-demand signal.

    The denominator is floored, so an encoder that does not move at all gives 0 instead of a division by zero.

    >>> relative_drift(torch.tensor([0.2, 0.0]), torch.tensor([0.3, 0.0]))
    tensor([0.5000, 0.0000])
    """
    return (drift_high - drift_low) / drift_low.clamp_min(SMALLEST_DRIFT)


def js_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    r"""Prediction instability :math:`J = \tfrac12 [KL(p \Vert m) + KL(q \Vert m)]` with :math:`m = (p + q)/2`, in nats.

    Takes logits, so that tiny probabilities keep their logarithms. The result lies in :math:`[0, \ln 2]`.

    >>> p, q = torch.tensor([[90.0, 0.0]]), torch.tensor([[0.0, 90.0]])
    >>> js_divergence(p, p), js_divergence(p, q)
    (tensor([0.]), tensor([0.6931]))
    """
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - MAX_INSTABILITY
    divergence = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)
    return divergence.clamp(0.0, MAX_INSTABILITY)


def anchor(view_features: Tensor) -> Tensor:
    r"""Noise anchor :math:`f_{anc} = \tfrac1M \sum_i f_v(x_i)` of unit features ``[B, M, D]``; not renormalised.

    >>> anchor(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    return view_features.mean(dim=1)


def extrapolate(features: Tensor, anchors: Tensor, alpha: float) -> Tensor:
    r"""Anchor-guided extrapolation :math:`f_v + \alpha (f_{anc} - f_v)`, scaled to unit length for scoring.

    ``alpha = 0`` is no correction and returns the features unchanged, bit for bit.

    >>> extrapolate(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]), alpha=2.0)
    tensor([[0., 1.]])
    """
    if alpha == 0:
        return features
    return normalize(features + alpha * (anchors - features))


def intervention_score(relative: Tensor, instability: Tensor) -> Tensor:
    r"""Defensive intervention score :math:`s_{int}(x) = r(x) + J(x)`.

    >>> intervention_score(torch.tensor([0.5]), torch.tensor([0.25]))
    tensor([0.7500])
    """
    return relative + instability


def gate(score: Tensor, tau: float) -> Tensor:
    r"""Correction gate :math:`g(x) = 1[s_{int}(x) \ge \tau]`.

    >>> gate(torch.tensor([0.6, 0.7, 0.8]), tau=0.7)
    tensor([False,  True,  True])
    """
    return score >= tau


@dataclass(frozen=True, eq=False)
class PerImage:
    """A dataclass of tensors, each with one row an image."""

    def rows(self, index: Tensor) -> Self:
        """The same for some of the images."""
        return replace(self, **{part.name: getattr(self, part.name)[index] for part in fields(self)})
