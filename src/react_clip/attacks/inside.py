"""Attacks that give another attack something else to raise: a distance of features, or one fixed class."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip.attacks.base import Attack, check_inner
from react_clip.attacks.pgd import PGD
from react_clip.attacks.problem import Model, Problem
from react_clip.config import Whole
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier


class Raising(Attack):
    """Another attack on two classes, of which the second leads by a value ``[n]`` of the images."""

    by: Attack = PGD(steps=100)
    """The attack that raises the value, such as ``{kind: apgd}``; the budget is that of the whole."""

    def __post_init__(self) -> None:
        check_inner(self, self.by)

    @property
    def members(self) -> tuple[Attack, ...]:
        """The attack inside."""
        return (self.by,)

    @abstractmethod
    def value(self, problem: Problem) -> Model:
        """The value as a function of images."""

    def search(self, problem: Problem) -> Tensor:
        """The images of the attack inside."""
        return self.by.search(problem.raising(self.value(problem)))


class LabelFree(Raising):
    r"""Lower the cosine between the features of the attacked and of the original image, without labels or classes.

    .. math:: \max_{x'} \; -\cos(f(x'), f(x)), \quad\text{or}\quad
              \max_{x'} \; -\tfrac1P \textstyle\sum_p \cos(f_p(x'), f_p(x))

    over the P patch tokens that the tower has before it projects (VEAttack, 2025). Different here: VEAttack starts at
    the image itself and keeps a momentum of signs.

    >>> LabelFree().name, LabelFree(features="patches").name
    ('label-free-pgd-100', 'patch-tokens-pgd-100')
    """

    kind: ClassVar[str] = "label-free"
    features: Literal["image", "patches"] = "image"
    """The feature of the image, or those of its patches."""

    @property
    def name(self) -> str:
        """``label-free-apgd-ce-100``, or ``patch-tokens-pgd-100``."""
        return f"{self.kind if self.features == 'image' else 'patch-tokens'}-{self.by.name}"

    def value(self, problem: Problem) -> Model:
        """Minus the cosine, less 2: below 0 everywhere, so that no image counts as broken before the last step."""
        clf = problem.target
        if not isinstance(clf, ZeroShotClassifier):
            raise ReactClipError(f"{self.name} attacks features; give a ZeroShotClassifier, not a {type(clf).__name__}")
        encode = clf.encoder if self.features == "image" else clf.encoder.patch_tokens
        with problem.counted(), torch.no_grad():
            clean = encode(problem.x)
        return lambda x: -2.0 - F.cosine_similarity(encode(x), clean, dim=-1).reshape(len(clean), -1).mean(1)


class Targeted(Raising):
    r"""Raise the log-odds of a fixed class :math:`t`, :math:`z_t - \log\sum_{j \ne t} e^{z_j}`.

    In sign steps that is targeted cross-entropy: :math:`\log p_t` grows with the log-odds. An image counts as broken,
    for attacks that then leave it alone, once :math:`p_t > 1/2`. As in every table, accuracy is that of the true label.

    >>> Targeted(target_class=3).name
    'targeted-3-pgd-100'
    """

    kind: ClassVar[str] = "targeted"
    target_class: Whole = 0
    """Index of the class that the attacker wants."""

    @property
    def name(self) -> str:
        """``targeted-0-pgd-100``: the class and the attack inside."""
        return f"{self.kind}-{self.target_class}-{self.by.name}"

    def value(self, problem: Problem) -> Model:
        """The log-odds of the class."""
        t = self.target_class

        def odds(images: Tensor) -> Tensor:
            logits = problem.target(images)
            if t >= logits.shape[1]:
                raise ReactClipError(f"target_class is {t}, but the model has only classes 0 to {logits.shape[1] - 1}")
            return logits[:, t] - torch.cat([logits[:, :t], logits[:, t + 1 :]], 1).logsumexp(1)

        return odds
