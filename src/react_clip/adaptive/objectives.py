"""What a white-box attacker may climb: the corrected answer, both answers, a shut gate, a soft gate, the feature."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip.adaptive.gradient import LOSSES, GradientAttack, Scene
from react_clip.adaptive.pipeline import Look
from react_clip.config import NonNegative, Positive
from react_clip.defenses.base import Defense
from react_clip.defenses.react import ReACT


class Through(GradientAttack):
    r"""The loss of the corrected answer, as if the gate were open: :math:`o = \ell(z_{open}(x), y)`.

    >>> Through(eps=4/255, steps=10).name
    'adaptive-through-10'
    """

    kind = "adaptive-through"

    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """The corrected answer's loss."""
        del weight
        return LOSSES[self.loss](look.opened, scene.y)

    def obstacle(self, defense: Defense) -> str:
        """Only a correction can be seen through."""
        return "" if isinstance(defense, ReACT) else f"{defense.name} has no anchor correction to see through"


class Both(GradientAttack):
    r"""Plain and corrected answer at once, so that the gate does not matter.

    .. math:: o = \mathrm{mean} \text{ or } \max \text{ or } \min \{\ell(z_{closed}, y),\ \ell(z_{open}, y)\}

    ``min`` works on whichever of the two still stands better.

    >>> Both(combine="min").name
    'adaptive-both-20-min'
    """

    kind = "adaptive-both"
    combine: Literal["mean", "max", "min"] = "mean"

    def accents(self) -> tuple[str, ...]:
        """How the losses become one."""
        return () if self.combine == "mean" else (self.combine,)

    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """Both losses as one."""
        del weight
        return both_losses(self, look, scene, self.combine)


class Evade(GradientAttack):
    r"""Fool the plain answer and keep the gate shut.

    .. math:: o = \ell(z_{closed}, y) - \lambda\,\mathrm{relu}(s(x) - \tau + m)

    Each :math:`\lambda` is a run of its own, the best per image is kept. ``on="both"`` puts the mean of both losses in
    the first term, ``instability=False`` keeps J out of the gradient (it is still part of the score).

    >>> Evade(lambdas=(1.0, 10.0)).total_steps
    40
    """

    kind = "adaptive-evade"
    lambdas: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1.0, 10.0, 100.0)
    margin: NonNegative = 0.05
    on: Literal["plain", "both"] = "plain"
    instability: bool = True

    def accents(self) -> tuple[str, ...]:
        """Which answers are to be wrong."""
        return () if self.on == "plain" else (self.on,)

    def variants(self) -> tuple[float, ...]:
        """The weights of the gate's term."""
        return self.lambdas

    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """The loss less the penalty of an open gate."""
        plain = LOSSES[self.loss](look.closed, scene.y)
        fooled = plain if self.on == "plain" else both_losses(self, look, scene, "mean")
        score = look.score if self.instability else look.drift + (look.score - look.drift).detach()
        return fooled - weight * torch.relu(score - look.threshold + self.margin)

    def obstacle(self, defense: Defense) -> str:
        """There must be a gate."""
        return _no_gate(defense, "to keep shut")


class BPDA(GradientAttack):
    r"""The defended answer itself: the hard gate forward, a soft one backward.

    .. math:: z = z_{closed} + g\,(z_{open} - z_{closed}), \quad g = 1[s \ge \tau], \quad
              \partial g := \partial\, \mathrm{sigmoid}((s - \tau) / T)

    A defence without gradients lends those of undefended CLIP (BPDA with the identity); one without a gate has none to
    soften.

    >>> BPDA(temperature=0.05)
    BPDA(eps=4/255, steps=20, step_size=eps/4, loss=ce, eot=4, sigma=differentiated, checkpoint=True, temperature=0.05)
    """

    kind = "adaptive-bpda"
    temperature: Positive = 0.1

    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """The defended loss through the soft gate."""
        del weight
        if not bool(look.threshold.isfinite().all()):
            return LOSSES[self.loss](look.defended, scene.y)
        soft = torch.sigmoid((look.score - look.threshold) / self.temperature)
        gate = (look.score >= look.threshold).to(soft.dtype) + (soft - soft.detach())
        return LOSSES[self.loss](look.closed + gate[:, None] * (look.opened - look.closed), scene.y)


class Feature(GradientAttack):
    r"""Without labels: move the plain and the corrected feature away from where the clean one was.

    .. math:: o = 2 - \cos(f_{closed}(x'), f(x)) - \cos(f_{open}(x'), f(x))

    >>> Feature(steps=10).name
    'adaptive-feature-10'
    """

    kind = "adaptive-feature"

    def objective(self, look: Look, scene: Scene, weight: float) -> Tensor:
        """The sum of both distances."""
        del weight
        return _distance(look.closed_features, scene.clean) + _distance(look.opened_features, scene.clean)

    def worth(self, look: Look, scene: Scene) -> Tensor:
        """How far the defended feature has moved."""
        return _distance(look.defended_features, scene.clean)

    def wrong(self, look: Look, scene: Scene) -> Tensor:
        """Unknown without labels."""
        return torch.zeros_like(scene.y, dtype=torch.bool)


def both_losses(attack: GradientAttack, look: Look, scene: Scene, combine: str) -> Tensor:
    """The losses of the closed and of the open branch as one value per image."""
    loss = LOSSES[attack.loss]
    pair = torch.stack([loss(look.closed, scene.y), loss(look.opened, scene.y)])
    return {"mean": pair.mean(0), "max": pair.amax(0), "min": pair.amin(0)}[combine]


def _distance(features: Tensor, clean: Tensor) -> Tensor:
    return 1.0 - F.cosine_similarity(features, clean)


def _no_gate(defense: Defense, purpose: str) -> str:
    gated = isinstance(defense, ReACT) and defense.tau is not None
    return "" if gated else f"{defense.name} has no gate {purpose}"


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
