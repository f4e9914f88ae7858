"""DI-MI-FGSM (Xie et al., 2019): momentum steps whose gradient is taken at the image resized and padded at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.base import Attack
from react_clip.attacks.losses import cross_entropy
from react_clip.attacks.problem import Problem
from react_clip.config import Count, Fraction, NonNegative, PositiveLength


class DIFGSM(Attack):
    r"""Sign ascent on the cross-entropy with momentum and input diversity, from the image itself; the last iterate.

    .. math:: g_{k+1} = \mu g_k + \nabla \ell(D_k(x_k)) / \lVert \nabla \ell(D_k(x_k)) \rVert_1, \qquad
              x_{k+1} = \Pi\big(x_k + s \,\mathrm{sign}\, g_{k+1}\big)

    :math:`D_k` makes the image smaller (bilinear, to a whole number of pixels between ``smallest`` of the side and all
    of it) and puts it at a random place on black, with the chance ``probability``, anew in every step. The images were
    made to carry over to models that the attacker does not know; they also survive defences that resize.
    ``momentum=0`` is DI-FGSM, ``probability=0`` is MI-FGSM (Dong et al., 2018).

    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 8, 8), 0.6), torch.tensor([0])
    >>> result = DIFGSM(eps=4/255, probability=0)(model, x, y)
    >>> round(255 * (result.images - x).mean().item(), 3)
    -4.0
    """

    kind: ClassVar[str] = "di-fgsm"
    steps: Count = 10
    """Gradient steps."""
    step_size: PositiveLength = 1 / 255
    """Change of a pixel value per step."""
    momentum: NonNegative = 1.0
    """mu, the share of the gradients before that each step keeps."""
    smallest: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Smallest side of the resized image, as a fraction of the side."""
    probability: Fraction = 1.0
    """Chance of a step to resize."""

    def search(self, problem: Problem) -> Tensor:
        """The images after ``steps`` steps."""
        streams = (problem.fork(step).keys for step in range(self.steps))
        momentum = torch.zeros_like(problem.x)

        def direction_at(images: Tensor) -> Tensor:
            nonlocal momentum
            problem.tick()
            keys = next(streams)
            diverse = replace(problem, target=lambda pixels: problem.target(self.diverse(pixels, keys)))
            gradient = diverse.gradient(images, cross_entropy)[2]
            momentum = self.momentum * momentum + F.normalize(gradient.flatten(1), p=1.0).reshape(gradient.shape)
            return momentum

        return linf.ascend(direction_at, problem.x, problem.ball, steps=self.steps, step_size=self.step_size)

    def diverse(self, images: Tensor, keys: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` made smaller and put on black, each as its stream ``[B]`` says."""
        size, across, down, chance = noise.uniform(keys, 4).to(images.dtype).T
        size = torch.where(chance < self.probability, size, torch.ones_like(size))
        rows, columns = self._axis(images.shape[2], size, down), self._axis(images.shape[3], size, across)
        # Two products: unlike grid_sample's, their gradient has the same bits in every run on a GPU.
        return rows[:, None] @ images @ columns[:, None].mT

    def _axis(self, side: int, size: Tensor, place: Tensor) -> Tensor:
        """Weights ``[B, side, side]`` of the old pixels (last) in the new ones, along one axis.

        ``size`` and ``place`` ``[B]`` from 0 to 1 choose the resized side and its first pixel, each equally often.
        """
        least = round(self.smallest * side)
        resized = (least + (size * (side - least + 1)).floor()).clamp_max(side)
        first = (place * (side - resized + 1)).floor()
        pixels = torch.arange(side, device=size.device, dtype=size.dtype)
        read_at = (pixels - first[:, None] + 0.5) * side / resized[:, None] - 0.5
        return (1.0 - (read_at[:, :, None] - pixels).abs()).clamp_min(0.0)
