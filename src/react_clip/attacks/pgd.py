"""Projected gradient descent (Madry et al., 2018), as the TTC line of work runs it, and its margin-loss twin."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from react_clip.attacks.base import Attack
from react_clip.attacks.losses import Loss, cross_entropy, margin
from react_clip.attacks.problem import Problem
from react_clip.config import Count, PositiveLength

_LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}
_QUARTER = "eps/4"


class PGD(Attack):
    r"""Sign ascent on the summed loss from a uniform start; the last iterate counts, there are no restarts.

    .. math:: x_{k+1} = \Pi\big(x_k + s \,\mathrm{sign}\, \nabla_x \textstyle\sum_b \ell(x_k^b, y^b)\big)

    with :math:`\Pi` the projection onto the eps-ball and [0, 1]. The step :math:`s` is 1/255 whatever eps is, as this
    field does; at large eps ten such steps stay near the start, and ``step_size="eps/4"`` reaches the whole budget.

    >>> import torch
    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 2, 2), 0.6), torch.tensor([0])
    >>> result = PGD(eps=4/255, steps=10)(model, x, y)
    >>> round(255 * (result.images - x).mean().item(), 3)
    -4.0
    >>> result.success, result.queries
    (tensor([False]), tensor([11]))
    """

    kind = "pgd"
    steps: Count = 10
    step_size: PositiveLength | Literal["eps/4"] = 1 / 255
    loss: Literal["ce", "margin"] = "ce"
    random_start: bool = True

    @property
    def name(self) -> str:
        """``pgd-10`` or, with the margin loss, ``cw-10``; ``-quarter`` is added for steps of eps/4."""
        stem = "cw" if self.loss == "margin" else "pgd"
        return f"{stem}-{self.steps}" + ("-quarter" if self.step_size == _QUARTER else "")

    @property
    def total_steps(self) -> int:
        """One gradient each."""
        return self.steps

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy or margin."""
        return _LOSSES[self.loss](logits, labels)

    def search(self, problem: Problem) -> Tensor:
        """Climb for ``steps`` steps."""
        step = problem.eps / 4 if isinstance(self.step_size, str) else self.step_size
        images = problem.random_start() if self.random_start else problem.x
        for _ in range(self.steps):
            _, _, slope = problem.gradient(images, self.own_loss)
            images = problem.project(images + step * slope.sign())
            problem.steps.tick()
        return images


class CW(PGD):
    """ "C&W-10" of this field: :class:`PGD` on the margin :func:`~react_clip.attacks.losses.margin`.

    >>> CW().name
    'cw-10'
    """

    kind = "cw"
    loss: Literal["ce", "margin"] = "margin"
