"""Gradient attacks on a defended classifier, one per loss: through the correction, around the gate, or both.

All of them are sign-gradient ascent in which every gradient is the sum over ``eot`` fresh draws of the defence's noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import linf
from react_clip.attacks import targets
from react_clip.attacks.base import DefendedAttack
from react_clip.attacks.problem import Candidates, Problem, checked_gradient
from react_clip.attacks.targets import Answer, Draw, Passes
from react_clip.config import Count, NonNegative, Positive, PositiveLength
from react_clip.defenses.base import DefendedModule, Defense
from react_clip.defenses.react import ReACT
from react_clip.defenses.second_look import SecondLook
from react_clip.errors import ReactClipError


class GradientAttack(DefendedAttack):
    r"""Sign-gradient ascent from a uniform start on an objective of the defended classifier.

    .. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign} \textstyle\sum_{j=1}^{K} \nabla_x\, o(x_k, \eta_{kj})\big)

    Returns the iterate whose defended answer is wrong in most of its K draws and, among these, has the largest loss.
    The draws are those of the gradient at that iterate, hence new to it: one lucky draw neither stops the attack nor
    decides its result.
    """

    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma")
    """Fields that are part of the name unless they have their default values."""
    steps: Count = 20
    step_size: PositiveLength | Literal["eps/4"] = "eps/4"
    loss: Literal["ce", "margin", "dlr"] = "ce"
    eot: Count = 4
    """Draws per gradient."""
    sigma: Literal["differentiated", "detached"] = "differentiated"
    """The anchor's noise scale depends on the pixels; ``detached`` leaves that out of the gradient."""
    checkpoint: bool = True
    """Encode again in the backward pass instead of keeping activations; off is a third faster where memory allows."""
    views: Count | None = None
    """Most anchor views of the copy of the defence that gradients are taken of; all of them by default."""

    @property
    def name(self) -> str:
        """The kind with the number of steps and what differs from the default, such as ``adaptive-both-20-margin``."""
        options = [getattr(self, option) for option in self.name_options]
        return "-".join([self.kind, str(self.steps), *(o for o in options if o not in _DEFAULT_OPTIONS)])

    @property
    def total_steps(self) -> int:
        """All steps of all variants."""
        return self.steps * len(self.variants())

    @abstractmethod
    def objective(self, draw: Draw) -> Tensor:
        """The value ``[B]`` that the attack maximises."""

    def variants(self) -> Sequence[Self]:
        """Attacks with one search each, whose best candidates are returned."""
        return (self,)

    def defended_loss(self, draw: Draw) -> Tensor:
        """The loss ``[B]`` by which iterates are compared."""
        return self.own_loss(draw.defended.logits, draw.labels)

    def both_losses(self, draw: Draw) -> Tensor:
        """``[2, B]``: the losses with the gate closed and open."""
        return torch.stack([self.own_loss(answer.logits, draw.labels) for answer in (draw.closed, draw.opened)])

    def is_wrong(self, draw: Draw) -> Tensor:
        """Mask ``[B]``: whose defended answer is wrong."""
        return draw.defended.logits.argmax(1) != draw.labels

    def search_cost(self, defense: Defense) -> Passes:
        """Gradients at every iterate but the last, one evaluation of the last, and the clean features."""
        copy, draws = targets.with_views(defense, self.views), len(self.variants()) * self.eot
        gradients = (targets.gradient_passes(copy, self.checkpoint), draws * self.steps)
        return targets.total(gradients, (targets.draw_passes(copy), draws), ((1, 0), 1))

    def search(self, problem: Problem) -> Tensor:
        """The best images over all variants."""
        defended, best = problem.defended, Candidates.none(problem.x)
        problem.spend(self.search_cost(defended.defense))
        clean_features = defended.clf.encoder(problem.x)
        copy = targets.with_views(defended.defense, self.views)
        options = {"checkpoint": self.checkpoint, "detach_sigma": self.sigma == "detached"}
        for number, variant in enumerate(self.variants()):
            noisy = targets.with_own_noise(defended, f"{self.kind} {number}", copy, **options)
            best = best.or_better(variant._climb(problem.on(problem.target, noisy.seed), noisy, clean_features))
        return best.images

    def _climb(self, problem: Problem, defended: DefendedModule, clean_features: Tensor) -> Candidates:
        """The best iterate of one search."""

        def evaluate(images: Tensor, *, gradient: bool) -> tuple[Candidates, Tensor]:
            """The images with their share of wrong answers over ``eot`` draws, and the gradient summed over these."""
            slope = torch.zeros_like(images)
            wrong, loss = torch.zeros(2, len(images), device=images.device)
            for _ in range(self.eot):
                with torch.set_grad_enabled(gradient):
                    pixels = images.detach().requires_grad_(gradient)
                    draw = targets.take_draw(defended, pixels, problem.y, clean_features)
                    if gradient:
                        slope += checked_gradient(linf.slope(self.objective(draw), pixels), "adaptive-square")
                wrong, loss = wrong + self.is_wrong(draw), loss + self.defended_loss(draw).detach().float()
            return Candidates(images, wrong / self.eot, loss / self.eot), slope

        best, images = Candidates.none(problem.x), problem.random_start()
        step_size = problem.step_size(self.step_size)
        for _ in range(self.steps):
            candidates, slope = evaluate(images, gradient=True)
            best, images = best.or_better(candidates), problem.ball.step(images, slope, step_size)
            problem.steps.tick()
        return best.or_better(evaluate(images, gradient=False)[0])


