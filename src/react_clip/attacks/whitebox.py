"""Gradient attacks on a defended classifier, one per loss: through the correction, around the gate, or both.

All of them are sign-gradient ascent in which every gradient is the sum over ``eot`` fresh draws of the defence's noise.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import linf
from react_clip.attacks import losses, targets
from react_clip.attacks.base import JUDGE_DRAWS, DefendedAttack
from react_clip.attacks.problem import Candidates, Problem, checked_gradient, relay
from react_clip.attacks.targets import Answer, Draw, Passes
from react_clip.config import Count, NonNegative, Positive, PositiveLength
from react_clip.defenses.base import Defense
from react_clip.defenses.react import ReACT
from react_clip.defenses.second_look import SecondLook
from react_clip.errors import ReactClipError


class GradientAttack(DefendedAttack):
    r"""Sign-gradient ascent from uniform starts on an objective of the defended classifier.

    .. math:: x_{k+1} = \Pi\big(x_k + s_k\,\mathrm{sign} \textstyle\sum_{j=1}^{K} \nabla_x\, o(x_k, \eta_{kj})\big),
              \quad s_k = \tfrac{\epsilon}{2} (1 + \cos(\pi k / N))

    A search keeps the iterate whose defended answer is wrong in most of its K draws and, among these, has the largest
    loss. The draws are those of the gradient at that iterate, hence new to it: one lucky draw does not decide. An image
    rests once ten such draws in a row were wrong. Searches (variants, restarts, target classes) take turns on images
    that are still right in one of ten more draws, and their images are compared on these.
    """

    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma")
    """Fields that are part of the name unless they have their default values."""
    steps: Count = 100
    """Gradient steps per search."""
    step_size: PositiveLength | Literal["decaying", "eps/4"] = "decaying"
    """``decaying`` is s_k above; anything else is the same in every step."""
    loss: Literal["ce", "margin", "dlr"] = "ce"
    """Loss of an answer: cross-entropy, margin of the logits, or difference of logits ratio."""
    eot: Count = 4
    """Draws per gradient."""
    restarts: Count = 1
    """Starts of each search."""
    targets: Annotated[int, Field(ge=0)] = 0
    """Searches for one wrong class each, of those that plain CLIP finds most likely; they climb z_t - z_y. With 0 any
    wrong class will do."""
    sigma: Literal["differentiated", "detached"] = "differentiated"
    """The anchor's noise scale depends on the pixels; ``detached`` leaves that out of the gradient."""
    instability_temperature: Positive = 10.0
    """Divides the logits of which the gradient of J is taken; at 1 it vanishes where the answer is clear."""
    checkpoint: bool = True
    """Encode again in the backward pass instead of keeping activations; off is a third faster where memory allows."""
    views: Count | None = None
    """Most anchor views of the copy of the defence that gradients are taken of; all of them by default."""

    @property
    def name(self) -> str:
        """The kind with the number of steps and what differs from the default, such as ``adaptive-both-100-margin``."""
        options = [getattr(self, option) for option in self.name_options]
        named = [option for option in options if option not in _DEFAULT_OPTIONS]
        return "-".join([self.kind, str(self.steps), *named, *(["targeted"] if self.targets else [])])

    @property
    def total_steps(self) -> int:
        """All steps of all searches."""
        return self.steps * self._searches

    @property
    def _searches(self) -> int:
        return len(self.variants()) * self.restarts * max(1, self.targets)

    @abstractmethod
    def objective(self, draw: Draw) -> Tensor:
        """The value ``[B]`` that the attack maximises."""

    def variants(self) -> Sequence[Self]:
        """Attacks with different objectives, of which each has searches of its own."""
        return (self,)

    def loss_of(self, answer: Answer, draw: Draw) -> Tensor:
        """The loss ``[B]`` of an answer: the margin of the target class, if there is one."""
        if draw.targets is None:
            return self.own_loss(answer.logits, draw.labels)
        return losses.target_margin(answer.logits, draw.labels, draw.targets)

    def defended_loss(self, draw: Draw) -> Tensor:
        """The loss ``[B]`` by which iterates are compared."""
        return self.loss_of(draw.defended, draw)

    def both_losses(self, draw: Draw) -> Tensor:
        """``[2, B]``: the losses with the gate closed and open."""
        return torch.stack([self.loss_of(answer, draw) for answer in (draw.closed, draw.opened)])

    def is_wrong(self, draw: Draw) -> Tensor:
        """Mask ``[B]``: whose defended answer is wrong."""
        return draw.defended.logits.argmax(1) != draw.labels

    def search_cost(self, defense: Defense) -> Passes:
        """Gradients at all iterates but the last, an evaluation of the last, the comparison, and the clean features."""
        copy, draws = targets.with_views(defense, self.views), self._searches * self.eot
        gradients = (targets.gradient_passes(copy, self.checkpoint), draws * self.steps)
        comparison = (defense.cost(), JUDGE_DRAWS * self._searches if self._searches > 1 else 0)
        return targets.total(gradients, (targets.draw_passes(copy), draws), comparison, ((1, 0), 1))

    def search(self, problem: Problem) -> Tensor:
        """The best images over all searches."""
        problem.spend((1, 0))
        defended = problem.defended
        features = defended.clf.encoder(problem.x)
        wrong_classes = losses.ranked_targets(defended.clf.logits(features), problem.y, self.targets)

        def attempt(variant: Self, number: int, target: int | None, part: Problem, rows: Tensor) -> Candidates:
            classes = None if target is None else wrong_classes[rows, min(target, wrong_classes.shape[1] - 1)]
            images = variant._climb(part, f"{self.kind} {number}", features[rows], classes)
            if self._searches == 1:
                return Candidates(images, *torch.zeros(2, len(images), device=images.device))
            part.spend(targets.total((defended.defense.cost(), JUDGE_DRAWS)))
            judging = targets.with_own_noise(defended, f"{self.kind} {number} compared")
            return Candidates(images, *targets.judge(judging, images, part.y, JUDGE_DRAWS))

        choices = itertools.product(self.variants(), range(self.restarts), range(self.targets) or [None])
        attempts = [partial(attempt, variant, n, target) for n, (variant, _, target) in enumerate(choices)]
        return relay(problem, Candidates.none(problem.x), attempts).images

    def _climb(self, problem: Problem, label: str, features: Tensor, classes: Tensor | None) -> Tensor:
        """The best iterates of one search, whose random numbers follow from the label."""
        defended = targets.with_own_noise(
            problem.defended,
            label,
            targets.with_views(problem.defended.defense, self.views),
            checkpoint=self.checkpoint,
            detach_sigma=self.sigma == "detached",
            instability_temperature=self.instability_temperature,
        )
        problem = problem.on(problem.target, defended.seed)
        best, images = Candidates.none(problem.x), problem.random_start()
        wrong_in_a_row = torch.zeros_like(problem.y)
        for step in range(self.steps + 1):
            active = (wrong_in_a_row < JUDGE_DRAWS).nonzero().squeeze(1)
            if not len(active):
                break
            part, targeted = problem.take(active), None if classes is None else classes[active]
            take = partial(
                targets.take_draw, defended, labels=part.y, clean_features=features[active], targets=targeted
            )
            candidates, slope = self._evaluate(part, images[active], take, gradient=step < self.steps)
            best = best.put(active, best.take(active).or_better(candidates))
            if step < self.steps:
                images = images.index_copy(0, active, part.ball.step(candidates.images, slope, self._step(part, step)))
                problem.steps.tick()
            wrong_in_a_row[active] = torch.where(candidates.wrong == 1, wrong_in_a_row[active] + self.eot, 0)
        return best.images

    def _evaluate(
        self, problem: Problem, images: Tensor, take: Callable[..., Draw], *, gradient: bool
    ) -> tuple[Candidates, Tensor]:
        """The images with their share of wrong answers over ``eot`` draws, and the gradient summed over these."""
        copy = targets.with_views(problem.defended.defense, self.views)
        passes = targets.gradient_passes(copy, self.checkpoint) if gradient else targets.draw_passes(copy)
        problem.spend(targets.total((passes, self.eot)))
        slope = torch.zeros_like(images)
        wrong, loss = torch.zeros(2, len(images), device=images.device)
        for _ in range(self.eot):
            with torch.set_grad_enabled(gradient):
                pixels = images.detach().requires_grad_(gradient)
                draw = take(pixels=pixels)
                if gradient:
                    slope += checked_gradient(linf.slope(self.objective(draw), pixels), "adaptive-square")
            wrong, loss = wrong + self.is_wrong(draw), loss + self.defended_loss(draw).detach().float()
        return Candidates(images, wrong / self.eot, loss / self.eot), slope

    def _step(self, problem: Problem, step: int) -> Tensor | float:
        if self.step_size == "decaying":
            return problem.ball.eps * (1 + math.cos(math.pi * step / self.steps)) / 2
        return problem.step_size(self.step_size)


