r"""ET3, energy-guided test-time transformation (Mirza et al., CVPR 2026): move the image to a lower energy.

.. math:: E(x) = -\log \sum_c e^{z_c(x)}, \qquad
          x_{k+1} = \Pi\Big(x_k - a\,\frac{\nabla E(x_k)}{\lVert \nabla E(x_k) \rVert_2}\Big)

with z the logits over the classes of the task. The step has a length in L2, the ball around the image is L-infinity.
"""

from __future__ import annotations

from torch import Tensor

from react_clip import functional
from react_clip.config import Count, NonNegative, PixelLength
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, encode_moved, gradient
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier


class ET3(Counterattack):
    """Move every image down the energy of its logits.

    Values are those of the released script for CLIP. The released code can also take the energy over the names of
    ImageNet-21k; here it is that over the classifier's own classes, the script's choice. Nothing is drawn at random.

    >>> ET3().cost()
    (3, 2)
    """

    kind = "et3"
    colour = "#882255"
    eps: PixelLength = 5 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 2
    """Gradient steps."""
    step_size: NonNegative = 2.5
    """a, the L2 length of a step over all pixels of an image."""

    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image."""
        return self.steps + 1, self.steps

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        def minus_energy(features: Tensor) -> Tensor:
            return clf.logits(functional.normalize(features)).logsumexp(-1)

        ball = Ball(pixels.detach(), self.eps)
        moved = ball.centre
        for _ in range(self.steps):
            _, slope = gradient(clf.encoder, moved, minus_energy)
            length = slope.flatten(1).norm(dim=1).clamp_min(1e-8)[:, None, None, None]
            moved = ball.project(moved + self.step_size * slope / length)
        return answer(clf, encode_moved(clf.encoder, pixels, moved), passes=self.cost())
