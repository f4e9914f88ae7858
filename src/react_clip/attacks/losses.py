"""Losses that attacks climb: one value per image, larger is worse for the model.

``logits`` is ``[B, K]``, ``labels`` and ``targets`` are ``[B]`` class indices. Callers sum over the batch before taking
gradients, so that the gradient of an image does not shrink with the number of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits ``[B, K]`` and labels ``[B]`` to one value per image ``[B]``."""

_TINY = 1e-12


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Cross-entropy :math:`-\log \mathrm{softmax}(z)_y`.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])
    """
    return F.cross_entropy(logits, labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Margin :math:`\max_{j \ne y} z_j - z_y`, positive once another class wins: the loss of "C&W-10".

    >>> margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
    tensor([-1.])
    """
    return _best_other(logits, labels) - _pick(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Difference of logits ratio :math:`(\max_{j \ne y} z_j - z_y) / (z_{\pi_1} - z_{\pi_3})`.

    :math:`\pi` sorts the logits, largest first. Neither a shift nor a scale of the logits changes the value. Two
    classes have no third logit, and dividing by :math:`z_{\pi_1} - z_{\pi_2}` would leave a constant :math:`\pm 1`
    without a gradient: there it is the plain margin.

    >>> dlr(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]))
    tensor([-0.5000])
    >>> dlr(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))
    tensor([-2.])
    """
    return margin(logits, labels) / _spread(logits, depth=3)


def dlr_targeted(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    r"""Targeted DLR :math:`(z_t - z_y) / (z_{\pi_1} - \tfrac12 (z_{\pi_3} + z_{\pi_4}))`.

    With three classes the denominator is :math:`z_{\pi_1} - z_{\pi_3}`, with two it is 1, as in :func:`dlr`.

    >>> dlr_targeted(torch.tensor([[4.0, 1.0, 3.0, 0.0]]), torch.tensor([0]), torch.tensor([1]))
    tensor([-0.8571])
    """
    return target_margin(logits, labels, targets) / _spread(logits, depth=4)


def target_margin(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    r"""Margin of one class :math:`z_t - z_y`.

    >>> target_margin(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), torch.tensor([2]))
    tensor([-1.])
    """
    return _pick(logits, targets) - _pick(logits, labels)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}
"""Losses by the names that the field ``loss`` of an attack takes."""


def ranked_targets(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """The ``min(count, K - 1)`` strongest wrong classes of each image, strongest first: ``[B, T]``.

    >>> ranked_targets(torch.tensor([[4.0, 1.0, 3.0, 0.0]]), torch.tensor([0]), count=9)
    tensor([[2, 1, 3]])
    """
    order = logits.argsort(dim=1, descending=True, stable=True)
    wrong = order[order != labels[:, None]].reshape(len(logits), logits.shape[1] - 1)
    return wrong[:, :count]


def _pick(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


def _best_other(logits: Tensor, labels: Tensor) -> Tensor:
    own = F.one_hot(labels, logits.shape[1]).bool()
    return logits.masked_fill(own, -torch.inf).amax(dim=1)


def _spread(logits: Tensor, depth: int) -> Tensor:
    """DLR's denominator: the top logit minus the mean of the third to ``depth``-th, as far as there are classes."""
    if logits.shape[1] < 3:
        return torch.ones_like(logits[:, 0])
    top = logits.topk(min(depth, logits.shape[1]), dim=1).values
    return top[:, 0] - top[:, 2:].mean(dim=1) + _TINY
