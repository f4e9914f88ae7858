"""Noisy views of images, each following from the image's key, a branch and a number alone, and what is made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import functional, noise
from react_clip.defenses.base import encode_in_batches
from react_clip.encoders.base import Encoder

# Branches of an image's random stream; each role has its own, so that skipping one does not shift another.
LOW, HIGH, AUGMENT, ANCHOR, GATE = range(5)


def anchor_views(encoder: Encoder, pixels: Tensor, keys: Tensor, sigma: Tensor, draws: range, max_batch: int) -> Tensor:
    """Unit features ``[B, len(draws), D]`` of the views with these numbers behind each image's anchor."""
    stream = noise.fork(keys, ANCHOR)
    view_keys = torch.stack([noise.fork(stream, i) for i in draws], 1).flatten()
    image_of = torch.arange(len(pixels), device=pixels.device).repeat_interleave(len(draws))
    unit = encode_in_batches(
        encoder,
        len(image_of),
        max_batch,
        lambda i, j: noise.noisy_view(pixels[image_of[i:j]], view_keys[i:j], sigma[image_of[i:j]]),
    )
    return unit.reshape(len(pixels), len(draws), -1)


def corrected(plain: Tensor, views: Tensor, alpha: float, anchors: int) -> Tensor:
    r"""The feature that the views ``[B, k, D]`` move the plain one to: the median of what their groups say.

    .. math:: f_{out} = \mathrm{median}_g \big( f + \alpha\,[f_{anc}^{(g)} - f] \big)

    Coordinate by coordinate, over unit features, and scaled to unit length: a minority of groups that was led astray
    counts for nothing, while in the mean of all views (one anchor) it counts in full.

    >>> plain, views = torch.tensor([[0.6, 0.8]]), torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    >>> corrected(plain, views, alpha=1.0, anchors=1), corrected(plain, views, alpha=1.0, anchors=3)
    (tensor([[0.4472, 0.8944]]), tensor([[0., 1.]]))
    """
    if anchors == 1 or alpha == 0:
        return functional.extrapolate(plain, functional.anchor(views), alpha)
    groups = views.tensor_split(min(anchors, views.shape[1]), dim=1)
    said = torch.stack([functional.extrapolate(plain, functional.anchor(group), alpha) for group in groups])
    middle = said.sort(0).values[(len(groups) - 1) // 2 : len(groups) // 2 + 1]
    return functional.normalize(middle.mean(0))
