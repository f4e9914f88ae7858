"""The finetuned methods, each a small configuration: what its inner attack climbs, and what its tower descends.

A method sees a :class:`Batch` and says two things. ``objective`` is what the attack maximises over the pixels, from
the raw features of the attacked images; ``loss`` is what training minimises over the weights. Both give one value per
image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from react_clip.attacks.losses import cross_entropy
from react_clip.errors import ReactClipError
from react_clip.finetune import losses

Tower = Callable[[Tensor], Tensor]
"""From pixels ``[B, 3, S, S]`` to raw features ``[B, D]``."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Clean pixels with what the methods need to judge them; without labels, those that need none still work."""

    student: Tower
    """The tower in training."""
    original: Tower
    """The tower as it was, frozen."""
    clean: Tensor
    labels: Tensor
    class_features: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Zero-shot logits of raw features."""
        return losses.logits(features, self.class_features)

    @cached_property
    def original_clean(self) -> Tensor:
        """Raw features that the original tower gives the clean images; computed once, without gradients."""
        with torch.no_grad():
            return self.original(self.clean)


class Method(Protocol):
    """How an image tower is finetuned."""

    name: ClassVar[str]
    needs_labels: ClassVar[bool]

    def objective(self, batch: Batch) -> Tower:
        """What the inner attack climbs, one value per image, from the raw features of the attacked images."""

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """What training descends, one value per image, from the attacked pixels."""


class _LabelAttacked:
    """Methods whose inner attack climbs the cross-entropy of the true class."""

    needs_labels: ClassVar[bool] = True

    def objective(self, batch: Batch) -> Tower:
        """Cross-entropy of the true class."""
        return lambda features: cross_entropy(batch.logits(features), batch.labels)


@dataclass(frozen=True)
class TeCoA(_LabelAttacked):
    r"""Text-guided contrastive adversarial training (Mao et al., 2023): :math:`\mathrm{CE}(z(x_{adv}), y)`."""

    name: ClassVar[str] = "tecoa"

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """Cross-entropy under attack."""
        return cross_entropy(batch.logits(batch.student(adversarial)), batch.labels)


@dataclass(frozen=True)
class PMGAFT(_LabelAttacked):
    r"""Pre-trained model guided adversarial finetuning (Wang et al., 2024).

    .. math:: \mathrm{CE}(z(x_{adv}), y) + \lambda_c\, \mathrm{KL}(p(x) \,\|\, p(x_{adv}))
        + \lambda_o\, \mathrm{KL}(p_{orig}(x_{adv}) \,\|\, p(x_{adv}))

    with distributions over the classes. Gradients flow through both sides of the clean term, none through the original
    tower.
    """

    name: ClassVar[str] = "pmg-aft"
    clean_weight: float = 1.0
    original_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in asdict(self).items():
            if not 0 <= weight < float("inf"):
                raise ReactClipError(f"{name} is {weight}; a weight of {self.name} is a number from 0 on")

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """Cross-entropy under attack, held near the clean answers and near the original tower's."""
        logits = batch.logits(batch.student(adversarial))
        clean = batch.logits(batch.student(batch.clean))
        with torch.no_grad():
            original = batch.logits(batch.original(adversarial))
        return (
            cross_entropy(logits, batch.labels)
            + self.clean_weight * losses.kl_divergence(clean, logits)
            + self.original_weight * losses.kl_divergence(original, logits)
        )


@dataclass(frozen=True)
class FARE:
    r"""Unsupervised robust embeddings (Schlarmann et al., 2024): :math:`\lVert F(x_{adv}) - F_{orig}(x) \rVert_2^2`.

    Raw features, no labels and no class names; the attack climbs the same distance.
    """

    name: ClassVar[str] = "fare"
    needs_labels: ClassVar[bool] = False

    def objective(self, batch: Batch) -> Tower:
        """The distance from the original clean feature."""
        return lambda features: losses.squared_distance(features, batch.original_clean)

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """The same distance, in the weights."""
        return losses.squared_distance(batch.student(adversarial), batch.original_clean)


@dataclass(frozen=True)
class CLIPFT(_LabelAttacked):
    """CLIP's own contrastive loss on attacked images and the texts of their classes, within the batch.

    This reading is a guess. The paper only says "an adversarially finetuned version of vanilla CLIP obtained using a
    2-step PGD attack with both step size and attack budget 1/255"; its own numbers for the row (60.31 clean, 3.62 under
    attack at 1/255) show almost no robustness. The loss contrasts the images of one batch, so accumulated gradients
    contrast within each part only.
    """

    name: ClassVar[str] = "clip-ft"

    def loss(self, batch: Batch, adversarial: Tensor) -> Tensor:
        """The symmetric contrastive loss under attack."""
        return losses.contrastive(batch.student(adversarial), batch.class_features, batch.labels)


_METHODS: dict[str, type[TeCoA | PMGAFT | FARE | CLIPFT]] = {
    method.name: method for method in (TeCoA, PMGAFT, FARE, CLIPFT)
}


def names() -> list[str]:
    """The methods that :func:`get` knows."""
    return sorted(_METHODS)


def get(name: str, **values: Any) -> Method:
    """A method by name, with its values.

    >>> get("pmg-aft", clean_weight=0.5)
    PMGAFT(clean_weight=0.5, original_weight=1.0)
    """
    if name not in _METHODS:
        raise ReactClipError(f"method {name!r} does not exist; choose one of {', '.join(names())}")
    try:
        return _METHODS[name](**values)
    except TypeError:
        raise ReactClipError(f"method {name!r} has no values {', '.join(values)}; see react_clip.finetune") from None


def to_dict(method: Method) -> dict[str, Any]:
    """Plain values for JSON.

    >>> to_dict(TeCoA())
    {'name': 'tecoa'}
    """
    values: dict[str, Any] = asdict(method)  # type: ignore[call-overload]
    return {"name": method.name, **values}
