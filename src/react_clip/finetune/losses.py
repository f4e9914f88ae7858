"""The losses of the finetuned methods: pure functions, one value per image.

``logits`` are ``[B, K]``, features ``[B, D]``, ``labels`` ``[B]`` class indices. Cross-entropy is the attacks' own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional


def kl_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(p \,\|\, q) = \sum_k p_k (\log p_k - \log q_k)` of two softmaxes, p first.

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([0.])
    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.1201])
    """
    log_p, log_q = F.log_softmax(target_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def squared_distance(features: Tensor, targets: Tensor) -> Tensor:
    r"""Squared distance :math:`\lVert F - F' \rVert_2^2` of raw features.

    >>> squared_distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([25.])
    """
    return (features - targets).square().sum(dim=-1)


def contrastive(features: Tensor, class_features: Tensor, labels: Tensor) -> Tensor:
    r"""CLIP's symmetric contrastive loss within a batch; all samples of a class are positives of one another.

    With unit image features :math:`f_i`, text features :math:`t_{y_j}`, :math:`S_{ij} = 100 f_i \cdot t_{y_j}` and
    :math:`P_i = \{j : y_j = y_i\}`:

    .. math::
        \ell_i = -\frac{1}{2 |P_i|} \sum_{j \in P_i}
            \Big(\log \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} + \log \frac{e^{S_{ji}}}{\sum_k e^{S_{ki}}}\Big)

    Two images and their two texts, each pair aligned and orthogonal to the other; then the same label twice:

    >>> contrastive(torch.eye(2), torch.eye(2), torch.tensor([0, 1])).abs().max()
    tensor(0.)
    >>> contrastive(torch.ones(2, 1), torch.ones(1, 1), torch.tensor([0, 0]))
    tensor([0.6931, 0.6931])
    """
    scores = functional.logits(functional.normalize(features), class_features[labels])
    positives = torch.eq(labels[:, None], labels[None, :]).to(scores.dtype)
    positives = positives / positives.sum(dim=1, keepdim=True)
    to_text, to_image = F.log_softmax(scores, dim=1), F.log_softmax(scores, dim=0).T
    return -0.5 * (positives * (to_text + to_image)).sum(dim=1)


def logits(features: Tensor, class_features: Tensor) -> Tensor:
    r"""Zero-shot logits :math:`100 \cos(F, t_k)` of raw features.

    >>> logits(torch.tensor([[2.0, 0.0]]), torch.eye(2))
    tensor([[100.,   0.]])
    """
    return functional.logits(functional.normalize(features), class_features)