_DEFAULT_OPTIONS = {"ce", "differentiated", "mean", "plain"}


class Through(GradientAttack):
    r"""The loss of the corrected answer, as if the gate were open: :math:`o = \ell(z_{open}(x), y)`.

    >>> Through(eps=4/255, steps=10).name
    'adaptive-through-10'
    """

    kind: ClassVar[str] = "adaptive-through"

    def objective(self, draw: Draw) -> Tensor:
        """The loss of the corrected answer."""
        return self.loss_of(draw.opened, draw)

    def obstacle(self, defense: Defense) -> str:
        """It needs a correction."""
        corrects = isinstance(defense, ReACT | SecondLook)
        return "" if corrects else f"{defense.name} has no anchor correction to see through"


class Both(GradientAttack):
    r"""Plain and corrected answer at once, so that the gate does not matter.

    .. math:: o = \mathrm{mean} \text{ or } \max \text{ or } \min \{\ell(z_{closed}, y),\ \ell(z_{open}, y)\}

    ``min`` works on whichever of the two has the smaller loss.

    >>> Both(combine="min").name
    'adaptive-both-100-min'
    """

    kind: ClassVar[str] = "adaptive-both"
    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma", "combine")
    combine: Literal["mean", "max", "min"] = "mean"
    """Maximise the mean, the larger or the smaller of the two losses."""

    def objective(self, draw: Draw) -> Tensor:
        """Both losses combined."""
        pair = self.both_losses(draw)
        return {"mean": pair.mean(0), "max": pair.amax(0), "min": pair.amin(0)}[self.combine]


