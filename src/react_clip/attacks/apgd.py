"""Auto-PGD (Croce and Hein, 2020): momentum steps whose size is halved when progress stalls."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from react_clip.attacks import losses
from react_clip.attacks.base import Attack
from react_clip.attacks.losses import LOSSES, Loss
from react_clip.attacks.problem import Candidates, Problem, run_in_turn, select
from react_clip.config import Count

_MOMENTUM = 0.75
_RISE_RATE = 0.75


class APGD(Attack):
    r"""Sign ascent with momentum, no step size to tune: it starts at 2 eps and halves at checkpoints.

    .. math:: z_{k+1} &= \Pi(x_k + \eta \,\mathrm{sign}\, \nabla \ell(x_k)) \\
              x_{k+1} &= \Pi(x_k + \tfrac34 (z_{k+1} - x_k) + \tfrac14 (x_k - x_{k-1}))

    At a checkpoint an image halves :math:`\eta` and goes back to its best point if the loss rose in at most 3/4 of the
    steps since the last one, or if neither :math:`\eta` nor the best loss has changed since.

    ``loss="dlr-targeted"`` is APGD-T: one run towards each of the ``targets`` strongest wrong classes (all of them if
    there are fewer). Restarts and targets after the first run only on images that are not broken yet. The result is the
    last iterate that breaks the image. With 2 or 3 classes DLR changes as :mod:`~react_clip.attacks.losses` says.

    This follows the authors' released code, which has "at most 3/4" where their paper has "fewer than". Different here:
    where no iterate breaks the image, the result is the one of largest loss (there the image itself), and with ``eot``
    passes the logits and the loss are averaged as the gradient is (there they are those of the last pass).

    >>> model = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], dim=1)  # is it bright or dark?
    >>> x, y = torch.full((1, 3, 2, 2), 0.51), torch.tensor([0])
    >>> APGD(eps=4/255, steps=20)(model, x, y).success
    tensor([True])
    """

    kind: ClassVar[str] = "apgd"
    loss: Literal["ce", "dlr", "dlr-targeted"] = "ce"
    """Cross-entropy, the difference of logits ratio, or the latter towards one class at a time."""
    steps: Count = 100
    """Gradient steps per run."""
    restarts: Count = 1
    """Random starts."""
    eot: Count = 1
    """Passes over which a gradient is averaged, for targets with noise."""
    targets: Count = 9
    """Wrong classes to try, the strongest first, with ``dlr-targeted``."""

    @property
    def name(self) -> str:
        """``apgd-ce-100``, ``apgd-dlr-100`` or ``apgd-t-100``."""
        return f"apgd-{'t' if self.loss == 'dlr-targeted' else self.loss}-{self.steps}"

    def search(self, problem: Problem) -> Tensor:
        """The best image over all restarts, and for APGD-T over all targets."""
        clean = problem.logits(problem.x)
        if self.loss == "dlr-targeted":
            ranks: tuple[Tensor | None, ...] = losses.ranked_targets(clean, problem.y, self.targets).unbind(dim=1)
        else:
            ranks = (None,)
        attempts = [partial(self._attempt, targets) for targets in ranks for _ in range(self.restarts)]
        return run_in_turn(problem, Candidates.judged(problem.x, clean, problem.y), attempts).images

    def _attempt(self, targets: Tensor | None, problem: Problem, rows: Tensor) -> Candidates:
        if targets is None:
            return self._climb(problem, LOSSES[self.loss])
        return self._climb(problem, partial(losses.dlr_targeted, targets=targets[rows]))

    def _climb(self, problem: Problem, loss: Loss) -> Candidates:
        ball, marks = problem.ball, checkpoints(self.steps)
        x = previous = problem.random_start()
        logits, value, gradient = problem.gradient(x, loss, self.eot)
        highest: tuple[Tensor, ...] = (x, logits, gradient, value)
        breaking: tuple[Tensor, ...] = (x, logits)
        wrong = logits.argmax(1) != problem.y
        step = 2.0 * ball.eps
        # The released code compares the loss of the first step with 0.
        rises, last_mark, old_value = torch.zeros_like(value), 0, torch.zeros_like(value)
        halved, highest_at_mark = torch.ones_like(value, dtype=torch.bool), value

        for k in range(1, self.steps + 1):
            new = _MOMENTUM if k > 1 else 1.0  # the first step has no previous one to continue
            aim = ball.step(x, gradient, step)
            x, previous = ball.project(x + new * (aim - x) + (1.0 - new) * (x - previous)), x
            logits, value, gradient = problem.gradient(x, loss, self.eot)
            problem.tick()

            rises, old_value = rises + (value > old_value), value
            highest = select(value > highest[3], (x, logits, gradient, value), highest)
            breaks = logits.argmax(1) != problem.y
            breaking, wrong = select(breaks, (x, logits), breaking), wrong | breaks

            if k in marks:
                stalled = (rises <= _RISE_RATE * (k - last_mark)) | (~halved & (highest[3] == highest_at_mark))
                step = torch.where(stalled[:, None, None, None], step / 2.0, step)
                x, gradient = select(stalled, highest[::2], (x, gradient))
                rises, last_mark, halved, highest_at_mark = torch.zeros_like(rises), k, stalled, highest[3]
        images, logits = select(wrong, breaking, highest[:2])
        return Candidates.judged(images, logits, problem.y)


def checkpoints(steps: int) -> list[int]:
    """Steps after which the step size may be halved: first 22 % of all, then 3 % fewer each time, but at least 6 %.

    Fractions are rounded down to whole steps, as in the released code, but to at least one step.

    >>> checkpoints(100)
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    gap, decrease, least = (max(percent * steps // 100, 1) for percent in (22, 3, 6))
    marks = [gap]
    while marks[-1] + (gap := max(gap - decrease, least)) <= steps:
        marks.append(marks[-1] + gap)
    return marks