_DEFAULT_OPTIONS = {"ce", "differentiated", "mean", "plain"}


class Through(GradientAttack):
    r"""The loss of the corrected answer, as if the gate were open: :math:`o = \ell(z_{open}(x), y)`.

    >>> Through(eps=4/255, steps=10).name
    'adaptive-through-10'
    """

    kind: ClassVar[str] = "adaptive-through"

    def objective(self, draw: Draw) -> Tensor:
        """The loss of the corrected answer."""
        return self.own_loss(draw.opened.logits, draw.labels)

    def obstacle(self, defense: Defense) -> str:
        """It needs a correction."""
        corrects = isinstance(defense, ReACT | SecondLook)
        return "" if corrects else f"{defense.name} has no anchor correction to see through"


class Both(GradientAttack):
    r"""Plain and corrected answer at once, so that the gate does not matter.

    .. math:: o = \mathrm{mean} \text{ or } \max \text{ or } \min \{\ell(z_{closed}, y),\ \ell(z_{open}, y)\}

    ``min`` works on whichever of the two has the smaller loss.

    >>> Both(combine="min").name
    'adaptive-both-20-min'
    """

    kind: ClassVar[str] = "adaptive-both"
    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma", "combine")
    combine: Literal["mean", "max", "min"] = "mean"

    def objective(self, draw: Draw) -> Tensor:
        """Both losses combined."""
        pair = self.both_losses(draw)
        return {"mean": pair.mean(0), "max": pair.amax(0), "min": pair.amin(0)}[self.combine]


class Evade(GradientAttack):
    r"""Fool the plain answer and keep the gate shut.

    .. math:: o = \ell(z_{closed}, y) - \lambda\,\mathrm{relu}(s(x) - \tau + m)

    Each :math:`\lambda` is a search of its own, and the best image of all is returned. ``on="both"`` puts the mean of
    both losses into the first term, ``instability=False`` keeps J out of the gradient (it is still part of the score).

    >>> Evade(lambdas=(1.0, 10.0)).total_steps
    40
    """

    kind: ClassVar[str] = "adaptive-evade"
    name_options: ClassVar[tuple[str, ...]] = ("loss", "sigma", "on")
    lambdas: tuple[Positive, ...] = (1.0, 10.0, 100.0)
    margin: NonNegative = 0.05
    on: Literal["plain", "both"] = "plain"
    instability: bool = True

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
        score = draw.score if self.instability else draw.drift + (draw.score - draw.drift).detach()
        return fooled - self.lambdas[0] * torch.relu(score - draw.threshold + self.margin)

    def obstacle(self, defense: Defense) -> str:
        """It needs a gate."""
        gated = isinstance(defense, SecondLook) or (isinstance(defense, ReACT) and defense.tau is not None)
        return "" if gated else f"{defense.name} has no gate to keep shut"


class BPDA(GradientAttack):
    r"""The defended answer itself: the hard gate in the forward pass, a soft one in the backward pass.

    .. math:: z = z_{closed} + g\,(z_{open} - z_{closed}), \quad g = 1[s \ge \tau], \quad
              \partial g := \partial\, \mathrm{sigmoid}((s - \tau) / T)

    For a defence without gradients those of undefended CLIP are used (BPDA with the identity).

    >>> BPDA(temperature=0.05)
    BPDA(eps=4/255, steps=20, step_size=eps/4, loss=ce, eot=4, sigma=differentiated, checkpoint=True, temperature=0.05)
    """

    kind: ClassVar[str] = "adaptive-bpda"
    temperature: Positive = 0.1

    def objective(self, draw: Draw) -> Tensor:
        """The loss of the defended answer through the soft gate."""
        logits, closed, opened = draw.defended.logits, draw.closed.logits, draw.opened.logits
        if bool(draw.threshold.isfinite().all()):
            soft = torch.sigmoid((draw.score - draw.threshold) / self.temperature)
            gate = (draw.score >= draw.threshold).to(soft.dtype) + (soft - soft.detach())
            logits = closed + gate[:, None] * (opened - closed)
        return self.own_loss(logits, draw.labels)


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
