r"""ET3, energy-guided test-time transformation (Mirza et al., CVPR 2026): move the image to a lower energy.

.. math:: E(x) = -\log \sum_c e^{z_c(x)}, \qquad
          x_{k+1} = \Pi\Big(x_k - a\,\frac{\nabla E(x_k)}{\lVert \nabla E(x_k) \rVert_2}\Big)

with z the logits over the classes of the task. The step has a length in L2, the ball around the image is L-infinity.
"""

from __future__ import annotations

from torch import Tensor

from react_clip.config import Count, NonNegative, PixelLength
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize


class ET3(Defense):
    """Move every image down the energy of its logits: ``steps`` + 1 forward and ``steps`` backward passes.

    Values are those of the released script for CLIP. The released code can also take the energy over the names of
    ImageNet-21k; here it is that over the classifier's own classes, the script's choice. Nothing is drawn at random.

    >>> ET3().steps
    2
    """

    kind = "et3"
    colour = "#882255"
    eps: PixelLength = 5 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 2
    """Gradient steps."""
    step_size: NonNegative = 2.5
    """a, the L2 length of a step over all pixels of an image."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the moved images."""
        ball = x.ball(self.eps)
        moved = ball.centre
        for _ in range(self.steps):
            _, gradient = x.gradient(lambda raw: x.logits(normalize(raw)).logsumexp(-1), moved)
            length = gradient.flatten(1).norm(dim=1).clamp_min(1e-8)[:, None, None, None]
            moved = ball.project(moved + self.step_size * gradient / length)
        return x.answer_at(moved), {}
