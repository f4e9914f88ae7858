"""Stability and suitability-guided test-time prompt tuning (SS-TPT, ICML 2026)."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from react_clip import functional
from react_clip.augment import WeakAugmentation
from react_clip.config import Count, NonNegative, Positive, Share
from react_clip.defenses.prompt_tuning import PromptTuning, cosines_to_others, entropy

_FLOOR = 1e-8
"""Added to every denominator, as in the published code."""


class SSTPT(PromptTuning):
    r"""Weight views by suitability (close to other views) and stability; tune the prompt so that sure views agree.

    The score of view v mixes suitability and stability, each stretched to [0, 1] over the views at hand, where T is the
    weak augmentation, and J the Jensen-Shannon divergence:

    .. math:: s(v) = \beta\,\overline{\Big[\tfrac1{V-1} \sum_{u \ne v} (2 - 2 \cos(f(v), f(u)))\Big]^{-1}}
              + (1 - \beta)\,\overline{J\big(p(v), p(Tv)\big)^{-1}}, \qquad w = \mathrm{softmax}_v(s(v) / T_w)

    The loss on the ``selected`` views S of lowest entropy pulls each towards the weighted mean of the others, which
    counts as a constant; scores are stretched and weighed over S for it:

    .. math:: \tfrac1{|S|} \sum_{v \in S} H(p_v) + \lambda\,KL(\bar p_{-v} \Vert p_v), \qquad
              \bar p_{-v} = \frac{\sum_{u \in S \setminus v} w_u p_u}{\sum_{u \in S \setminus v} w_u}

    The answer is the mean of the **logits** of all views, weighted over all of them; ``features`` are the unit weighted
    mean of the views' features. Costs 2 x ``views`` forward passes of the image tower, a view and its augmentation (the
    published code encodes every view three times, 64), and ``steps`` backward passes of the text tower, each over the
    prompts of all classes.

    >>> SSTPT().cost()
    (32, 1)
    """

    kind = "ss-tpt"
    label = "SS-TPT"
    colour = "#C2452D"
    _variants_per_view: ClassVar[int] = 2

    views: Count = 16
    selected: Annotated[int, Field(ge=2)] = 3
    temperature: Positive = 0.25
    suitability: Share = 0.4
    """Share of suitability in the score; the rest is stability."""
    consistency: NonNegative = 1.0
    """Weight of the divergence in the loss."""
    augmentation: WeakAugmentation = field(default_factory=WeakAugmentation)
    """What stability is measured against. Its magnitudes are SS-TPT's own; the published code jitters colours before it
    blurs and adds noise, this one after. The published divergence is KL(m || p) in place of J's KL(p || m)."""
    weak_views: bool = False
    """Draw the views from the weak augmentation too; the published code draws them from AugMix."""

    def _augment(self, images: Tensor, keys: Tensor) -> Tensor:
        return self.augmentation(images, keys) if self.weak_views else super()._augment(images, keys)

    def _variants(self, views: Tensor, keys: Tensor) -> list[Tensor]:
        return [views, self.augmentation(views, keys)]

    def _quality(self, features: Tensor, class_features: Tensor) -> Tensor:
        """Suitability and stability, ``[B, V, 2]``."""
        spread = (2.0 - 2.0 * cosines_to_others(features[:, :, 0])).mean(-1)
        # In double precision: confident predictions differ by so little that the reciprocal would amplify rounding.
        plain, moved = functional.logits(features.double(), class_features.double()).unbind(2)
        instability = functional.js_divergence(plain, moved).to(features.dtype)
        return torch.stack([1.0 / (spread + _FLOOR), 1.0 / (instability + _FLOOR)], -1)

    def _weights(self, quality: Tensor) -> Tensor:
        suitability, stability = stretch(quality).unbind(-1)
        score = self.suitability * suitability + (1.0 - self.suitability) * stability
        return (score / self.temperature).softmax(1)

    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        others = leave_one_out(log_p.exp(), self._weights(quality)).detach()
        divergence = (torch.xlogy(others, others) - others * log_p).sum(-1)
        return (entropy(logits) + self.consistency * divergence).mean(1)


def stretch(values: Tensor) -> Tensor:
    """Values ``[B, V, ...]`` mapped to [0, 1] over the views of each image; equal ones become 0.

    >>> stretch(torch.tensor([[2.0, 4.0, 3.0]]))
    tensor([[0.0000, 1.0000, 0.5000]])
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    return (values - low) / (high - low + _FLOOR)


def leave_one_out(probs: Tensor, weights: Tensor) -> Tensor:
    """For each view the weighted mean of the *other* views' predictions, from ``[B, S, K]`` and ``[B, S]``.

    >>> leave_one_out(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0.9, 0.1]]))
    tensor([[[0., 1.],
             [1., 0.]]])
    """
    itself = torch.eye(probs.shape[1], dtype=torch.bool, device=probs.device)
    others = weights[:, None, :].masked_fill(itself, 0.0)
    return others @ probs / others.sum(-1, keepdim=True)
