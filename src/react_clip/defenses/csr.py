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

from react_clip import functional
from react_clip.config import Count, PixelLength, Positive
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.counterattack import Counterattack, encode_moved, gradient
from react_clip.encoders.base import Encoder
from react_clip.linf import Ball
from react_clip.zeroshot import ZeroShotClassifier


class CSR(Counterattack):
    """Move images whose feature differs from that of their low-pass copy towards the latter.

    ``score`` is the cosine of both features, ``gated`` is score < threshold. An image costs 2 forward passes; an
    attacked one ``steps`` more, and ``steps`` - 1 backward passes. Nothing is drawn at random.

    >>> CSR().cost()
    (5, 2)
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

    def cost(self) -> tuple[int, int]:
        """Most forward and backward passes an image can need."""
        return 2 + self.steps, self.steps - 1

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        plain = clf.encoder.encode_views(pixels)
        smooth = clf.encoder.encode_views(low_pass(pixels, self.radius))
        score = (plain * smooth).sum(-1)
        gated = score < self.threshold
        output, moved = plain, pixels.detach()
        rows = gated.nonzero().flatten()
        if len(rows):
            images, features = self._purify(clf.encoder, moved[rows], smooth[rows], plain[rows])
            moved, output = moved.index_copy(0, rows, images), output.index_copy(0, rows, features)
        if pixels.requires_grad:
            output = encode_moved(clf.encoder, pixels, moved)
        counts = (2 + self.steps * gated.long(), (self.steps - 1) * gated.long())
        return answer(clf, output, passes=counts, score=score, gated=gated)

    def _purify(self, encoder: Encoder, images: Tensor, smooth: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
        """The iterate of each image that is nearer to the low-pass than to the given feature, and its unit feature."""

        def contrast(raw: Tensor) -> Tensor:
            return (functional.normalize(raw) * (smooth - plain)).sum(-1)

        ball, current = Ball(images, self.eps), images
        best, best_features = images, plain
        best_value = torch.full_like(plain[:, 0], -torch.inf)
        for step in range(self.steps):
            last = step == self.steps - 1
            raw, slope = (encoder.raw_features(current), None) if last else gradient(encoder, current, contrast)
            value = contrast(raw)
            better = value > best_value
            best_value = torch.where(better, value, best_value)
            best = torch.where(better[:, None, None, None], current, best)
            best_features = torch.where(better[:, None], functional.normalize(raw), best_features)
            if slope is not None:
                current = ball.step(current, slope, self.step_size)
        return best, best_features


def low_pass(images: Tensor, radius: float) -> Tensor:
    r"""Images with every frequency k damped by :math:`\exp(-\lVert k \rVert^2 / 2 r^2)`, clamped to [0, 1].

    k is in cycles per side, so the filter does not depend on the number of pixels.

    >>> stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(1, 1, 8, 8)
    >>> low_pass(stripes, 1.0)[0, 0, 0, :2]
    tensor([0.4998, 0.5002])
    """
    height, width = (
        torch.fft.fftfreq(side, 1 / side, device=images.device, dtype=images.dtype) for side in images.shape[2:]
    )
    mask = torch.exp(-(height[:, None] ** 2 + width**2) / (2.0 * radius**2))
    filtered: Tensor = torch.fft.ifft2(torch.fft.fft2(images) * mask).real
    return filtered.clamp(0.0, 1.0)
