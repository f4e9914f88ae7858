r"""What defences share that move the pixels along a gradient before they classify.

.. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign}\,\nabla_x \textstyle\sum_b \ell(F(x_k^b))\big)

with F the raw feature and :math:`\Pi` the projection onto the eps-ball around the image and onto [0, 1]. No label is
used and no parameter of the encoder changes. For an attacker who knows the defence, gradients are taken at the moved
pixels, where the answer is, as if the movement were a constant (BPDA).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from react_clip import functional, linf
from react_clip.defenses.view import View
from react_clip.linf import Ball

START = 0
"""Branch of an image's random stream: the start in the ball."""

Objective = Callable[[Tensor], Tensor]
"""From raw features ``[B, D]`` to one value per image ``[B]``."""


def distance_from(anchor: Tensor) -> Objective:
    r"""The objective :math:`\lVert F(x') - F(x) \rVert^2` for given raw features of x.

    >>> distance_from(torch.zeros(1, 2))(torch.tensor([[3.0, 4.0]]))
    tensor([25.])
    """
    return lambda features: (features - anchor).square().sum(-1)


def relative_distance(features: Tensor, anchor: Tensor) -> Tensor:
    r""":math:`\lVert F(x') - F(x) \rVert / \lVert F(x) \rVert` of raw features.

    >>> relative_distance(torch.tensor([[3.0, 6.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([0.4000])
    """
    # The floor is for an encoder that answers zero.
    return functional.drift(features, anchor) / functional.drift(anchor, torch.zeros_like(anchor)).clamp_min(1e-12)


def ascend(x: View, objective: Objective, start: Tensor, ball: Ball, *, steps: int, step_size: float) -> Tensor:
    """The images after ``steps`` sign steps up the objective, inside the ball."""
    return linf.ascend(lambda at: x.gradient(objective, at)[1], start, ball, steps=steps, step_size=step_size)


def iterate_weights(steps: int, beta: float) -> list[float]:
    """Weights of the start and of the iterates after it: each counts exp(beta) times as much as the one before.

    >>> [round(weight, 3) for weight in iterate_weights(2, 2.0)]
    [0.016, 0.117, 0.867]
    """
    return (beta * torch.arange(steps + 1, dtype=torch.float64)).softmax(0).tolist()
