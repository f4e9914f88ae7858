"""Robust test-time prompt tuning (R-TPT, CVPR 2025)."""

from __future__ import annotations

from torch import Tensor

from react_clip.config import Count
from react_clip.defenses.prompt_tuning import PromptTuning, cosines_to_others, entropy
from react_clip.errors import ReactClipError


class RTPT(PromptTuning):
    r"""Tune the prompt on the views of lowest entropy, and weight views by their similarity to other views.

    With S the ``selected`` views of lowest entropy and N(v) the ``neighbours`` nearest to v among the other views,

    .. math:: \min_c \tfrac1{|S|} \sum_{v \in S} H\big(p(\cdot \mid v, c)\big), \qquad
              w = \mathrm{softmax}_v\Big(\tfrac1{T |N(v)|} \sum_{u \in N(v)} \cos(f(v), f(u))\Big)

    Entropies are averaged, not taken of the average. The answer is the weighted mean of the views' **logits** under the
    tuned prompt, as in the published code; ``features`` are the unit weighted mean of the views' features. Costs
    ``views`` forward passes of the image tower (the published code encodes every view four times and the image once
    more, 257) and ``steps`` backward passes of the text tower, each over the prompts of all classes.

    >>> RTPT().cost()
    (64, 1)
    """

    kind = "r-tpt"
    label = "R-TPT"
    colour = "#AA4499"

    neighbours: Count = 20
    """Nearest other views whose similarity weights a view. The published code leaves out cosines of 1 or more,
    which we take to mean the view itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours >= self.views:
            raise ReactClipError(f"neighbours is {self.neighbours}; a view has only {self.views - 1} others")

    def _quality(self, features: Tensor, class_features: Tensor) -> Tensor:
        return cosines_to_others(features[:, :, 0])[..., : self.neighbours].mean(-1)

    def _weights(self, quality: Tensor) -> Tensor:
        return (quality / self.temperature).softmax(1)

    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        return entropy(logits).mean(1)
