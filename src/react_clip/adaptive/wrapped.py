"""Known attacks turned on the whole pipeline: Square, AutoAttack's ``rand``, and images made for another model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from react_clip.adaptive.base import AdaptiveAttack, AdaptiveResult, Crafted, Target
from react_clip.adaptive.pipeline import Pipeline, Price, Tally, gradient_price, sketch, sketch_passes
from react_clip.attacks import APGD, PGD, Attack, Square
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import Progress, Steps
from react_clip.config import Count
from react_clip.defenses.base import Defense, as_module, derived_seed
from react_clip.noise import Seed
from react_clip.zeroshot import ZeroShotClassifier


class Queries(AdaptiveAttack):
    """Square on the defended classifier, without gradients; every query is the mean of ``eot`` fresh answers.

    >>> Queries(queries=500).name
    'adaptive-square-500'
    """

    kind = "adaptive-square"
    queries: Count = 1000
    eot: Count = 4

    @property
    def name(self) -> str:
        """``adaptive-square-1000``."""
        return f"{self.kind}-{self.queries}"

    @property
    def total_steps(self) -> int:
        """One query each."""
        return self.queries

    def price(self, defense: Defense, passes: Price) -> Price:
        """The queries, the clean and the last answer."""
        del defense
        times = (self.queries + 2) * self.eot
        return times * passes[0], times * passes[1]

    def craft(self, target: Target) -> Crafted:
        """One run of Square."""
        model = _averaged(target.pipeline(self.kind), self.eot)
        found = Square(queries=self.queries)(
            model,
            target.x,
            target.y,
            seed=derived_seed(target.seed, self.kind),
            eps=_flat(target),
            progress=_ticks(target),
        )
        forward, backward = (found.queries * self.eot * count for count in target.passes)
        return Crafted(found.images, forward, backward)


class Rand(AdaptiveAttack):
    """AutoAttack's ``rand`` on the defended classifier: APGD-CE and APGD-DLR, gradients averaged over ``eot`` draws.

    Whether an image still stands is asked of the mean of ``eot`` answers, not of one; the defaults are AutoAttack's.

    >>> Rand().name
    'adaptive-rand-100'
    """

    kind = "adaptive-rand"
    steps: Count = 100
    eot: Count = 20
    checkpoint: bool = True
    views: Count | None = None
    """Most anchor views of the copy of the defence that gradients are taken of; all of them by default."""

    @property
    def name(self) -> str:
        """``adaptive-rand-100``."""
        return f"{self.kind}-{self.steps}"

    @property
    def total_steps(self) -> int:
        """Those of both members."""
        return 2 * self.steps

    def price(self, defense: Defense, passes: Price) -> Price:
        """For each member a gradient at the start and after every step, the clean and the last answer, and a look."""
        gradients = 2 * self.eot * (self.steps + 1)
        step = gradient_price(defense, sketch_passes(defense, self.views, passes), self.checkpoint)
        forward, backward = (gradients * a + 6 * self.eot * b for a, b in zip(step, passes, strict=True))
        return forward, backward

    def craft(self, target: Target) -> Crafted:
        """Both members on every image; the worse of the two counts."""
        members = (APGD(loss="ce", steps=self.steps, eot=self.eot), APGD(loss="dlr", steps=self.steps, eot=self.eot))
        best, kept = target.x, Tally(*torch.full((2, len(target.x)), -torch.inf, device=target.x.device))
        copied = sketch_passes(target.defense, self.views, target.passes)
        step = gradient_price(target.defense, copied, self.checkpoint)
        forward, backward = torch.zeros(2, len(target.x), dtype=torch.int64, device=target.x.device)
        for member in members:
            label = f"{self.kind} {member.name}"
            found = member(
                self._model(target, label),
                target.x,
                target.y,
                seed=derived_seed(target.seed, label),
                eps=_flat(target),
                progress=_ticks(target),
            )
            tally = target.pipeline(f"{label} chosen").judge(found.images, target.y, margin, self.eot)
            better = tally.beats(kept)
            best, kept = torch.where(better[:, None, None, None], found.images, best), kept.where(better, tally)
            # Two of the queries are means without gradients, and so is the comparison; the others are one draw each.
            forward = forward + (found.queries - 2) * step[0] + 3 * self.eot * target.passes[0]
            backward = backward + (found.queries - 2) * step[1] + 3 * self.eot * target.passes[1]
        return Crafted(best, forward, backward)

    def _model(self, target: Target, label: str) -> Callable[[Tensor], Tensor]:
        """One draw where a gradient is wanted (APGD averages those), the mean of several where an answer is."""
        seed = derived_seed(target.seed, label)
        module = as_module(
            target.clf,
            sketch(target.defense, self.views),
            seed=seed,
            differentiable=True,
            checkpoint=self.checkpoint,
            fresh=True,
        )
        answer = _averaged(target.pipeline(f"{label} answers"), self.eot)
        return lambda pixels: module(pixels) if pixels.requires_grad else answer(pixels)


class Transfer(AdaptiveAttack):
    """Images made for another classifier and replayed: PGD on ``source``, or on undefended CLIP itself.

    On CLIP itself this is what an attacker does who does not know the defence, so that a suite with it is never weaker.

    >>> Transfer(steps=10).price(None, (14, 0))  # whatever the defence costs
    (11, 10)
    """

    kind = "adaptive-transfer"
    steps: Count = 20

    @property
    def name(self) -> str:
        """``adaptive-transfer-20``."""
        return f"{self.kind}-{self.steps}"

    @property
    def total_steps(self) -> int:
        """One gradient each."""
        return self.steps

    def price(self, defense: Defense, passes: Price) -> Price:
        """PGD on a plain classifier."""
        del defense, passes
        return self.steps + 1, self.steps

    def craft(self, target: Target) -> Crafted:
        """PGD on undefended CLIP."""
        return self._craft_on(target.clf, target)

    def from_source(
        self,
        source: ZeroShotClassifier,
        clf: ZeroShotClassifier,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        *,
        seed: Seed = 0,
        progress: Progress | None = None,
    ) -> AdaptiveResult:
        """Craft on ``source`` (the same classes on another encoder), judge on the defended ``clf``."""
        return _Sourced(self.eps, self.steps, source)(clf, defense, x, y, seed=seed, progress=progress)

    def _craft_on(self, source: ZeroShotClassifier, target: Target) -> Crafted:
        seed = derived_seed(target.seed, self.kind)
        attack: Attack = PGD(steps=self.steps, step_size="eps/4")
        found = attack(source, target.x, target.y, seed=seed, eps=_flat(target), progress=_ticks(target))
        return Crafted(found.images, found.queries, torch.full_like(found.queries, self.steps))


class _Sourced(Transfer):
    """A transfer attack that holds its source, which no recipe can."""

    source: ZeroShotClassifier | None = None

    def craft(self, target: Target) -> Crafted:
        """PGD on the source."""
        return self._craft_on(self.source or target.clf, target)


def _averaged(pipeline: Pipeline, draws: int) -> Callable[[Tensor], Tensor]:
    """Mean logits over fresh draws."""

    def model(pixels: Tensor) -> Tensor:
        total = pipeline.answer(pixels)
        for _ in range(draws - 1):
            total = total + pipeline.answer(pixels)
        return total / draws

    return model


def _flat(target: Target) -> Tensor:
    return target.eps.flatten()


def _ticks(target: Target) -> Progress:
    """The steps of an inner attack, told as steps of the outer one."""
    steps: Steps = target.steps
    start = steps.done

    def told(done: int, total: int) -> None:
        del total
        while steps.done < start + done:
            steps.tick()

    return told
