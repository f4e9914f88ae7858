"""The loop behind every gradient attack on a defended classifier: PGD with fresh noise and an honest memory."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from react_clip.adaptive.base import AdaptiveAttack, Crafted, Target
from react_clip.adaptive.pipeline import Look, Pipeline, Price, Tally, gradient_price, look_price, sketch_passes
from react_clip.attacks.losses import Loss, cross_entropy, dlr, margin
from react_clip.attacks.problem import Problem
from react_clip.config import Count, PositiveLength
from react_clip.defenses.base import Defense
from react_clip.encoders.base import Gradients
from react_clip.errors import ReactClipError

LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}
_QUARTER = "eps/4"


@dataclass(frozen=True, eq=False)
class Scene:
    """What an objective may know beside a look."""

    y: Tensor
    clean: Tensor
    """Plain features of the clean images."""


class GradientAttack(AdaptiveAttack):
    r"""Sign ascent from a uniform start on an objective of the pipeline, averaged over ``eot`` draws a step.

    .. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign} \textstyle\sum_{j=1}^{K} \nabla_x\, o(x_k, \eta_{kj})\big)

    Of all iterates the one counts whose *defended* answer is wrong in most of its K draws and, among these, by the
    largest loss. Its draws are the ones of the gradient taken there, hence new to that iterate: one lucky draw neither
    stops the attack nor makes its result.
    """

    steps: Count = 20
    step_size: PositiveLength | Literal["eps/4"] = "eps/4"
    loss: Literal["ce", "margin", "dlr"] = "ce"
    eot: Count = 4
    sigma: Literal["differentiated", "detached"] = "differentiated"
    """Whether the gradient sees that the anchor's noise scale depends on the pixels."""
    checkpoint: bool = True
    """Encode again in the backward pass instead of keeping activations; off is a third faster where memory allows."""
    views: Count | None = None
    """Most anchor views of the copy of the defence that is climbed on; all of them by default."""

    @property
    def name(self) -> str:
        """The kind with the number of steps and what differs from the usual, such as ``adaptive-both-20-margin``."""
        loss = () if self.loss == "ce" else (self.loss,)
        sigma = () if self.sigma == "differentiated" else (self.sigma,)
        return "-".join([self.kind, str(self.steps), *loss, *sigma, *self.accents()])

    @property
    def total_steps(self) -> int:
        """All steps of all variants."""
        return self.steps * len(self.variants())

    @abstractmethod
    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """What is climbed, one value per image; ``weight`` is that of the variant."""

    def accents(self) -> tuple[str, ...]:
        """What a subclass adds to the name."""
        return ()

    def variants(self) -> tuple[float, ...]:
        """One run each; the best per image is kept."""
        return (0.0,)

    def worth(self, look: Look, scene: Scene) -> Tensor:
        """The defended loss by which iterates are compared."""
        return LOSSES[self.loss](look.defended, scene.y)

    def wrong(self, look: Look, scene: Scene) -> Tensor:
        """Whether the defended answer is wrong."""
        return look.defended.argmax(1) != scene.y

    def price(self, defense: Defense, passes: Price) -> Price:
        """Gradients at every iterate but the last, which is only looked at, and the clean features."""
        runs, passes = len(self.variants()) * self.eot, sketch_passes(defense, self.views, passes)
        step, last = gradient_price(defense, passes, self.checkpoint), look_price(defense, passes)
        forward, backward = (runs * (self.steps * a + b) for a, b in zip(step, last, strict=True))
        return forward + 1, backward

    def craft(self, target: Target) -> Crafted:
        """Climb once per variant."""
        scene = Scene(target.y, target.clf.encoder(target.x))
        best, kept = target.x, Tally(*torch.full((2, len(target.x)), -torch.inf, device=target.x.device))
        how = Gradients(self.checkpoint, self.sigma == "detached")
        for number, weight in enumerate(self.variants()):
            label = f"{self.kind} {number}"
            images, tally = self._climb(target.pipeline(label, how, self.views), target.problem(label), scene, weight)
            better = tally.beats(kept)
            best, kept = torch.where(better[:, None, None, None], images, best), kept.where(better, tally)
        return Crafted(best, *target.everyone(self.price(target.defense, target.passes)))

    def _climb(self, pipeline: Pipeline, problem: Problem, scene: Scene, weight: float) -> tuple[Tensor, Tally]:
        step = problem.eps / 4 if isinstance(self.step_size, str) else self.step_size
        images = best = problem.random_start()
        kept: Tally | None = None
        for number in range(self.steps + 1):
            slope, tally = self._average(pipeline, images, scene, weight, last=number == self.steps)
            better = torch.ones_like(scene.y, dtype=torch.bool) if kept is None else tally.beats(kept)
            best = torch.where(better[:, None, None, None], images, best)
            kept = tally if kept is None else kept.where(better, tally)
            if number < self.steps:
                images = problem.project(images + step * slope.sign())
                problem.steps.tick()
        assert kept is not None
        return best, kept

    def _average(
        self, pipeline: Pipeline, images: Tensor, scene: Scene, weight: float, *, last: bool
    ) -> tuple[Tensor, Tally]:
        """The summed gradient and the mean outcome over ``eot`` draws; the last iterate needs no gradient."""
        slope = torch.zeros_like(images)
        broken, worth = torch.zeros(2, len(images), device=images.device)
        for _ in range(self.eot):
            with torch.set_grad_enabled(not last):
                pixels = images.detach().requires_grad_(not last)
                look = pipeline.look(pixels)
                # A sum, never a mean: images must not share a scale.
                value = torch.zeros(()) if last else self.objective(look, scene, weight).sum()
            if not last:
                slope = slope + _slope(value, pixels)
            broken = broken + self.wrong(look, scene)
            worth = worth + self.worth(look, scene).detach().float()
        return slope, Tally(broken / self.eot, worth / self.eot)


def _slope(value: Tensor, pixels: Tensor) -> Tensor:
    slope = torch.autograd.grad(value, pixels, allow_unused=True)[0] if value.requires_grad else None
    if slope is None:
        raise ReactClipError(
            "the defended logits carry no gradient to the pixels, which this attack needs; use adaptive-square, which "
            "needs none, or an encoder that runs in torch"
        )
    if not bool(slope.isfinite().all()):
        raise ReactClipError(
            "the gradient through the defence holds NaN or infinite values; run the attacked encoder in float32"
        )
    return slope
