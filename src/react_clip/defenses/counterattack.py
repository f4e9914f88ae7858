r"""Sign-gradient ascent on the pixels of the input image: code shared by TTC, DOC, MAC, Anti-Adv and HD.

.. math:: x_{k+1} = \Pi\big(x_k + s\,\mathrm{sign}\,\nabla_x \textstyle\sum_b \ell(F(x_k^b))\big)

with :math:`\Pi` the projection onto the eps-ball around the image and onto [0, 1]. The moved image is then classified;
no label is used and no parameter of the encoder changes.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field

import torch
from torch import Tensor

from react_clip import functional, linf, noise
from react_clip.config import Count
from react_clip.defenses.base import Defended
from react_clip.defenses.config import BaseDefense
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.linf import Ball
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

Objective = Callable[[Tensor], Tensor]
"""One value per image, from raw features ``[B, D]``."""


class Counterattack(BaseDefense):
    """A defence that takes gradients in the pixels; a subclass defends one chunk of images in ``_defend``.

    It also works inside ``no_grad`` and ``inference_mode``. No gradient flows through it: the answer is detached from
    the caller's pixels.
    """

    max_batch: Count = field(default=64, kw_only=True)
    """Most views in one encoder call."""

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`."""
        if any(tensor.is_inference() for tensor in (*clf.parameters(), *clf.buffers())):
            raise ReactClipError(
                f"the classifier was made inside torch.inference_mode, where {self.name} cannot take gradients; make "
                "it outside (calling it inside is fine)"
            )
        with torch.inference_mode(False), torch.no_grad():
            # The clone turns a tensor made in inference mode, which autograd refuses, into a plain one.
            pixels = clf.encoder.prepare(images).detach().clone()
            keys = noise.stream_keys(pixels, seed)
            chunks = [slice(start, start + self.max_batch) for start in range(0, len(pixels), self.max_batch)]
            return _join([self._defend(clf, pixels[rows], keys[rows]) for rows in chunks])

    @abstractmethod
    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        """Answers for at most ``max_batch`` images; ``keys`` are their random streams."""


def distance_from(anchor: Tensor) -> Objective:
    r"""The objective :math:`\lVert F(x') - F(x) \rVert^2` for given raw features of x.

    >>> distance_from(torch.zeros(1, 2))(torch.tensor([[3.0, 4.0]]))
    tensor([25.])
    """
    return lambda features: (features - anchor).square().sum(-1)


def relative_distance(features: Tensor, anchor: Tensor) -> Tensor:
    r""":math:`\lVert F(x') - F(x) \rVert / \lVert F(x) \rVert` of raw features.

    >>> relative_distance(torch.tensor([[3.0, 6.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([0.4000])
    """
    # The floor is for an encoder that answers zero.
    return functional.drift(features, anchor) / functional.drift(anchor, torch.zeros_like(anchor)).clamp_min(1e-12)


def gradient(encoder: Encoder, images: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Raw features of images and the gradient of the objective in their pixels: one forward, one backward pass."""
    features: list[Tensor] = []

    def loss(pixels: Tensor) -> Tensor:
        features.append(encoder.raw_features(pixels))
        return objective(features[0])

    _, slope = linf.gradient(loss, images)
    if slope is None:
        raise ReactClipError(
            f"features of {encoder.name!r} carry no gradient to the pixels, which this defence needs; use an "
            "encoder that runs in torch, or a defence without gradients such as ReACT"
        )
    return features[0].detach(), slope


def ascend(
    encoder: Encoder, images: Tensor, objective: Objective, ball: Ball, *, steps: int, step_size: float
) -> Tensor:
    """The images after ``steps`` sign steps up the objective, inside the ball."""
    return linf.ascend(
        lambda current: gradient(encoder, current, objective)[1], images, ball, steps=steps, step_size=step_size
    )


def _join(parts: Sequence[Defended]) -> Defended:
    """One result from those of consecutive chunks."""
    if len(parts) == 1:
        return parts[0]
    tensors = {
        item.name: torch.cat([getattr(part, item.name) for part in parts])
        for item in dataclasses.fields(Defended)
        if item.name != "class_names"
    }
    return Defended(**tensors, class_names=parts[0].class_names)
