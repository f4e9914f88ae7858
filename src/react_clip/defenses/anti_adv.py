"""Anti-adversaries (Anti-Adv, AAAI 2022)."""

from __future__ import annotations

from torch import Tensor

from react_clip import functional
from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, ascend
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier


class AntiAdv(Counterattack):
    r"""Move the image towards a higher probability of the class that CLIP predicts for it.

    .. math:: \delta_{k+1} = \delta_k - a\,\mathrm{sign}\,\nabla_\delta \mathrm{CE}(x + \delta_k, \hat y), \qquad
              \hat y = \arg\max_c p_c(x), \qquad \delta_0 = 0

    There is no ball, only the image range. Every image is treated, with ``steps`` + 1 forward (the first step's pass
    finds :math:`\hat y` too) and ``steps`` backward passes. Nothing is drawn at random: the seed is not used. Gradients
    do not flow through this defence.

    >>> AntiAdv().cost()
    (3, 2)
    """

    kind = "anti-adv"
    label = "Anti-Adv"
    colour = "#8C6D31"
    steps: Count = 2
    step_size: PixelLength = 4 / 255
    """a. A guess that no measurement backs yet: no value is published for CLIP, and that for CIFAR (0.15) suits
    classifiers of 32 pixels. Calibrate it before comparing with published rows."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 1, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        label: Tensor | None = None

        def certainty(features: Tensor) -> Tensor:
            """Log-probability of the predicted class; the first call sees the original image and sets that class."""
            nonlocal label
            scores = clf.logits(functional.normalize(features)).log_softmax(-1)
            if label is None:
                label = scores.detach().argmax(-1, keepdim=True)
            return scores.gather(-1, label).squeeze(-1)

        whole_range = Ball(pixels, 1.0)
        moved = ascend(clf.encoder, pixels, certainty, whole_range, steps=self.steps, step_size=self.step_size)
        forward, backward = self.cost()
        return answer(clf, features=clf.encoder.encode_views(moved), passes=forward, backward_passes=backward)
