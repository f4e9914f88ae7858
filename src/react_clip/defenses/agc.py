r"""AGC, adaptive geodesic correction (Li et al., 2026): turn the feature to the mean of perspective views, and beyond.

With f the image's unit feature, :math:`v_i` those of its views and a their normalised mean, at the angle
:math:`\theta` from f, the answer lies on the great circle through f and a, :math:`\beta\,\theta` away from f:

.. math:: \beta = \beta_{clean} + (\beta_{adv} - \beta_{clean})\,c, \qquad
          c = \big[\tfrac1n \textstyle\sum_i (1 - \langle v_i, f \rangle)\big]^{0.9}
              \cdot \tfrac12 \big[1 + \mathrm{mean}_{i \ne j} \langle v_i, v_j \rangle\big]

so the feature moves further where the views differ from the image but agree with each other.

The views are torchvision's ``RandomPerspective`` with a distortion of one half. The released code draws them from
8-bit PIL images at their original size, then resizes and crops; here they are drawn from the pixels that the encoder
gets, as its published adversarial images were, and stay floats. Pillow's cubic kernel (a = -1) overshoots edges more
than torch's (a = -0.75), which is used here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import noise
from react_clip.augment import sampled
from react_clip.config import Count, NonNegative
from react_clip.defenses.base import Defense
from react_clip.defenses.view import View
from react_clip.functional import normalize

DISTORTION = 0.5
"""Largest shift of a corner, as a fraction of half the side."""


class AGC(Defense):
    """Correct every image along the great circle to the mean of its perspective views.

    ``score`` is c, ``drift`` the angle between f and a in radians. 33 passes.

    >>> AGC().views
    32
    """

    kind = "agc"
    colour = "#228833"
    views: Count = 32
    """Perspective views of the image."""
    beta_clean: NonNegative = 0.45
    """Fraction of the angle to the views' mean that an image moves whose views all have its feature."""
    beta_adv: NonNegative = 2.25
    """The same for c = 1; values above 1 lead beyond the mean."""
    gamma: NonNegative = 0.9
    """Exponent of the views' mean distance in c."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The turned features."""
        plain, views = x.encode_together(x.image, x.drawn(perspective_views, None, range(self.views)))
        features, score, angle = self.correct(plain, views)
        return features, {"score": score, "drift": angle}

    def correct(self, plain: Tensor, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Corrected unit features ``[B, D]``, c and the angle ``[B]``, from unit features ``[B, D]`` and ``[B, V, D]``.

        >>> _, score, angle = AGC().correct(torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.8, 0.6]]]))
        >>> score, angle
        (tensor([0.2349]), tensor([0.6435]))
        """
        count = views.shape[1]
        distance = (1.0 - (views * plain[:, None]).sum(-1)).mean(1).clamp(0.0, 1.0)
        agreement = torch.ones_like(distance)
        if count > 1:
            # Over ordered pairs of different views: the square of the sum has every pair, and each view with itself.
            pairs = views.sum(1).square().sum(-1) - views.square().sum((1, 2))
            agreement = (0.5 * (1.0 + pairs / (count * (count - 1)))).clamp(0.0, 1.0)
        # The floor keeps the gradient of the power finite at zero.
        score = (distance.clamp_min(1e-12) ** self.gamma * agreement).clamp(0.0, 1.0)
        beta = self.beta_clean + (self.beta_adv - self.beta_clean) * score

        anchor = normalize(views.mean(1))
        cosine = (plain * anchor).sum(-1)
        # In fp32 the bound would round to 1, where the arc cosine has no gradient; 1e-7 is the next number.
        bound = 1.0 - max(1e-8, torch.finfo(cosine.dtype).eps)
        angle = torch.arccos(cosine.clamp(-bound, bound))
        tangent = normalize(anchor - cosine[:, None] * plain)
        step = (beta * angle)[:, None]
        turned = normalize(step.cos() * plain + step.sin() * tangent)
        return torch.where((angle < 1e-6)[:, None], plain, turned), score, angle


def perspective_views(images: Tensor, keys: Tensor) -> Tensor:
    """One view per image ``[N, C, S, S]``: each corner moves inwards at random, in whole pixels; black comes in."""
    side = images.shape[-1]
    reach = int(DISTORTION * (side // 2))
    # A draw just below 1 can round up to the end of the range, which is outside it.
    x, y = (noise.uniform(keys, 8) * (reach + 1)).floor().clamp_max(reach).double().reshape(-1, 4, 2).unbind(-1)
    last = side - 1.0
    x = torch.stack([x[:, 0], last - x[:, 1], last - x[:, 2], x[:, 3]], 1)
    y = torch.stack([y[:, 0], y[:, 1], last - y[:, 2], last - y[:, 3]], 1)
    return _warp(images, _perspective(torch.stack([x, y], 2), last))


def _perspective(ends: Tensor, last: float) -> Tensor:
    """Coefficients ``[N, 8]`` of the maps x = (a X + b Y + c) / (g X + h Y + 1), likewise y with d, e, f, from the four
    ``ends`` (X, Y) ``[N, 4, 2]`` of each view to (0, 0), (last, 0), (last, last) and (0, last).

    In plain steps: a solver of linear equations would round differently on every device.
    """
    (x0, x1, x2, x3), (y0, y1, y2, y3) = (side.unbind(1) for side in ends.unbind(2))
    sum_x, sum_y = x0 - x1 + x2 - x3, y0 - y1 + y2 - y3
    # The map from the unit square to the ends (Heckbert, 1989), as a 3 x 3 matrix with rows abc, def, ghi.
    g = sum_x * (y3 - y2) - (x3 - x2) * sum_y
    h = (x1 - x2) * sum_y - sum_x * (y1 - y2)
    i = (x1 - x2) * (y3 - y2) - (x3 - x2) * (y1 - y2)
    a, b, c = (x1 - x0) * i + g * x1, (x3 - x0) * i + h * x3, x0 * i
    d, e, f = (y1 - y0) * i + g * y1, (y3 - y0) * i + h * y3, y0 * i
    # Its inverse, but for a factor.
    places = torch.stack([e * i - f * h, c * h - b * i, b * f - c * e, f * g - d * i, a * i - c * g, c * d - a * f], 1)
    depth = torch.stack([d * h - e * g, b * g - a * h], 1)
    return torch.cat([last * places, depth], 1) / (a * e - b * d)[:, None]


def _warp(images: Tensor, coefficients: Tensor) -> Tensor:
    """Images resampled at the mapped centres of their pixels; black where these lie outside, as Pillow does it."""
    side = images.shape[-1]
    centres = torch.arange(side, device=images.device, dtype=torch.float64) + 0.5
    across, down = centres[None, None, :], centres[None, :, None]
    a, b, c, d, e, f, g, h = coefficients[:, :, None, None].unbind(1)
    depth = g * across + h * down + 1.0
    place = torch.stack([(a * across + b * down + c) / depth, (d * across + e * down + f) / depth], -1)
    inside = ((place >= 0) & (place < side)).all(-1)[:, None]
    # Places outside may be infinite, which would make their gradients NaN.
    place = torch.where(inside[:, 0, :, :, None], place, 0.0)
    views = sampled(images, place * (2.0 / side) - 1.0, "border", "bicubic")
    return torch.where(inside, views, 0.0)
