"""Anti-Adv, the anti-adversary layer (Alfarra et al., AAAI 2022)."""

from __future__ import annotations

from torch import Tensor

from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize


class AntiAdv(Defense):
    r"""Move the image towards a higher probability of the class that CLIP predicts for it.

    .. math:: \delta_{k+1} = \delta_k - a\,\mathrm{sign}\,\nabla_\delta \mathrm{CE}(x + \delta_k, \hat y), \qquad
              \hat y = \arg\max_c p_c(x), \qquad \delta_0 = 0

    There is no ball, and pixels may leave [0, 1], as in the released code. Every image is treated, with ``steps`` + 1
    forward (the first step's pass finds :math:`\hat y` too) and ``steps`` backward passes. Nothing is drawn at random,
    so the seed is not used.

    >>> AntiAdv().steps
    2
    """

    kind = "anti-adv"
    label = "Anti-Adv"
    colour = "#8C6D31"
    steps: Count = 2
    step_size: PixelLength = 4 / 255
    """a. A guess: no value is published for CLIP, and that for CIFAR (0.15) suits classifiers of 32 pixels."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the moved images."""

        def log_probabilities(raw: Tensor) -> Tensor:
            return x.logits(normalize(raw)).log_softmax(-1)

        raw, gradient = x.gradient(lambda raw: log_probabilities(raw).max(-1).values, x.pixels)
        label = log_probabilities(raw).argmax(-1, keepdim=True)
        moved = x.pixels.detach() + self.step_size * gradient.sign()
        for _ in range(self.steps - 1):
            _, gradient = x.gradient(lambda raw: log_probabilities(raw).gather(-1, label).squeeze(-1), moved)
            moved = moved + self.step_size * gradient.sign()
        return x.answer_at(moved), {}