class Evade(GradientAttack):
    r"""Fool the plain answer and keep the gate shut.

    .. math:: o = \ell(z_{closed}, y) - \lambda\,\mathrm{relu}(s(x) - \tau + m)

    Each :math:`\lambda` is a search of its own, and the best image of all is returned. ``on="both"`` puts the mean of
    both losses into the first term.

    >>> Evade(lambdas=(1.0, 10.0)).total_steps
    200
    """

    kind: ClassVar[str] = "adaptive-evade"
    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma", "on")
    lambdas: tuple[Positive, ...] = (1.0, 10.0, 100.0)
    """Weights of the penalty, one search each."""
    margin: NonNegative = 0.05
    """m, how far below the threshold the score must be to cost nothing."""
    on: Literal["plain", "both"] = "plain"
    """Answers to fool: the plain one, or the mean over the plain and the corrected one."""

    def __post_init__(self) -> None:
        if not self.lambdas:
            raise ReactClipError("lambdas is empty; give at least one number > 0, such as [1, 10]")

    def variants(self) -> Sequence[Self]:
        """One for each lambda."""
        return [self.replace(lambdas=(weight,)) for weight in self.lambdas]

    def objective(self, draw: Draw) -> Tensor:
        """The loss less the penalty for a score near or above the threshold."""
        pair = self.both_losses(draw)
        fooled = pair[0] if self.on == "plain" else pair.mean(0)
        return fooled - self.lambdas[0] * torch.relu(draw.score - draw.threshold + self.margin)

    def obstacle(self, defense: Defense) -> str:
        """It needs a gate."""
        gated = isinstance(defense, SecondLook) or (isinstance(defense, ReACT) and defense.tau is not None)
        return "" if gated else f"{defense.name} has no gate to keep shut"


class BPDA(GradientAttack):
    r"""The defended answer itself: the hard gate in the forward pass, a soft one in the backward pass.

    .. math:: z = z_{closed} + g\,(z_{open} - z_{closed}), \quad g = 1[s \ge \tau], \quad
              \partial g := \partial\, \mathrm{sigmoid}((s - \tau) / T)

    For a defence without gradients those of undefended CLIP are used (BPDA with the identity).

    >>> BPDA(targets=3).name
    'adaptive-bpda-100-targeted'
    """

    kind: ClassVar[str] = "adaptive-bpda"
    temperature: Positive = 0.1
    """Temperature T of the soft gate; a smaller one is closer to the hard gate."""

    def objective(self, draw: Draw) -> Tensor:
        """The loss of the defended answer through the soft gate."""
        logits, closed, opened = draw.defended.logits, draw.closed.logits, draw.opened.logits
        if bool(draw.threshold.isfinite().all()):
            soft = torch.sigmoid((draw.score - draw.threshold) / self.temperature)
            gate = (draw.score >= draw.threshold).to(soft.dtype) + (soft - soft.detach())
            logits = closed + gate[:, None] * (opened - closed)
        return self.loss_of(Answer(draw.defended.features, logits), draw)


class Feature(GradientAttack):
    r"""Without labels: move the plain and the corrected feature away from the clean one.

    .. math:: o = 2 - \cos(f_{closed}(x'), f(x)) - \cos(f_{open}(x'), f(x))

    >>> Feature(steps=10).name
    'adaptive-feature-10'
    """

    kind: ClassVar[str] = "adaptive-feature"

    def objective(self, draw: Draw) -> Tensor:
        """The sum of both distances."""
        return _distance(draw.closed, draw) + _distance(draw.opened, draw)

    def defended_loss(self, draw: Draw) -> Tensor:
        """The distance of the defended feature."""
        return _distance(draw.defended, draw)

    def is_wrong(self, draw: Draw) -> Tensor:
        """Never: without labels it is not known."""
        return torch.zeros_like(draw.labels, dtype=torch.bool)


def _distance(answer: Answer, draw: Draw) -> Tensor:
    """``[B]``: one minus the cosine of the features and the clean ones."""
    return 1.0 - F.cosine_similarity(answer.features, draw.clean_features)
