"""What all adaptive attacks share: a config object that is called on (clf, defense, x, y)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from react_clip import noise
from react_clip.adaptive.pipeline import Pipeline, Price, Tally, sketch
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import Problem, Progress, Steps, budgets, check_images, check_labels
from react_clip.config import PixelLength, Registered, Registry
from react_clip.defenses.base import Defense, Priced, derived_seed
from react_clip.encoders.base import Gradients
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

JUDGE_DRAWS = 10
"""Fresh draws that decide what an attack achieved; none of them is one that it optimised on."""


@dataclass(frozen=True)
class AdaptiveResult:
    """What an adaptive attack hands back; every field has one entry per image."""

    images: Tensor
    """``[B, C, H, W]`` fp32 in [0, 1], within eps of the input."""
    success: Tensor
    """``[B]`` bool: the defended answer is wrong in more than half of the judging draws."""
    broken: Tensor
    """``[B]``: share of the judging draws in which it is wrong."""
    loss: Tensor
    """``[B]``: mean margin over the judging draws."""
    queries: Tensor
    """``[B]`` int64: encoder forward passes, those of the defence, of recomputing and of judging included, at most."""
    backward: Tensor
    """``[B]`` int64: encoder backward passes at most."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """For a suite: the share of broken draws of each member's images, by its name."""


@dataclass(frozen=True, eq=False)
class Crafted:
    """Adversarial images before they are judged, and what they cost."""

    images: Tensor
    forward: Tensor
    backward: Tensor


@dataclass(frozen=True, eq=False)
class Target:
    """Whom to attack, with what budget, under which seed."""

    clf: ZeroShotClassifier
    defense: Defense
    x: Tensor
    y: Tensor
    eps: Tensor  # [B, 1, 1, 1]
    seed: noise.Seed
    steps: Steps
    passes: Price
    """Encoder passes the defence needs for an image, at most."""

    def pipeline(self, label: str, how: Gradients | None = None, views: int | None = None) -> Pipeline:
        """The defended classifier with noise of its own, or the attacker's copy of it with fewer anchor views."""
        return Pipeline(self.clf, sketch(self.defense, views), derived_seed(self.seed, label), how)

    def problem(self, label: str) -> Problem:
        """Balls and random starts."""
        keys = noise.stream_keys(self.x, derived_seed(self.seed, label))
        rows, queries = torch.arange(len(self.x), device=self.x.device), torch.zeros_like(self.y)
        return Problem(self.clf, self.x, self.y, self.eps, keys, rows, queries, self.steps)

    def judge(self, images: Tensor) -> Tally:
        """How images fare on draws that no attack optimises on; the same draws for all who ask."""
        return self.pipeline("judge").judge(images, self.y, margin, JUDGE_DRAWS)

    def only(self, rows: Tensor) -> Target:
        """The same with some of the images."""
        return replace(self, x=self.x[rows], y=self.y[rows], eps=self.eps[rows])

    def everyone(self, price: Price, times: int = 1) -> tuple[Tensor, Tensor]:
        """The same passes for every image."""
        forward, backward = (torch.full_like(self.y, count * times) for count in price)
        return forward, backward


class AdaptiveAttack(Registered, ABC):
    """A configuration; call it on a classifier, its defence, images and labels. Its repr is the log line.

    All randomness comes from the seed and the images. Noise is drawn anew for every step, from seeds that no
    evaluation draws from (see :func:`~react_clip.defenses.base.derived_seed`).
    """

    registry: ClassVar[Registry[AdaptiveAttack]] = Registry("adaptive attack")
    eps: PixelLength = 4 / 255

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for tables, such as ``adaptive-both-20``."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps at most, for progress bars."""

    @abstractmethod
    def craft(self, target: Target) -> Crafted:
        """Look for adversarial images within the target's balls."""

    @abstractmethod
    def price(self, defense: Defense, passes: Price) -> Price:
        """Encoder passes of one image at most, without judging; ``passes`` are those of the defence."""

    def obstacle(self, defense: Defense) -> str:
        """Why this attack makes no sense on a defence; empty where it does.

        >>> from react_clip.adaptive import Evade
        >>> from react_clip.defenses import AOM
        >>> Evade().obstacle(AOM())
        'aom has no gate to keep shut'
        """
        del defense
        return ""

    def cost(self, defense: Defense, passes: Price) -> Price:
        """Encoder passes of one image at most, judging included."""
        forward, backward = self.price(defense, passes)
        return forward + JUDGE_DRAWS * passes[0], backward + JUDGE_DRAWS * passes[1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        clf: ZeroShotClassifier,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        *,
        seed: noise.Seed = 0,
        eps: Tensor | float | None = None,
        progress: Progress | None = None,
    ) -> AdaptiveResult:
        """Attack ``[B, C, H, W]`` pixels in [0, 1] with labels ``[B]`` through the defence.

        ``eps`` overrides the configured budget, with one number or a ``[B]`` tensor.
        """
        check_images(x)
        check_labels(y, len(x))
        if reason := self.obstacle(defense):
            raise ReactClipError(f"{self.name} cannot be used here: {reason}; choose another attack")
        radius = budgets(self.eps if eps is None else eps, x)
        pixels, labels = x.detach().float().clone(), y.detach().to(x.device, torch.int64, copy=True)
        if not len(x):
            none = torch.zeros(0, device=x.device)
            return AdaptiveResult(pixels, none.bool(), none, none, none.long(), none.long())
        steps, passes = Steps(self.total_steps, progress), defense_passes(clf, defense, pixels[:1])
        target = Target(clf, defense, pixels, labels, radius, derived_seed(seed, "attack"), steps, passes)
        result = self._judged(target)
        steps.finish()
        return result

    def _judged(self, target: Target) -> AdaptiveResult:
        """What the attack found, on fresh draws."""
        crafted, (forward, backward) = self.craft(target), target.everyone(target.passes, JUDGE_DRAWS)
        tally = target.judge(crafted.images)
        return as_result(crafted.images, tally, crafted.forward + forward, crafted.backward + backward)


def as_result(
    images: Tensor, tally: Tally, forward: Tensor, backward: Tensor, parts: dict[str, Tensor] | None = None
) -> AdaptiveResult:
    """Judged images as a result."""
    return AdaptiveResult(images, tally.broken > 0.5, tally.broken, tally.loss, forward, backward, parts or {})


def defense_passes(clf: ZeroShotClassifier, defense: Defense, example: Tensor) -> Price:
    """Passes the defence says it needs at most, or what one that does not say needs on an example."""
    if isinstance(defense, Priced):
        return defense.cost()
    found = defense(clf, example)
    return int(found.passes.max()), int(found.backward_passes.max())


def names() -> list[str]:
    """The kinds that :func:`from_dict` knows.

    >>> names()[:3]
    ['adaptive-both', 'adaptive-bpda', 'adaptive-evade']
    """
    return AdaptiveAttack.registry.names()


def from_dict(config: Mapping[str, Any]) -> AdaptiveAttack:
    """An adaptive attack from plain values, as a recipe file holds them.

    >>> from_dict({"kind": "adaptive-both", "eps": "8/255", "eot": 2})
    Both(eps=8/255, steps=20, step_size=eps/4, loss=ce, eot=2, sigma=differentiated, checkpoint=True, combine=mean)
    """
    return AdaptiveAttack.registry.read(config)
