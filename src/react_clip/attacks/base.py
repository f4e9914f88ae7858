"""Base classes of all attacks and the result that they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.losses import LOSSES
from react_clip.attacks.problem import Candidates, Problem, Progress, Steps, budgets, check_images, check_labels
from react_clip.attacks.targets import Model, Passes, Target, judge, total, with_own_noise
from react_clip.config import PixelLength, Registered, Registry
from react_clip.defenses.base import DefendedModule, Defense, derived_seed
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

OBLIVIOUS, TRANSFER, ADAPTIVE = "oblivious", "transfer", "adaptive"
"""Threat models: the attacker knows CLIP but not the defence; only another model; CLIP and the defence."""

JUDGE_DRAWS = 10
"""Draws of the noise that decide whether an attack on a defence succeeded; no attack optimises on them."""


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Adversarial images and how the target answers them; every field has one entry per image.

    A plain model is judged by one more answer on ``images``; if it is random, that answer is a fresh draw. A defended
    classifier is judged by 10 fresh draws of the defence's noise.
    """

    images: Tensor
    """``[B, C, H, W]`` fp32 in [0, 1], within eps of the input."""
    success: Tensor
    """``[B]`` bool: more than half of the judging answers are wrong."""
    loss: Tensor
    """``[B]`` fp32: the attack's own loss, or for a defended classifier the mean margin, over the judging answers."""
    queries: Tensor
    """``[B]`` int64: encoder forward passes, judging included; for a defended classifier an upper bound."""
    backward: Tensor
    """``[B]`` int64: encoder backward passes, likewise."""
    broken: Tensor
    """``[B]`` fp32: share of the judging answers that are wrong."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """For a suite: ``broken`` of each member's images by the member's name; NaN where it was not run."""


class Attack(Registered, ABC):
    """A configuration; call it on a target, images and labels. Its repr is the log line.

    The target is any map from [0, 1] pixels to logits (put it in eval mode). Gradients are taken with respect to the
    pixels only; neither the target's parameters nor ``x`` change. All randomness comes from streams keyed by an image's
    pixels and the seed, so no result depends on the batch an image sits in.
    """

    registry: ClassVar[Registry[Attack]] = Registry("attack", "react_clip.attacks")
    threats: ClassVar[tuple[str, ...]] = (OBLIVIOUS, TRANSFER)
    """Threat models in which the attack can be used."""
    natural: ClassVar[bool] = False
    """True for damage that nobody intends: an evaluation applies it to all images, and it has no budget."""
    eps: PixelLength = 4 / 255
    """Budget: the largest change of a pixel value."""

    @property
    def name(self) -> str:
        """Short name for tables, such as ``square-5000``."""
        return f"{self.kind}-{self._length}"

    @property
    def total_steps(self) -> int:
        """Most steps of a call, for progress bars."""
        return self._length

    @property
    def _length(self) -> int:
        """The field ``steps`` or ``queries``."""
        return int(getattr(self, "steps", getattr(self, "queries", 1)))

    @abstractmethod
    def search(self, problem: Problem) -> Tensor:
        """The best adversarial images ``[B, C, H, W]`` inside the problem's balls."""

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss ``[B]`` in the result: the one that the field ``loss`` names, or the margin."""
        return LOSSES[getattr(self, "loss", "margin")](logits, labels)

    def target(self, clf: ZeroShotClassifier, defense: Defense) -> Model:
        """The target to pass to the attack: the plain classifier, or the classifier behind the defence."""
        return clf

    def obstacle(self, defense: Defense) -> str:
        """The reason why the attack makes no sense on a defence; empty where it does.

        >>> from react_clip.attacks import Evade
        >>> from react_clip.defenses import AOM
        >>> Evade().obstacle(AOM())
        'aom has no gate to keep shut'
        """
        return ""

    def members_for(self, defense: Defense) -> tuple[Attack, ...]:
        """For a suite, the members that make sense on a defence."""
        return ()

    def cost(self, defense: Defense) -> Passes:
        """Most encoder passes, forward and backward, for one image, judging included.

        >>> from react_clip.attacks import PGD
        >>> from react_clip.defenses import ReACT
        >>> PGD(steps=10).cost(ReACT())  # PGD does not run the defence
        (11, 10)
        """
        # An image that cannot be broken costs the same at every budget.
        return _counted_cost(self.replace(eps=4 / 255))

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        target: Model,
        x: Tensor,
        y: Tensor,
        *,
        seed: noise.Seed = 0,
        eps: Tensor | float | None = None,
        progress: Progress | None = None,
    ) -> AttackResult:
        """Attack ``[B, C, H, W]`` pixels in [0, 1] with labels ``[B]``.

        ``eps`` overrides the configured budget, with one number or a ``[B]`` tensor. ``progress(done_steps,
        total_steps)`` is called once per step; where images break early it jumps to the end.
        """
        check_images(x)
        check_labels(y, len(x))
        radius = budgets(self.eps if eps is None else eps, x)
        # Copies, so that the result never shares memory with the input and inference tensors can be differentiated.
        pixels, labels = x.detach().float().clone(), y.detach().to(x.device, torch.int64, copy=True)
        if len(x) == 0:
            empty = torch.zeros(0, device=x.device)
            return AttackResult(pixels, empty.bool(), empty, empty.long(), empty.long(), empty)
        defended = self._defended(target, seed)
        problem = Problem(
            Target(target, target),
            defended,
            linf.Ball(pixels, radius),
            labels,
            keys=noise.stream_keys(pixels, seed if defended is None else defended.seed),
            rows=torch.arange(len(x), device=x.device),
            spent=torch.zeros(2, len(x), dtype=torch.int64, device=x.device),
            steps=Steps(self.total_steps, progress),
        )
        best, parts = self.run(problem)
        problem.steps.tick(max(0, problem.steps.total - problem.steps.done))
        forward, backward = problem.spent
        return AttackResult(best.images, best.wrong > 0.5, best.loss.float(), forward, backward, best.wrong, parts)

    def run(self, problem: Problem) -> tuple[Candidates, dict[str, Tensor]]:
        """Search, then judge the images; also returns the ``parts`` of the result."""
        images = self.search(problem)
        return self._judged(problem, images), {}

    def _judged(self, problem: Problem, images: Tensor) -> Candidates:
        logits = problem.logits(images)
        return Candidates(images, (logits.argmax(1) != problem.y).float(), self.own_loss(logits, problem.y))

    def _defended(self, target: Model, seed: noise.Seed) -> DefendedModule | None:
        """The target as a classifier behind a defence, for attacks that know the defence."""
        return None


class DefendedAttack(Attack):
    """An attack that knows the defence; its target is ``rc.as_module(clf, defense)``.

    Every step draws new noise, from seeds that no evaluation uses (:func:`~react_clip.defenses.base.derived_seed`).
    """

    threats: ClassVar[tuple[str, ...]] = (ADAPTIVE,)

    @abstractmethod
    def search_cost(self, defense: Defense) -> Passes:
        """Most encoder passes for one image without judging."""

    def cost(self, defense: Defense) -> Passes:
        """Most encoder passes for one image, judging included."""
        return total((self.search_cost(defense), 1), (defense.cost(), JUDGE_DRAWS))

    def target(self, clf: ZeroShotClassifier, defense: Defense) -> Model:
        """The defended classifier."""
        return DefendedModule(clf, defense)

    def _defended(self, target: Model, seed: noise.Seed) -> DefendedModule | None:
        if not isinstance(target, DefendedModule):
            raise ReactClipError(
                f"the target is a {type(target).__name__}, but an attack that knows the defence needs one; give "
                "rc.as_module(clf, defense)"
            )
        if reason := self.obstacle(target.defense):
            raise ReactClipError(f"{self.name} cannot be used here: {reason}; choose another attack")
        return DefendedModule(target.clf, target.defense, seed=derived_seed(seed, "attack"))

    def _judged(self, problem: Problem, images: Tensor) -> Candidates:
        problem.spend(total((problem.defended.defense.cost(), JUDGE_DRAWS)))
        return Candidates(images, *judge(with_own_noise(problem.defended, "judge"), images, problem.y, JUDGE_DRAWS))


@cache
def _counted_cost(attack: Attack) -> Passes:
    """Passes for one image of a tiny model that nothing can break."""

    def unbreakable(images: Tensor) -> Tensor:
        wrong = images.flatten(1).sum(1, keepdim=True) * 1e-6 * torch.arange(10.0)
        return torch.cat([wrong[:, :1] + 1.0, wrong[:, 1:]], dim=1)

    result = attack(unbreakable, torch.full((1, 3, 4, 4), 0.5), torch.tensor([0]))
    return int(result.queries), int(result.backward)


def names(threat: str | None = None) -> list[str]:
    """The kinds that :func:`from_dict` knows; only those for a threat model if one is given.

    >>> names("oblivious")
    ['apgd', 'autoattack', 'corruption', 'cw', 'fab', 'pgd', 'square']
    """
    kinds = Attack.registry.names()
    return kinds if threat is None else [kind for kind in kinds if threat in Attack.registry.get(kind).threats]


def from_dict(config: Mapping[str, Any] | str) -> Attack:
    """An attack from plain values, as a recipe file holds them; lengths may be written ``"4/255"``.

    >>> from_dict({"kind": "pgd", "eps": "8/255", "steps": 20})
    PGD(eps=8/255, steps=20, step_size=1/255, loss=ce, random_start=True, margin=0.0)
    """
    return Attack.registry.read(config)
