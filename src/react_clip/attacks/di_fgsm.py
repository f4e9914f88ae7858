"""Sign ascent that carries over: momentum (MI), input diversity (DI), a smoothed gradient (TI), several sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from react_clip import linf, noise
from react_clip.attacks.base import Attack
from react_clip.attacks.losses import cross_entropy
from react_clip.attacks.problem import Model, Problem
from react_clip.augment import smaller_copy
from react_clip.config import Count, Fraction, NonNegative, PositiveLength, Whole
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

Share = Annotated[float, Field(gt=0, le=1)]


class DIFGSM(Attack):
    r"""Sign ascent on the cross-entropy with momentum and input diversity, from the image itself; the last iterate.

    .. math:: h_k = W * \nabla \textstyle\sum_s \ell_s(D_k(x_k)), \qquad
              g_{k+1} = \mu g_k + h_k / \lVert h_k \rVert_1, \qquad
              x_{k+1} = \Pi\big(x_k + s \,\mathrm{sign}\, g_{k+1}\big)

    :math:`D_k` makes the image smaller (bilinear, to a whole number of pixels between ``smallest`` of the side and all
    of it) and puts it at a random place on black, with the chance ``probability``, anew in every step (Xie et al.,
    2019). :math:`W` is a Gaussian kernel (TI, Dong et al., 2019), and :math:`\ell_s` the loss where the tower gets the
    image at the size s. The images were made to carry over to models that the attacker does not know; they also survive
    defences that resize. MI-FGSM (Dong et al., 2018) has ``probability=0``, DI-FGSM ``momentum=0``.

    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 8, 8), 0.6), torch.tensor([0])
    >>> result = DIFGSM(eps=4/255, probability=0)(model, x, y)
    >>> round(255 * (result.images - x).mean().item(), 3)
    -4.0
    >>> DIFGSM().name, DIFGSM(probability=0).name, DIFGSM(smooth=7, sizes=(0.75, 1)).name
    ('di-mi-fgsm-10', 'mi-fgsm-10', 'sizes-ti-di-mi-fgsm-10')
    """

    kind: ClassVar[str] = "di-fgsm"
    steps: Count = 10
    """Gradient steps."""
    step_size: PositiveLength = 1 / 255
    """Change of a pixel value per step."""
    momentum: NonNegative = 1.0
    """mu, the share of the gradients before that each step keeps."""
    smallest: Share = 0.75
    """Smallest side of the resized image, as a fraction of the side."""
    probability: Fraction = 1.0
    """Chance of a step to resize."""
    smooth: Whole = 0
    """Pixels that W reaches to each side, three standard deviations; 7 in the paper, 0 for no W."""
    sizes: tuple[Share, ...] = ()
    """Sides at which the tower gets the image, as fractions of its own, in whole patches; gradients are added."""

    @property
    def name(self) -> str:
        """``di-mi-fgsm-10``: the parts that are on, and the steps."""
        parts = {"sizes": self.sizes, "ti": self.smooth, "di": self.probability, "mi": self.momentum}
        return "-".join([*(part for part, on in parts.items() if on), f"fgsm-{self.steps}"])

    def search(self, problem: Problem) -> Tensor:
        """The images after ``steps`` steps."""
        streams = (problem.fork(step).keys for step in range(self.steps))
        sides, momentum = self._sides(problem.target), torch.zeros_like(problem.x)

        def direction_at(images: Tensor) -> Tensor:
            nonlocal momentum
            problem.tick()
            keys, gradient = next(streams), torch.zeros_like(images)
            for side in sides:
                changed = replace(problem, target=partial(self._answers, problem.target, keys, side))
                gradient += changed.gradient(images, cross_entropy)[2]
            gradient = smoothed(gradient, self.smooth)
            momentum = self.momentum * momentum + F.normalize(gradient.flatten(1), p=1.0).reshape(gradient.shape)
            return momentum

        return linf.ascend(direction_at, problem.x, problem.ball, steps=self.steps, step_size=self.step_size)

    def _sides(self, target: Model) -> list[int | None]:
        """Sides in pixels at which the tower gets the images; one ``None`` for the target as it is."""
        size_near = target.encoder.size_near if isinstance(target, ZeroShotClassifier) else lambda size: None
        sides = list(map(size_near, self.sizes))
        if None in sides:
            raise ReactClipError("sizes need a classifier whose tower takes images of any size; leave them out here")
        return sides or [None]

    def _answers(self, target: Any, keys: Tensor, side: int | None, images: Tensor) -> Tensor:
        """The target's logits of images as one step changes them."""
        images = self.diverse(images, keys)
        if side is None:
            return target(images)  # type: ignore[no-any-return]
        return target.logits(target.encoder.encode(smaller_copy(images, side)))  # type: ignore[no-any-return]

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


def smoothed(gradient: Tensor, reach: int) -> Tensor:
    """A gradient ``[B, C, H, W]`` filtered with a Gaussian of ``2 reach + 1`` pixels, zeros beyond the border.

    >>> smoothed(torch.tensor([[[[0.0, 1.0, 0.0]]]]), 1)
    tensor([[[[0.0106, 0.9570, 0.0106]]]])
    """
    if not reach:
        return gradient
    line = torch.exp(-0.5 * torch.linspace(-3.0, 3.0, 2 * reach + 1, device=gradient.device) ** 2)
    rows = (line / line.sum()).to(gradient.dtype).reshape(1, 1, -1, 1)
    planes = F.conv2d(gradient.flatten(0, 1)[:, None], rows, padding="same")
    return F.conv2d(planes, rows.mT, padding="same").reshape(gradient.shape)
