r"""CSR, contrastive spectral rectification (ICML 2026): move images that differ from a low-pass copy towards it.

With f the unit feature, L(x) the image after a Gaussian low-pass filter and l = f(L(x)): images with
:math:`\langle f(x), l \rangle < 0.85` count as attacked. These move inside a small ball, by sign steps, towards the
low-pass feature and away from their own:

.. math:: \max_{\lVert \delta \rVert_\infty \le \epsilon} \langle f(x + \delta), l \rangle
          - \langle f(x + \delta), f(x) \rangle

and the best iterate is classified. The released fast code (``csr_fast.py``) compares three iterates, the given image
included, so it moves twice; the plain one (``csr.py``) moves three times, as ``steps=4`` here. Where a batch holds an
attacked image, the released code encodes all images once more, with the same result as the features known by then.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from react_clip.augment import low_pass
from react_clip.config import Count, PixelLength, Positive
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize


class CSR(Defense):
    """Move images whose feature differs from that of their low-pass copy towards the latter.

    ``score`` is the cosine of both features. An image costs 2 forward passes; one with score < threshold ``steps``
    more, and ``steps`` - 1 backward passes. Nothing is drawn at random.

    >>> CSR().threshold, CSR().steps
    (0.85, 3)
    """

    kind = "csr"
    colour = "#EE6677"
    radius: Positive = 40.0
    """Standard deviation of the low-pass filter, in cycles per side of the image."""
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.85
    """Cosine between the features of image and low-pass copy below which an image counts as attacked."""
    eps: PixelLength = 4 / 255
    """Largest change of a pixel value by the defence."""
    steps: Count = 3
    """Iterates that are compared, the given image included."""
    step_size: PixelLength = 2 / 255
    """Change of a pixel value per step."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """Features of the purified images."""
        plain, smooth = x.encode_together(x.image, x.changed(lambda images: low_pass(images, self.radius)))
        score = (plain * smooth).sum(-1)
        gated = x.gate(score, self.threshold, below=True)

        def purify(part: View, rows: Tensor) -> tuple[Tensor, Tensor]:
            return self._purify(part, smooth[rows].detach(), plain[rows].detach())

        moved, features = x.only(gated, purify, x.pixels.detach(), plain)
        if torch.is_grad_enabled():
            features = x.answer_at(moved)
        return features, {"score": score}

    def _purify(self, x: View, smooth: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        """The iterate of each image that is nearer to the low-pass than to the given feature, and its unit feature."""

        def contrast(raw: Tensor) -> Tensor:
            return (normalize(raw) * (smooth - plain)).sum(-1)

        ball = x.ball(self.eps)
        best = current = ball.centre
        best_features, best_value = plain, torch.full_like(plain[:, 0], -torch.inf)
        for step in range(self.steps):
            last = step == self.steps - 1
            raw, gradient = (x.raw(current), None) if last else x.gradient(contrast, current)
            value = contrast(raw)
            better = value > best_value
            best_value = torch.where(better, value, best_value)
            best = torch.where(better[:, None, None, None], current, best)
            best_features = torch.where(better[:, None], normalize(raw), best_features)
            if gradient is not None:
                current = ball.step(current, gradient, self.step_size)
        return best, best_features
