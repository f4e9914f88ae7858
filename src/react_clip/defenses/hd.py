"""Hedge Defense (HD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from react_clip import functional, noise
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Ball, Counterattack, ascend
from react_clip.zeroshot import ZeroShotClassifier

# Branch of an image's random stream.
_START = 0


@dataclass(frozen=True)
class HD(Counterattack):
    r"""Attack all classes at once and answer for the image that results.

    From a random start, sign steps climb the cross-entropy summed over every class: the true class, to which the model
    responds most smoothly, is expected to lose least.

    .. math:: \max_{\lVert \delta \rVert_\infty \le \epsilon} \sum_c \mathrm{CE}(x + \delta, c)
              = \max_{\lVert \delta \rVert_\infty \le \epsilon} -\sum_c \log p_c(x + \delta)

    Every image is treated, with ``steps`` + 1 forward and ``steps`` backward passes. Gradients do not flow through this
    defence.

    >>> HD().cost()
    (21, 20)
    """

    name: ClassVar[str] = "hd"
    eps: float = 8 / 255
    steps: int = 20
    step_size: float = 4 / 255
    max_batch: int = 64
    """Most views in one encoder call."""

    def __post_init__(self) -> None:
        self._check_lengths("eps", "step_size")
        self._check_counts("steps", "max_batch")

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
