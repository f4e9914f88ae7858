"""TTC, test-time counterattacks (Xing et al., CVPR 2025), and what its heirs DOC and MAC take from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize, relative_distance

START = 0
"""Branch of an image's random stream: the start in the ball."""


class TTC(Defense):
    r"""Counterattack the images whose feature hardly changes under a small random perturbation.

    Adversarial images are "falsely stable": a random start :math:`\delta_0` changes their raw feature less than that of
    clean images. Where the change is below tau, N sign steps increase the feature distance, and the weighted mean of
    all iterates is classified:

    .. math::
        \rho = \frac{\lVert F(x + \delta_0) - F(x) \rVert}{\lVert F(x) \rVert}, \qquad
        \delta = \begin{cases} \sum_{i=0}^N w_i \delta_i,\; w_i \propto e^{\beta i} & \rho < \tau \\
                 \delta_0 & \text{else} \end{cases}, \qquad
        \delta_{i+1} = \Pi(\delta_i + s\,\mathrm{sign}\,\nabla \lVert F(x + \delta_i) - F(x) \rVert^2)

    ``score`` is :math:`\rho`. An image with :math:`\rho < \tau` costs N + 2 forward and N backward passes. Any other
    costs 2 and 1: the pass that measures :math:`\rho` is also the answer, and its gradient is taken with it, before the
    gate is known.

    >>> TTC().steps, TTC().tau
    (2, 0.2)
    """

    kind = "ttc"
    colour = "#D55E00"
    eps: PixelLength = 4 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 2
    """N; the published value against strong attacks is 5."""
    step_size: PixelLength = 1 / 255
    """Change of a pixel value per step."""
    tau: float = 0.2
    """The counterattack is used where the relative change of the raw feature stays below this."""
    beta: float = 2.0
    """Exponent of the weights: each iterate counts exp(beta) times as much as the one before."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the counterattacked images, or of the start."""
        ball, anchor = x.ball(self.eps), x.raw(x.pixels)
        start = ball.random_start(x.keys(START))
        raw, gradient = x.gradient(distance_from(anchor), start)
        rho = relative_distance(raw, anchor)
        gated = x.gate(rho, self.tau, below=True)

        def counterattack(part: View, rows: Tensor) -> tuple[Tensor]:
            """A weighted mean of the start and of all N iterates."""
            first, second, *later = iterate_weights(self.steps, self.beta)
            around, away = ball.take(rows), distance_from(anchor[rows])
            moved = around.step(start[rows], gradient[rows], self.step_size)
            mixture = first * start[rows] + second * moved
            for weight in later:
                moved = part.ascend(away, moved, around, steps=1, step_size=self.step_size)
                mixture = mixture + weight * moved
            return (around.project(mixture),)  # only rounding can have left the ball

        (moved,) = x.only(gated, counterattack, start)
        return x.answer_at(moved, where=gated, instead=normalize(raw)), {"score": rho}


def distance_from(anchor: Tensor) -> Callable[[Tensor], Tensor]:
    r"""The objective :math:`\lVert F(x') - F(x) \rVert^2` for given raw features of x.

    >>> distance_from(torch.zeros(1, 2))(torch.tensor([[3.0, 4.0]]))
    tensor([25.])
    """
    return lambda features: (features - anchor).square().sum(-1)


def iterate_weights(steps: int, beta: float) -> list[float]:
    """Weights of the start and of the iterates after it: each counts exp(beta) times as much as the one before.

    >>> [round(weight, 3) for weight in iterate_weights(2, 2.0)]
    [0.016, 0.117, 0.867]
    """
    return (beta * torch.arange(steps + 1, dtype=torch.float64)).softmax(0).tolist()
