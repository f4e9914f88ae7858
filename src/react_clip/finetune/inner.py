"""The inner attack of adversarial training: a few projected sign steps from a random start."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from react_clip import noise
from react_clip.config import Configuration, Count, PositiveLength
from react_clip.finetune.methods import Batch, Method


class InnerAttack(Configuration):
    r"""Sign ascent on a method's own objective within ``eps`` of the image, from a uniform start.

    .. math:: x_{k+1} = \Pi\big(x_k + s \,\mathrm{sign}\, \nabla_x \textstyle\sum_b \ell_b(F(x_k))\big)

    with :math:`\Pi` the projection onto the eps-ball and [0, 1]. The objective is summed over the batch: a mean would
    shrink the gradient of an image with the number of its neighbours, down to zero in half precision.
    """

    eps: PositiveLength = 1 / 255
    step: PositiveLength = 1 / 255
    steps: Count = 2

    def __call__(self, method: Method, batch: Batch, keys: Tensor) -> Tensor:
        """Attacked pixels, one random stream per image in ``keys``."""
        clean = batch.clean
        low, high = (clean - self.eps).clamp_min(0), (clean + self.eps).clamp_max(1)
        start = noise.uniform(keys, math.prod(clean.shape[1:])).view_as(clean)
        pixels = (clean + self.eps * (2 * start - 1)).clamp(low, high)
        objective = method.objective(batch)
        for _ in range(self.steps):
            pixels.requires_grad_(True)
            (slope,) = torch.autograd.grad(objective(batch.student(pixels)).sum(), pixels)
            pixels = (pixels.detach() + self.step * slope.sign()).clamp(low, high)
        return pixels
