r"""When enough anchor views are drawn: the answer of the views so far is the answer of all M, with some confidence.

Before it is scaled to unit length, the corrected feature is linear in the views, so the corrected logits are the mean
of :math:`z_i = (1 - \alpha)\,z(f) + \alpha\,z(v_i)` over the views. Let :math:`m` be the margin between the two best
classes of that mean after k views. Until M views are drawn, it moves by a number of variance :math:`s^2 (1/k - 1/M)`,
and so

.. math:: t = \frac{m}{s \sqrt{1/k - 1/M}}, \qquad
          s^2 = \frac{1}{K-1} \sum_{c \ne top} \mathrm{Var}_i (z_{i,top} - z_{i,c})

follows Student's distribution with about :math:`\nu = (k-1)(K-1)` degrees of freedom. Two views say little about the
variance of one margin but much about the mean over all rivals: pooling is what lets so few views be enough.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor


def looks(total: int) -> list[int]:
    """After how many views an image is looked at: two, which are the fewest that show a spread, and all.

    Looks in between would save half a pass for an attacked image, but each is a wait for the host and a batch too
    small to keep a GPU busy: clean traffic, where gates seldom open, pays for them with what they save.

    >>> looks(10), looks(2)
    ([2, 10], [2])
    """
    return [2, total] if total > 2 else [total]


def settled(view_logits: Tensor, total: int, confidence: float) -> Tensor:
    r"""Whether each image's best class is final, ``[B]``, given the corrected logits ``[B, k, K]`` of its first views.

    Student's t is turned into a normal deviate by Wallace's formula, which errs to the safe side where
    :math:`\nu` is small:

    .. math:: \frac{8\nu + 1}{8\nu + 3} \sqrt{\nu \ln(1 + t^2 / \nu)} \ge \Phi^{-1}(confidence)

    A class that an image does not have is minus infinity in all its views. Without rivals nothing is ever settled:
    whoever has but one class is after the feature.

    >>> alike = torch.tensor([[[30.0, 20.0, 10.0], [31.0, 20.0, 10.5]]])
    >>> apart = torch.tensor([[[30.0, 20.0, 10.0], [10.0, 29.0, 10.5]]])
    >>> settled(torch.cat([alike, apart]), total=10, confidence=0.95)
    tensor([ True, False])
    """
    drawn = view_logits.shape[1]
    logits = F.pad(view_logits, (0, 1), value=-torch.inf)  # so that there always is a second class
    best, classes = logits.mean(1).topk(2, -1)
    gaps = logits.gather(2, classes[:, None, :1].expand(-1, drawn, 1)) - logits
    rivals = logits[:, 0].isfinite().sum(-1) - 1
    # The best class against itself adds nothing, and a missing one (infinity less infinity) is left out. Without rivals
    # this is 0 / 0, and so is all that follows from it.
    variance = gaps.var(1).nansum(-1) / rivals * (1 / drawn - 1 / total)
    freedom = (drawn - 1) * rivals
    square = (best[:, 0] - best[:, 1]).square() / variance
    deviate = (8 * freedom + 1) / (8 * freedom + 3) * (freedom * torch.log1p(square / freedom)).sqrt()
    return deviate >= NormalDist().inv_cdf(confidence)


def unsettled(
    plain: Tensor, views: Tensor, alpha: Tensor, logits: Callable[[Tensor], Tensor], total: int, confidence: float
) -> Tensor:
    """The numbers of those images that need more views than these ``[B, k, D]``, each moved by its ``alpha``.

    It is the only wait for the device in a round, and no gradient runs through it.
    """
    with torch.no_grad():
        moved = torch.lerp(plain[:, None], views, alpha[:, None, None].to(views.dtype))
        return (~settled(logits(moved), total, confidence)).nonzero().flatten()
