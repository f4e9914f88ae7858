"""The finetuning methods: what their inner attack maximises, the loss that training minimises, and their optimiser.

Features ``F`` are raw, ``[B, D]``; labels are class indices ``[B]``; class features ``t`` are unit vectors ``[K, D]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional
from react_clip.errors import ReactClipError

Tower = Callable[[Tensor], Tensor]
"""From pixels ``[B, 3, S, S]`` to raw features ``[B, D]``."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Clean photos with everything that the losses need."""

    student: Tower
    """The tower in training."""
    original: Tower
    """The tower before training, frozen."""
    pixels: Tensor
    labels: Tensor
    class_features: Tensor

    @cached_property
    def original_clean(self) -> Tensor:
        """Raw features of the clean photos in the original tower."""
        with torch.no_grad():
            return self.original(self.pixels)

    def quarter(self) -> Batch:
        """Every fourth photo, with what is known of them."""
        part = Batch(self.student, self.original, self.pixels[::4], self.labels[::4], self.class_features)
        part.__dict__["original_clean"] = self.original_clean[::4]
        return part


@dataclass(frozen=True)
class Method:
    """Two functions and an optimiser."""

    objective: Callable[[Batch, Tensor], Tensor]
    """What the attack maximises, one value per photo, from the raw features of the attacked photos."""
    loss: Callable[[Batch, Tensor], Tensor]
    """What training minimises, one number, from the attacked pixels."""
    needs_labels: bool
    optimiser: Callable[..., torch.optim.Optimizer]
    """From the weights, ``lr`` and ``fused``."""
    lr: float
    """Largest learning rate by default."""
    longest_gradient: float = math.inf
    """Length to which longer gradients are cut."""
    splits: bool = True
    """The loss is a mean over the photos, so that several processes can share a batch."""


def cosines(features: Tensor, batch: Batch) -> Tensor:
    r"""Cosines :math:`\cos(F, t_k)`, ``[B, K]``."""
    return functional.normalize(features) @ batch.class_features.T


def fare(batch: Batch, attacked: Tensor) -> Tensor:
    r"""Unsupervised robust embeddings (Schlarmann et al., 2024): :math:`\lVert F(x_{adv}) - F_{orig}(x) \rVert_2^2`.

    The released attack has a momentum of 0.9, but it takes the sign of every gradient before and of the sum after,
    which is the sign of the last gradient; so it has no effect, and there is none here.
    """
    return distance(batch, batch.student(attacked)).mean()


def tecoa(batch: Batch, attacked: Tensor) -> Tensor:
    r"""Text-guided contrastive adversarial training (Mao et al., 2023): :math:`\mathrm{CE}(100 \cos, y)`."""
    return wrong_answer(batch, batch.student(attacked)).mean()


def pmg_aft(batch: Batch, attacked: Tensor) -> Tensor:
    r"""Pre-trained model guided adversarial finetuning (Wang et al., 2024).

    .. math:: \frac1N \sum_i \mathrm{CE}(c(x_i^{adv}), y_i) + \sum_i \mathrm{KL}(p(x_i) \,\|\, p(x_i^{adv}))
        + \sum_i \mathrm{KL}(p_{orig}(x_i^{adv}) \,\|\, p(x_i^{adv}))

    As in the released code the cross-entropy is averaged and the divergences are summed, and all of them, and the
    attack, take the plain cosines c as logits, not 100 times these.
    """
    logits = cosines(batch.student(attacked), batch)
    clean = cosines(batch.student(batch.pixels), batch)
    with torch.no_grad():
        original = cosines(batch.original(attacked), batch)
    return F.cross_entropy(logits, batch.labels) + divergence(clean, logits) + divergence(original, logits)


def clip_ft(batch: Batch, attacked: Tensor) -> Tensor:
    r"""CLIP's contrastive loss on attacked photos and the texts of their classes; photos of a class belong together.

    With :math:`S_{ij} = 100 \cos(F_i, t_{y_j})` and :math:`P_i = \{j : y_j = y_i\}`:

    .. math::
        -\frac{1}{2B} \sum_i \frac{1}{|P_i|} \sum_{j \in P_i}
            \Big(\log \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} + \log \frac{e^{S_{ji}}}{\sum_k e^{S_{ki}}}\Big)

    The ReACT paper says no more than "an adversarially finetuned version of vanilla CLIP obtained using a 2-step PGD
    attack with both step size and attack budget 1/255"; this is one reading of it.
    """
    scores = 100 * cosines(batch.student(attacked), batch)[:, batch.labels]
    positives = torch.eq(batch.labels[:, None], batch.labels[None, :]).to(scores.dtype)
    positives = positives / positives.sum(dim=1, keepdim=True)
    both = F.log_softmax(scores, dim=1) + F.log_softmax(scores, dim=0).T
    return -0.5 * (positives * both).sum(dim=1).mean()


def distance(batch: Batch, features: Tensor) -> Tensor:
    """Squared distance from the clean photos' features in the original tower, ``[B]``."""
    return (features - batch.original_clean).square().sum(dim=-1)


def wrong_answer(batch: Batch, features: Tensor) -> Tensor:
    """Cross-entropy of the true class at CLIP's scale of 100, ``[B]``."""
    return F.cross_entropy(100 * cosines(features, batch), batch.labels, reduction="none")


def wrong_cosine(batch: Batch, features: Tensor) -> Tensor:
    """Cross-entropy of the true class with plain cosines as logits, ``[B]``."""
    return F.cross_entropy(cosines(features, batch), batch.labels, reduction="none")


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    r"""Sum over the photos of :math:`\mathrm{KL}(p \,\|\, q)`, p from the target's logits.

    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor(0.1201)
    """
    return F.kl_div(F.log_softmax(logits, -1), F.log_softmax(target, -1), reduction="sum", log_target=True)


_SGD = partial(torch.optim.SGD, momentum=0.9)
_ADAMW = partial(torch.optim.AdamW, weight_decay=1e-4)

METHODS = {
    "clip-ft": Method(wrong_answer, clip_ft, True, _ADAMW, lr=1e-5, splits=False),
    # Published with a rate of 1e-5 and betas of 0.9 and 0.999, for 20,000 steps; this is the recipe of short runs.
    "fare": Method(distance, fare, False, partial(_ADAMW, betas=(0.9, 0.95)), lr=5e-5, longest_gradient=20.0),
    "pmg-aft": Method(wrong_cosine, pmg_aft, True, _SGD, lr=5e-5, splits=False),
    # The released script has 1e-7 as its default; 1e-5 is the rate of later work in batches of 256.
    "tecoa": Method(wrong_answer, tecoa, True, _SGD, lr=1e-5),
}


def names() -> list[str]:
    """Names of the methods."""
    return list(METHODS)


def get(name: str) -> Method:
    """A method by its name."""
    if name not in METHODS:
        raise ReactClipError(f"method {name!r} does not exist; choose one of {', '.join(METHODS)}")
    return METHODS[name]
