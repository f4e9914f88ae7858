"""DOC: TTC's counterattack with momentum and orthogonal noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.config import Count, Fraction, NonNegative, PixelLength
from react_clip.defenses.base import Defense
from react_clip.defenses.ttc import START, distance_from, iterate_weights
from react_clip.defenses.view import View
from react_clip.functional import relative_distance

DETOUR = 2
"""Branch of an image's random stream: the orthogonal noise, with a branch of its own for each step."""


class DOC(Defense):
    r"""TTC's counterattack with momentum and orthogonal noise, weighted by how stable the image's feature is.

    With g the unit gradient of :math:`\lVert F(x + \delta) - F(x) \rVert^2` and n unit noise orthogonal to it,

    .. math::
        m_1 = g + \lambda n, \qquad m_{t+1} = \mu\,m_t + (1 - \mu)(g + \lambda n), \qquad
        \delta_{t+1} = \Pi(\delta_t + s\,\mathrm{sign}\,m_{t+1})

    .. math::
        w = \mathrm{sigmoid}(\gamma\,[\tau - \rho]), \qquad
        \delta = w \textstyle\sum_t w_t \delta_t + (1 - w)\,\delta_0, \qquad w_t \propto e^{\beta t}

    with TTC's random start :math:`\delta_0` and its relative change :math:`\rho`, which is the ``score``. Costs
    ``steps`` + 2 forward and ``steps`` backward passes.

    This is what a public port of the authors' code does with plain CLIP. The paper's text differs: it compares the mean
    cosine distance under several draws of noise (without a value for :math:`\tau` or :math:`\gamma`), starts from
    :math:`m_0 = 0`, and takes :math:`\delta_T` in place of the weighted mean.

    >>> DOC().steps, DOC().tau
    (4, 0.155)
    """

    kind = "doc"
    colour = "#CC79A7"
    eps: PixelLength = 4 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 4
    """Gradient steps."""
    step_size: PixelLength = 3 / 255
    """Change of a pixel value per step."""
    diversity: NonNegative = 0.05
    """Lambda, the length of the orthogonal noise beside the unit gradient."""
    momentum: Fraction = 0.75
    """Mu."""
    tau: float = 0.155
    """The counterattack has half its weight here. The port's experiments use 0.155 and a ``gamma`` of 75; its second
    version calls 0.3 and 20 the authors' defaults, which would change clean images more than TTC does."""
    gamma: NonNegative = 75.0
    """Steepness of the weight."""
    beta: float = 2.0
    """Exponent of the iterates' weights, as in :class:`TTC`."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the moved images."""
        ball, anchor = x.ball(self.eps), x.raw(x.pixels)
        start = moved = ball.random_start(x.keys(START))
        first, *later = iterate_weights(self.steps, self.beta)
        mixture, direction, detours = first * start, torch.zeros_like(start), x.keys(DETOUR)
        rho = torch.zeros_like(anchor[:, 0])
        for step, weight in enumerate(later):
            raw, gradient = x.gradient(distance_from(anchor), moved)
            fresh = self._diversified(gradient, noise.fork(detours, step))
            if step == 0:
                rho, direction = relative_distance(raw, anchor), fresh
            else:
                direction = self.momentum * direction + (1.0 - self.momentum) * fresh
            moved = ball.step(moved, direction, self.step_size)
            mixture = mixture + weight * moved
        strength = (self.gamma * (self.tau - rho)).sigmoid().to(start.dtype)[:, None, None, None]
        # Only rounding can leave the ball between points inside.
        return x.answer_at(ball.project(start + strength * (mixture - start))), {"score": rho}

    def _diversified(self, gradient: Tensor, keys: Tensor) -> Tensor:
        """Unit gradients plus ``diversity`` times unit noise orthogonal to them."""
        unit = F.normalize(gradient.flatten(1))
        detour = noise.normal(keys, unit.shape[1:]).to(unit.dtype)
        detour = F.normalize(detour - (detour * unit).sum(1, keepdim=True) * unit)
        return (unit + self.diversity * detour).reshape(gradient.shape)
