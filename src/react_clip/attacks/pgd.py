"""Projected gradient descent (Madry et al., 2018) on the cross-entropy or on the margin ("C&W" in papers on CLIP)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from react_clip import linf
from react_clip.attacks.base import Attack
from react_clip.attacks.losses import LOSSES, margin
from react_clip.attacks.problem import Problem
from react_clip.config import Count, NonNegative, PositiveLength


class PGD(Attack):
    r"""Sign-gradient ascent on the summed loss from a uniform start; returns the last iterate, without restarts.

    .. math:: x_{k+1} = \Pi\big(x_k + s \,\mathrm{sign}\, \nabla_x \textstyle\sum_b \ell(x_k^b, y^b)\big)

    with :math:`\Pi` the projection onto the eps-ball and [0, 1]. The step :math:`s` is 1/255 whatever eps is, as in the
    papers that TTC is compared with; at large eps ten such steps stay near the start, and ``step_size="eps/4"`` reaches
    the whole ball.

    >>> import torch
    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 2, 2), 0.6), torch.tensor([0])
    >>> result = PGD(eps=4/255, steps=10)(model, x, y)
    >>> round(255 * (result.images - x).mean().item(), 3)
    -4.0
    >>> result.success, result.queries
    (tensor([False]), tensor([12.]))
    """

    kind: ClassVar[str] = "pgd"
    steps: Count = 10
    """Gradient steps."""
    step_size: PositiveLength | Literal["eps/4"] = 1 / 255
    """Change of a pixel value per step; ``eps/4`` follows the budget."""
    loss: Literal["ce", "margin"] = "ce"
    """``"margin"`` is what papers on CLIP call C&W: not the attack of Carlini and Wagner, only a loss of theirs."""
    random_start: bool = True
    """Start at a random image of the ball instead of the given one."""
    stop: Literal["success"] | None = None
    """``"success"`` leaves an image alone once another class leads by ``margin``; by default all steps are taken."""
    margin: NonNegative = 0.0
    """Lead of the best wrong class, in logits, at which ``stop`` stops."""

    @property
    def name(self) -> str:
        """``pgd-10`` or, with the margin loss, ``cw-10``; ``-quarter`` for steps of eps/4, ``-stop0`` for a stop."""
        stem = "cw" if self.loss == "margin" else self.kind
        stop = f"-stop{self.margin:g}" if self.stop else ""
        return f"{stem}-{self.steps}" + ("-quarter" if self.step_size == "eps/4" else "") + stop

    def search(self, problem: Problem) -> Tensor:
        """The images after ``steps`` steps."""

        def gradient_at(images: Tensor) -> Tensor:
            problem.tick()
            logits, _, gradient = problem.gradient(images, LOSSES[self.loss])
            if self.stop == "success":
                # A zero gradient moves no pixel.
                gradient = gradient * (margin(logits, problem.y) < self.margin)[:, None, None, None]
            return gradient

        start = problem.random_start() if self.random_start else problem.x
        step_size = problem.ball.eps / 4 if isinstance(self.step_size, str) else self.step_size
        return linf.ascend(gradient_at, start, problem.ball, steps=self.steps, step_size=step_size)


def CW(**options: Any) -> PGD:  # noqa: N802 (the name of an attack)
    """``PGD(loss="margin")``, which papers on CLIP call C&W.

    >>> CW(steps=20).name
    'cw-20'
    """
    return PGD(**{"loss": "margin", **options})
