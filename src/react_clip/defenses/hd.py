"""Hedge Defense (HD)."""

from __future__ import annotations

from torch import Tensor

from react_clip import functional, noise
from react_clip.config import Count, PixelLength
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, ascend
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier

# Branch of an image's random stream.
_START = 0


class HD(Counterattack):
    r"""Perturb the image so that the loss summed over all classes rises, then classify it.

    The true class, to which the model responds most smoothly, is expected to lose least.

    .. math:: \max_{\lVert \delta \rVert_\infty \le \epsilon} \sum_c \mathrm{CE}(x + \delta, c)
              = \max_{\lVert \delta \rVert_\infty \le \epsilon} -\sum_c \log p_c(x + \delta)

    Every image is treated, with ``steps`` + 1 forward and ``steps`` backward passes. Gradients do not flow through this
    defence.

    >>> HD().cost()
    (21, 20)
    """

    kind = "hd"
    colour = "#B5A900"
    eps: PixelLength = 8 / 255
    steps: Count = 20
    step_size: PixelLength = 4 / 255

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 1, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        def loss_of_all_classes(features: Tensor) -> Tensor:
            return -clf.logits(functional.normalize(features)).log_softmax(-1).sum(-1)

        ball = Ball(pixels, self.eps)
        start = ball.random_start(noise.fork(keys, _START))
        moved = ascend(clf.encoder, start, loss_of_all_classes, ball, steps=self.steps, step_size=self.step_size)
        forward, backward = self.cost()
        return answer(clf, features=clf.encoder.encode_views(moved), passes=forward, backward_passes=backward)
