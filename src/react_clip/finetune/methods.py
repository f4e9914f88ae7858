"""The finetuning methods: the objective of their inner attack, the loss of their training, and their optimiser.

``logits`` are ``[B, K]``, features ``[B, D]``, ``labels`` class indices ``[B]``; every loss is one value per image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import functional
from react_clip.attacks.losses import cross_entropy
from react_clip.config import NonNegative, Registered, Registry
from react_clip.finetune.optimiser import Optimiser

Tower = Callable[[Tensor], Tensor]
"""From pixels ``[B, 3, S, S]`` to raw features ``[B, D]``."""
Objective = Callable[[Tensor], Tensor]
"""From raw features ``[B, D]`` to one value per image ``[B]``."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Clean pixels with everything that the losses need; methods without labels ignore labels and class features."""

    student: Tower
    """The tower in training."""
    original: Tower
    """The tower before training, frozen."""
    clean: Tensor
    labels: Tensor
    class_features: Tensor
    photos: int
    """Photos of the whole step, of which these are all or a part."""

    def cosines(self, features: Tensor) -> Tensor:
        r"""Cosines :math:`\cos(F, t_k)` of raw features with the class features."""
        return functional.normalize(features) @ self.class_features.T

    def logits(self, features: Tensor) -> Tensor:
        r"""Zero-shot logits :math:`100 \cos(F, t_k)` of raw features."""
        return functional.logits(functional.normalize(features), self.class_features)

    @cached_property
    def original_clean(self) -> Tensor:
        """Raw features of the clean images in the original tower, without gradients."""
        with torch.no_grad():
            return self.original(self.clean)


class Method(Registered, ABC):
    """Base class of the finetuning methods: two objectives on one batch."""

    registry: ClassVar[Registry[Method]] = Registry("method")
    needs_labels: ClassVar[bool] = True
    optimiser: Optimiser

    def objective(self, batch: Batch) -> Objective:
        """The function that the inner attack maximises: by default the cross-entropy of the true class."""
        return lambda features: cross_entropy(batch.logits(features), batch.labels)

    @abstractmethod
    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """The loss ``[B]`` that training minimises, from the attacked pixels ``[B, 3, S, S]``."""

    def loss_of_equal_answers(self, classes: int) -> float:
        """The loss of a tower that gives all classes the same probability; infinite where it is not known."""
        return math.inf


class TeCoA(Method):
    r"""Text-guided contrastive adversarial training (Mao et al., 2023): :math:`\mathrm{CE}(z(x_{adv}), y)`."""

    kind = "tecoa"
    colour = "#7F7FD5"
    # The released script has 1e-7 as its default; 1e-5 is the rate of later work in batches of 256.
    optimiser: Optimiser = Optimiser("sgd", lr=1e-5)

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """Cross-entropy of the attacked images."""
        return cross_entropy(batch.logits(batch.student(adversarial)), batch.labels)

    def loss_of_equal_answers(self, classes: int) -> float:
        """The logarithm of the number of classes."""
        return math.log(classes)


class PMGAFT(Method):
    r"""Pre-trained model guided adversarial finetuning (Wang et al., 2024).

    .. math:: \frac1N \sum_i \mathrm{CE}(c(x_i^{adv}), y_i)
        + \lambda_c \sum_i \mathrm{KL}(p(x_i) \,\|\, p(x_i^{adv}))
        + \lambda_o \sum_i \mathrm{KL}(p_{orig}(x_i^{adv}) \,\|\, p(x_i^{adv}))

    over the N photos of a step: as in the released code the cross-entropy is averaged and the divergences are summed,
    and all of them, and the inner attack, take the plain cosines c as logits, not 100 times these. Gradients flow
    through both sides of the clean term, but not through the original tower.
    """

    kind = "pmg-aft"
    label = "PMG-AFT"
    colour = "#5E8C31"
    clean_weight: NonNegative = 1.0
    original_weight: NonNegative = 1.0
    optimiser: Optimiser = Optimiser("sgd", lr=5e-5)

    def objective(self, batch: Batch) -> Objective:
        """Cross-entropy of the true class, from plain cosines."""
        return lambda features: cross_entropy(batch.cosines(features), batch.labels)

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """Cross-entropy of the attacked images, plus divergences from the clean and from the original answers."""
        attacked = batch.cosines(batch.student(adversarial))
        clean = batch.cosines(batch.student(batch.clean))
        with torch.no_grad():
            original = batch.cosines(batch.original(adversarial))
        divergence = self.clean_weight * kl_divergence(clean, attacked)
        divergence = divergence + self.original_weight * kl_divergence(original, attacked)
        # The mean over a step's photos is taken later, which makes this a sum.
        return cross_entropy(attacked, batch.labels) + batch.photos * divergence


