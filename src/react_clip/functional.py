"""The equations of the paper as pure tensor functions.

Shapes: a feature tensor is ``[B, D]`` with unit rows, a logit or probability tensor ``[B, K]``, everything else one
value per image, ``[B]``. Nothing here draws random numbers or calls an encoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOGIT_SCALE = 100.0
"""1 / temperature of OpenAI's CLIP (the paper's 1 / gamma), and of towers that do not say theirs."""

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


def drift(features: Tensor, noisy_features: Tensor) -> Tensor:
    r"""Displacement under a probe: :math:`d_s(x) = \lVert f_v(x^{(\sigma_s)}) - f_v(x) \rVert_2`.

    >>> drift(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
    tensor([1.4142])
    """
    distance: Tensor = torch.linalg.vector_norm(noisy_features - features, dim=-1)
    return distance


def relative_distance(features: Tensor, anchor: Tensor) -> Tensor:
    r"""Distance of raw features from an anchor by its length, :math:`\lVert F(x') - F(x) \rVert / \lVert F(x) \rVert`.

    >>> relative_distance(torch.tensor([[3.0, 6.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([0.4000])
    """
    # The floor is for an encoder that answers zero.
    return drift(features, anchor) / drift(anchor, torch.zeros_like(anchor)).clamp_min(1e-12)


def relative_drift(drift_low: Tensor, drift_high: Tensor) -> Tensor:
    r"""Relative cross-noise drift :math:`r(x) = (d_{high} - d_{low}) / d_{low}`, the correction-demand signal.

    The denominator is floored, so an encoder that does not move at all gives 0 instead of a division by zero.

    >>> relative_drift(torch.tensor([0.2, 0.0]), torch.tensor([0.3, 0.0]))
    tensor([0.5000, 0.0000])
    """
    return (drift_high - drift_low) / drift_low.clamp_min(SMALLEST_DRIFT)


def js_divergence(logits_p: Tensor, logits_q: Tensor, gradient_temperature: float = 1.0) -> Tensor:
    r"""Prediction instability :math:`J = \tfrac12 [KL(p \Vert m) + KL(q \Vert m)]` with :math:`m = (p + q)/2`, in nats.

    Takes logits, so that tiny probabilities keep their logarithms; a class of minus infinity in both adds nothing. The
    result lies in :math:`[0, \ln 2]`. Its gradient may be that of logits divided by a temperature, for attackers: at a
    margin of 12 between the two best classes the true one is about 1e-4.

    >>> p, q = torch.tensor([[90.0, 0.0]]), torch.tensor([[0.0, 90.0]])
    >>> js_divergence(p, p), js_divergence(p, q)
    (tensor([0.]), tensor([0.6931]))
    """
    if gradient_temperature != 1.0:
        soft = js_divergence(logits_p / gradient_temperature, logits_q / gradient_temperature)
        return js_divergence(logits_p, logits_q).detach() + (soft - soft.detach())
    # Below the bound exp is 0: it only keeps the difference of two infinities out.
    log_p, log_q = logits_p.log_softmax(-1).clamp_min(-1e4), logits_q.log_softmax(-1).clamp_min(-1e4)
    log_m = torch.logaddexp(log_p, log_q) - MAX_INSTABILITY
    divergence = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)
    return divergence.clamp(0.0, MAX_INSTABILITY)


@dataclass(frozen=True)
class Similarity:
    r"""From cosines to logits and probabilities, as a model was trained.

    CLIP has :math:`z_k = scale \cos(f_v, f_t^k)` and a softmax over the labels. SigLIP adds a bias and has one
    probability per label, :math:`sigmoid(z_k)`; they do not add up to 1.

    >>> clip, siglip = Similarity(), Similarity(scale=110.0, bias=-12.0, sigmoid=True)
    >>> clip.probabilities(torch.zeros(1, 2)), siglip.probabilities(torch.zeros(1, 2))
    (tensor([[0.5000, 0.5000]]), tensor([[0.5000, 0.5000]]))
    >>> siglip.logits(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor([[ 98., -12.]])
    """

    scale: float = LOGIT_SCALE
    bias: float = 0.0
    sigmoid: bool = False

    def logits(self, features: Tensor, class_features: Tensor) -> Tensor:
        """Logits ``[..., K]`` of unit features ``[..., D]`` over class features ``[K, D]`` (or ``[..., K, D]``)."""
        scaled = self.scale * features @ class_features.mT
        return scaled + self.bias if self.bias else scaled

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities ``[..., K]``: they add up to 1 over the labels, or with ``sigmoid`` each is its label's own."""
        return logits.sigmoid() if self.sigmoid else logits.softmax(-1)

    def instability(self, logits_p: Tensor, logits_q: Tensor, gradient_temperature: float = 1.0) -> Tensor:
        r"""J of two predictions, in :math:`[0, \ln 2]`: :func:`js_divergence`.

        With ``sigmoid`` every label has two outcomes, :math:`p_k` and :math:`1 - p_k`, and J is the largest divergence
        of any label.

        >>> one, other = torch.tensor([[9.0, -9.0, -9.0]]), torch.tensor([[-9.0, 9.0, -9.0]])
        >>> Similarity(sigmoid=True).instability(one, other)
        tensor([0.6919])
        """
        if not self.sigmoid:
            return js_divergence(logits_p, logits_q, gradient_temperature)
        # sigmoid(z) is the softmax of (z, 0).
        p, q = (torch.stack([logits, torch.zeros_like(logits)], -1) for logits in (logits_p, logits_q))
        return js_divergence(p, q, gradient_temperature).amax(-1)


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
