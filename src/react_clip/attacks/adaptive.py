"""Gradient attacks on a defended classifier: through the correction, around the gate, or both."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import linf
from react_clip.attacks.defended import JUDGE_DRAWS, DefendedAttack, Draws, defended_answer
from react_clip.attacks.losses import cross_entropy, ranked_targets, target_margin
from react_clip.attacks.problem import Candidates, Problem, run_in_turn
from react_clip.config import Count, NonNegative, Positive
from react_clip.defenses.base import DefendedModule, Forced
from react_clip.defenses.batch import Gradients, straight_through

_INSTABILITY_TEMPERATURE = 10.0
"""Divides the logits of which the gradient of J is taken; at 1 it vanishes where the answer is clear."""


@dataclass(frozen=True, eq=False)
class Aim:
    """Labels, clean features and target classes of the images of one search."""

    labels: Tensor
    """``[n]``"""
    features: Tensor
    """Plain features ``[n, D]`` of the images before the attack."""
    targets: Tensor | None = None
    """Class ``[n]`` that a targeted search wants as the answer."""

    def take(self, rows: Tensor) -> Aim:
        """The aims of some of the images."""
        return Aim(self.labels[rows], self.features[rows], None if self.targets is None else self.targets[rows])

    def loss(self, logits: Tensor) -> Tensor:
        """The loss ``[n]`` of logits: cross-entropy, or the margin of the target class if there is one."""
        if self.targets is None:
            return cross_entropy(logits, self.labels)
        return target_margin(logits, self.labels, self.targets)


class Adaptive(DefendedAttack):
    r"""Sign-gradient ascent from uniform starts on an objective of the defended classifier.

    .. math:: x_{k+1} = \Pi\big(x_k + s_k\,\mathrm{sign} \textstyle\sum_{j=1}^{K} \nabla_x\, o(x_k, \eta_{kj})\big),
              \quad s_k = \tfrac{\epsilon}{2} (1 + \cos(\pi k / N))

    =========== =======================================================================================
    objective   o
    =========== =======================================================================================
    ``through`` :math:`\ell(z_{open})`: the corrected answer, as if the gate were open
    ``both``    :math:`\tfrac12 (\ell(z_{closed}) + \ell(z_{open}))`, so that the gate does not matter
    ``evade``   :math:`\ell(z_{closed}) - \lambda\,\mathrm{relu}(s - \tau + m)`: fool the plain answer and keep the
                gate shut; each :math:`\lambda` is a search of its own
    ``bpda``    :math:`\ell(z_{closed} + g\,(z_{open} - z_{closed}))` with the hard gate
                :math:`g = 1[s \ge \tau]`, whose gradient is that of :math:`\mathrm{sigmoid}((s - \tau) / T)`
    ``joint``   the mean of the losses of ``both`` and of ``bpda``: the plain path, the views and the gate at once
    ``feature`` as ``both``, with :math:`\ell = 1 - \cos(f_{def}, f)`: away from the clean feature f, without labels
    =========== =======================================================================================

    A search keeps the iterate whose defended answer is wrong in most of its K draws and, among these, has the largest
    loss; iterates are rounded to 8 bits for both. The draws are those of the gradient at that iterate, hence new to it:
    one lucky draw does not decide. An image rests once ten such draws in a row were wrong. Searches (lambdas, target
    classes) take turns on images that are still right in one of ten more draws, and are compared on these.

    >>> Adaptive(objective="evade", steps=10).name
    'adaptive-evade-10'
    """

    kind: ClassVar[str] = "adaptive"
    objective: Literal["through", "both", "evade", "bpda", "joint", "feature"] = "both"
    """The quantity that the attack maximises."""
    steps: Count = 100
    """Gradient steps per search."""
    eot: Count = 4
    """Draws of the noise per gradient."""
    targets: Annotated[int, Field(ge=0)] = 0
    """Searches for one wrong class each, of those that plain CLIP finds most likely; they climb z_t - z_y. With 0 any
    wrong class will do."""
    checkpoint: bool = True
    """Encode again in the backward pass instead of keeping activations; off is a third faster where memory allows."""
    views: Count | None = None
    """Most views of the copy of the defence that gradients are taken of; all of them by default."""
    lambdas: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0, 10.0, 100.0)
    """Weights of the penalty of ``evade``, one search each."""
    margin: NonNegative = 0.05
    """m of ``evade``, how far below the threshold the score must be to cost nothing."""
    temperature: Positive = 0.1
    """Temperature T of the soft gate of ``bpda``; a smaller one is closer to the hard gate."""

    @property
    def name(self) -> str:
        """The objective with the number of steps: ``adaptive-both-100``, ``adaptive-bpda-100-targeted``."""
        return f"{self.kind}-{self.objective}-{self.steps}" + ("-targeted" if self.targets else "")

    def why_not(self, module: DefendedModule) -> str:
        """To evade a gate there must be one."""
        if self.objective != "evade":
            return ""
        size = module.clf.encoder.image_size
        grey = torch.full((1, 3, size, size), 0.5, device=module.clf.device)
        with torch.no_grad():
            gate = Draws(module, "gate").forced(grey).gate
        return "" if bool(gate.margin.isfinite().all()) else f"{module.defense.name} has no gate to keep shut"

    def search(self, problem: Problem) -> Tensor:
        """The best images over all searches."""
        clf = problem.defended.clf
        with problem.counted(), torch.no_grad():
            features = clf.encoder(problem.x)
        wrong_classes = ranked_targets(clf.logits(features), problem.y, self.targets)
        weights = self.lambdas if self.objective == "evade" else (0.0,)
        choices = list(itertools.product(weights, range(self.targets) or [None]))

        def attempt(number: int, part: Problem, rows: Tensor) -> Candidates:
            (weight, target), label = choices[number], f"{self.kind} {self.objective} {number}"
            classes = None if target is None else wrong_classes[rows, min(target, wrong_classes.shape[1] - 1)]
            images = self._climb(part, label, Aim(part.y, features[rows], classes), weight)
            return Draws(problem.defended, f"{label} compared").judge(part, images)

        attempts = [partial(attempt, number) for number in range(len(choices))]
        return run_in_turn(problem, Candidates.none(problem.x), attempts).images

    def _climb(
        self, problem: Problem, label: str, aim: Aim, weight: float = 0.0, start: Tensor | None = None
    ) -> Tensor:
        """The best iterates of one search, whose random numbers follow from the label."""
        how = Gradients(self.checkpoint, instability_temperature=_INSTABILITY_TEMPERATURE)
        draws = Draws(problem.defended, label, views=self.views, how=how)
        problem = problem.on(problem.target, draws.seed)
        best, images = Candidates.none(problem.x), problem.random_start() if start is None else start
        wrong_in_a_row = torch.zeros_like(problem.y)
        for step in range(self.steps):
            active = (wrong_in_a_row < JUDGE_DRAWS).nonzero().squeeze(1)
            if not len(active):
                break
            part = problem.take(active)
            # At the image that a file would hold; rounding counts as the identity for the gradient.
            rounded = part.ball.on_8_bits(images[active])
            found, gradient = self._evaluate(part, rounded, draws, aim.take(active), weight)
            best = best.put(active, best.take(active).or_better(found))
            size = part.ball.eps * (1 + math.cos(math.pi * step / self.steps)) / 2
            images = images.index_copy(0, active, part.ball.step(images[active], gradient, size))
            wrong_in_a_row[active] = torch.where(found.wrong == 1, wrong_in_a_row[active] + self.eot, 0)
            problem.tick()
        return best.images

    def _evaluate(
        self, problem: Problem, images: Tensor, draws: Draws, aim: Aim, weight: float
    ) -> tuple[Candidates, Tensor]:
        """The images with their fraction of wrong answers over ``eot`` draws, and the gradient summed over these."""
        gradient = torch.zeros_like(images)
        wrong, loss = torch.zeros(2, len(images), device=images.device)
        with problem.counted():
            for _ in range(self.eot):
                with torch.enable_grad():
                    pixels = images.detach().requires_grad_()
                    draw = draws.forced(pixels)
                    value = self.value(draw, aim, weight)
                    gradient += problem.checked(linf.gradient(value, pixels), "adaptive-square")
                logits, features = defended_answer(draw)
                if self.objective != "feature":  # which knows no labels
                    wrong = wrong + (logits.argmax(1) != aim.labels)
                loss = loss + self._loss(logits, features, aim).detach().float()
        return Candidates(images, wrong / self.eot, loss / self.eot), gradient

    def value(self, draw: Forced, aim: Aim, weight: float) -> Tensor:
        """The objective ``[n]``; ``weight`` is the lambda of ``evade``."""
        closed, opened = (self._loss(answer.logits, answer.features, aim) for answer in (draw.closed, draw.opened))
        margin = draw.gate.margin
        gateless = not bool(margin.isfinite().all())
        if self.objective in ("both", "feature") or (self.objective == "joint" and gateless):
            return (closed + opened) / 2
        if self.objective == "evade":
            return closed - weight * torch.relu(margin + self.margin)
        if self.objective == "through" or gateless:  # or bpda
            return opened
        soft = torch.sigmoid(margin / self.temperature)
        gate = straight_through((margin >= 0).to(soft.dtype), soft)[:, None]
        decided = aim.loss(draw.closed.logits + gate * (draw.opened.logits - draw.closed.logits))
        return decided if self.objective == "bpda" else (closed + opened + decided) / 3

    def _loss(self, logits: Tensor, features: Tensor, aim: Aim) -> Tensor:
        """The loss ``[n]`` of an answer."""
        return 1.0 - F.cosine_similarity(features, aim.features) if self.objective == "feature" else aim.loss(logits)