class FARE(Method):
    r"""Unsupervised robust embeddings (Schlarmann et al., 2024): :math:`\lVert F(x_{adv}) - F_{orig}(x) \rVert_2^2`.

    Raw features, no labels and no class names; the inner attack maximises the same distance. The released attack has a
    momentum of 0.9, but it takes the sign of every gradient before and of the sum after, which is the sign of the last
    gradient; so it has no effect, and there is none here.
    """

    kind = "fare"
    colour = "#6F4FA8"
    needs_labels = False
    optimiser: Optimiser = Optimiser("adamw", lr=1e-5, weight_decay=1e-4)

    def objective(self, batch: Batch) -> Objective:
        """The squared distance from the original clean features."""
        return lambda features: (features - batch.original_clean).square().sum(dim=-1)

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """The squared distance from the original clean features."""
        return self.objective(batch)(batch.student(adversarial))


class CLIPFT(Method):
    """CLIP's own contrastive loss on attacked images and the texts of their classes, within the batch.

    This reading is a guess. The paper only says "an adversarially finetuned version of vanilla CLIP obtained using a
    2-step PGD attack with both step size and attack budget 1/255"; its own numbers for the row (60.31 clean, 3.62 under
    attack at 1/255) show almost no robustness. The loss contrasts the images of one batch, so accumulated gradients
    contrast within each part only.
    """

    kind = "clip-ft"
    label = "CLIP-FT"
    colour = "#A6604A"
    optimiser: Optimiser = Optimiser("adamw", lr=1e-5, weight_decay=1e-4)

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """The symmetric contrastive loss of the attacked images."""
        return contrastive(batch.student(adversarial), batch.class_features, batch.labels)


def kl_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    r"""Divergence :math:`\mathrm{KL}(p \,\|\, q) = \sum_k p_k (\log p_k - \log q_k)` of two softmaxes, p first.

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.1201])
    """
    log_p, log_q = F.log_softmax(target_logits, dim=-1), F.log_softmax(logits, dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def contrastive(features: Tensor, class_features: Tensor, labels: Tensor) -> Tensor:
    r"""CLIP's symmetric contrastive loss within a batch; all samples of a class are positives of one another.

    With unit image features :math:`f_i`, text features :math:`t_{y_j}`, :math:`S_{ij} = 100 f_i \cdot t_{y_j}` and
    :math:`P_i = \{j : y_j = y_i\}`:

    .. math::
        \ell_i = -\frac{1}{2 |P_i|} \sum_{j \in P_i}
            \Big(\log \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} + \log \frac{e^{S_{ji}}}{\sum_k e^{S_{ki}}}\Big)

    >>> contrastive(torch.ones(2, 1), torch.ones(1, 1), torch.tensor([0, 0]))
    tensor([0.6931, 0.6931])
    """
    scores = functional.logits(functional.normalize(features), class_features[labels])
    positives = torch.eq(labels[:, None], labels[None, :]).to(scores.dtype)
    positives = positives / positives.sum(dim=1, keepdim=True)
    to_text, to_image = F.log_softmax(scores, dim=1), F.log_softmax(scores, dim=0).T
    return -0.5 * (positives * (to_text + to_image)).sum(dim=1)


def names() -> list[str]:
    """The kinds that :func:`get` knows."""
    return Method.registry.names()


def get(kind: str, **values: Any) -> Method:
    """A method by its kind, with its fields.

    >>> get("tecoa").optimiser
    Optimiser(algorithm=sgd, lr=1e-05, weight_decay=0.0, momentum=0.9)
    """
    return Method.registry.read({"kind": kind, **values})
