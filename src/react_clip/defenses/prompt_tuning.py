r"""Test-time prompt tuning, R-TPT (CVPR 2025) and SS-TPT (ICML 2026): tune the words before the class name per image.

The prompt of class k is "a photo of a {name}."; the embeddings c of its first words start as they are and take a step
of AdamW per image, down a loss on the views of the image with the lowest entropy. The answer is a weighted mean over
all views, scored with the tuned prompts:

.. math:: z_k(x) = 100 \sum_v w_v \langle f(v), t_k(c^*) \rangle

Image features do not depend on the prompt, so a view is encoded once, where the published codes encode it three or four
times; ``passes`` counts these image-tower passes. The text tower has to run on all K prompts again for every image: one
forward and one backward pass per step (``backward_passes`` counts the latter), one more forward pass for the answer.

The published codes hand the attacked image over as an 8-bit one, its pixels cut off to multiples of 1/255. So does this
one, for every image.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from react_clip import noise
from react_clip.augment import JitterFirst
from react_clip.config import Count, Fraction, NonNegative, Positive, Whole
from react_clip.defenses.augmix import AugMix
from react_clip.defenses.base import Defense
from react_clip.defenses.batch import straight_through
from react_clip.defenses.view import View
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.functional import Similarity, normalize
from react_clip.preprocess import from_levels

VIEWS, VARIANTS = range(2)
"""Branches: of an image's random stream, its views and what their augmentations share; of each view's stream, its
augmentation (the second)."""

FLOOR = 1e-8
"""Added to every denominator, as in the published code."""

PROMPTS = 64
"""Most prompts in one call of the text tower: bounds the memory."""


class SoftPrompts:
    """The prompts "{words} {name}." with the words as trainable vectors; a call returns class features.

    ``start`` holds the embeddings of the words, ``[n, width]``, in fp32 however coarse the tower computes.
    """

    def __init__(self, encoder: Encoder, words: str, names: Sequence[str]) -> None:
        self._text = encoder.text
        embedded, ends = self._text.embed([words])
        # The words are the tokens between the start and the end token.
        start = embedded[0, 1 : int(ends[0])]
        self.start = start if start.dtype == torch.float64 else start.float()
        self._embeddings, self._ends = self._text.embed([f"{words} {name}." for name in names])

    def __call__(self, context: Tensor) -> Tensor:
        """Unit class features ``[B, K, dim]`` of contexts ``[B, n, width]``; differentiable in the context.

        The backward pass runs each call again instead of keeping what it computed, so that memory does not grow with
        the number of classes.
        """
        classes = len(self._ends)
        rows = torch.arange(len(context) * classes, device=context.device)
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        features = [checkpoint(self._encode, context, part, **options) for part in torch.split(rows, PROMPTS)]
        return torch.cat(features).reshape(len(context), classes, -1)

    def _encode(self, context: Tensor, rows: Tensor) -> Tensor:
        image, label = rows // len(self._ends), rows % len(self._ends)
        fixed = self._embeddings[label]
        soft = context[image].to(fixed.dtype)
        embeddings = torch.cat([fixed[:, :1], soft, fixed[:, 1 + soft.shape[1] :]], 1)
        return self._text.encode_embedded(embeddings, self._ends[label])


class PromptTuning(Defense):
    """Fields and algorithm; a subclass defines the quality of views, their weights and the loss."""

    views: Count = 64
    """The image itself and its augmentations."""
    selected: Count = 6
    """Number of views, those of lowest entropy, that the prompt is tuned on."""
    temperature: Positive = 0.01
    """Temperature of the softmax that weighs the views."""
    learning_rate: Positive = 5e-3
    """Learning rate of AdamW, whose other constants are torch's defaults, as in the published codes."""
    steps: Whole = 1
    """Steps per image; 0 keeps the words as they are."""
    words: Annotated[str, Field(pattern=r"\w")] = "a photo of a"
    """Words before the class name, whose embeddings are tuned. The classifier's own templates are not used."""
    augmix: AugMix = field(default_factory=AugMix)
    """The augmentation that draws the views."""

    def __post_init__(self) -> None:
        if self.selected > self.views:
            raise ReactClipError(f"selected is {self.selected}; there are only {self.views} views to select from")

    def _views(self, images: Tensor, keys: Tensor, shared: Tensor) -> Tensor:
        """What is encoded of each view ``[N * variants, 3, S, S]``; ``shared`` are keys of the images of the views."""
        return images

    @abstractmethod
    def _quality(self, features: Tensor, class_features: Tensor, similarity: Similarity) -> Tensor:
        """Quality of each view ``[B, V, ...]`` from the features ``[B, V, variants, D]`` of its variants."""

    @abstractmethod
    def _weights(self, quality: Tensor) -> Tensor:
        """Weights ``[B, V]`` that add up to one."""

    @abstractmethod
    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        """The loss per image ``[B]`` from the logits ``[B, S, K]`` of the selected views."""

    def check(self, encoder: Encoder) -> None:
        """Refuse an encoder without a text tower."""
        if not encoder.has_text:
            raise ReactClipError(
                f"{self.name} tunes prompt tokens and {encoder.name!r} has no text tower; use a complete CLIP "
                "(openai/clip-vit-base-patch32) or a defence without prompts"
            )

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the views' features, with the logits of the tuned prompts.

        Gradients flow through the views and their weights; the tuned prompt and the cut to 8 bits count as constants.
        """
        similarity = x.encoder.similarity
        prompts = SoftPrompts(x.encoder, self.words, x.classifier.names)
        with torch.no_grad():
            class_features = prompts(prompts.start[None])[0]
        variants = self._encode_views(x)
        quality, features = self._quality(variants, class_features, similarity), variants[:, :, 0]
        chosen = most_confident(similarity.logits(features, class_features), self.selected)
        sure = torch.arange(len(x), device=chosen.device)[:, None], chosen
        context = self._tune(prompts, features[sure].detach(), quality[sure].detach(), similarity)
        mean = (self._weights(quality)[..., None] * features).sum(1)
        with torch.no_grad():
            tuned = prompts(context)
        x.backward_passes += self.steps
        return normalize(mean), {"logits": similarity.logits(mean[:, None], tuned)[:, 0]}

    def _encode_views(self, x: View) -> Tensor:
        """Unit features ``[B, V, variants, D]``; view 0 is the image itself."""

        def view(change: Callable[..., Tensor], images: Tensor, keys: Tensor, shared: Tensor) -> Tensor:
            eight_bits = straight_through(from_levels((255.0 * images.detach()).floor()), images)
            return self._views(change(eight_bits, keys), keys, shared)

        shared, itself = x.keys(VARIANTS), partial(view, lambda images, keys: images)
        first = x.drawn(itself, VIEWS, range(1), shared)
        others = x.drawn(partial(view, self.augmix), VIEWS, range(1, self.views), shared)
        features = torch.cat(x.encode_together(first, others), 1)
        return features.reshape(len(x), self.views, -1, features.shape[-1])

    def _tune(self, prompts: SoftPrompts, features: Tensor, quality: Tensor, similarity: Similarity) -> Tensor:
        """Tuned contexts ``[B, n, width]``; AdamW works element by element, so images do not affect each other."""
        context = prompts.start.repeat(len(features), 1, 1).requires_grad_()
        optimizer = torch.optim.AdamW([context], lr=self.learning_rate)
        for _ in range(self.steps):
            with torch.enable_grad():
                loss = self._loss(similarity.logits(features, prompts(context)), quality).sum()
            # Only the context receives a gradient, even if the encoder is not frozen.
            (context.grad,) = torch.autograd.grad(loss, [context])
            optimizer.step()
        return context.detach()


def entropy(logits: Tensor) -> Tensor:
    r"""Entropy of predictions in nats: :math:`H(p) = -\sum_k p_k \ln p_k`.

    >>> entropy(torch.zeros(1, 2))
    tensor([0.6931])
    """
    log_p = logits.log_softmax(-1).clamp_min(-1e4)  # finite for classes that an image does not have
    return -(log_p.exp() * log_p).sum(-1)


def most_confident(logits: Tensor, count: int) -> Tensor:
    """Numbers ``[B, count]`` of the views of lowest entropy, the surest first; among equals the earlier one.

    >>> most_confident(torch.tensor([[[0.0, 0.0], [9.0, 0.0], [5.0, 0.0]]]), 2)
    tensor([[1, 2]])
    """
    return entropy(logits).argsort(dim=-1, stable=True)[:, :count]


def cosines_to_others(features: Tensor) -> Tensor:
    """Cosines ``[B, V, V - 1]`` of each view with the others, the nearest first, from unit features ``[B, V, D]``.

    >>> cosines_to_others(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]]))[0, 0]
    tensor([0.6000, 0.0000])
    """
    cosines = features @ features.mT
    itself = torch.eye(features.shape[1], dtype=torch.bool, device=features.device)
    return cosines.masked_fill(itself, -torch.inf).topk(features.shape[1] - 1).values


class RTPT(PromptTuning):
    r"""Tune the prompt on the views of lowest entropy, and weight views by their similarity to other views.

    With S the ``selected`` views of lowest entropy and N(v) the ``neighbours`` nearest to v among the other views,

    .. math:: \min_c \tfrac1{|S|} \sum_{v \in S} H\big(p(\cdot \mid v, c)\big), \qquad
              w = \mathrm{softmax}_v\Big(\tfrac1{T |N(v)|} \sum_{u \in N(v)} \cos(f(v), f(u))\Big)

    Entropies are averaged, not taken of the average. The answer is the weighted mean of the views' **logits** under the
    tuned prompt, as in the published code; ``features`` are the unit weighted mean of the views' features. Costs
    ``views`` forward passes of the image tower (the published code encodes every view four times and the image once
    more, 257) and ``steps`` backward passes of the text tower, each over the prompts of all classes.

    >>> RTPT().views, RTPT().steps
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

    def _quality(self, features: Tensor, class_features: Tensor, similarity: Similarity) -> Tensor:
        return cosines_to_others(features[:, :, 0])[..., : self.neighbours].mean(-1)

    def _weights(self, quality: Tensor) -> Tensor:
        return (quality / self.temperature).softmax(1)

    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        return entropy(logits).mean(1)


class SSTPT(PromptTuning):
    r"""Weight views by suitability (close to other views) and stability; tune the prompt so that sure views agree.

    The score of view v mixes suitability and stability, each stretched to [0, 1] over the views at hand, where T is the
    weak augmentation, and J(p, q) half of KL(m || p) + KL(m || q) for their mean m:

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

    >>> SSTPT().views, SSTPT().steps
    (16, 1)
    """

    kind = "ss-tpt"
    label = "SS-TPT"
    colour = "#C2452D"
    removed: ClassVar[dict[str, Any]] = {**Defense.removed, "weak_views": False, "released": True}

    views: Count = 16
    selected: Annotated[int, Field(ge=2)] = 3
    temperature: Positive = 0.25
    suitability: Fraction = 0.4
    """Fraction of suitability in the score; the rest is stability."""
    consistency: NonNegative = 1.0
    """Weight of the divergence in the loss."""
    augmentation: JitterFirst = field(default_factory=JitterFirst)
    """The weak augmentation T behind the stability."""

    def _views(self, images: Tensor, keys: Tensor, shared: Tensor) -> Tensor:
        """Each view, followed by its weak augmentation."""
        moved = self.augmentation(images, noise.fork(keys, VARIANTS), shared=shared)
        return torch.stack([images, moved], 1).flatten(0, 1)

    def _quality(self, features: Tensor, class_features: Tensor, similarity: Similarity) -> Tensor:
        """Suitability and stability, ``[B, V, 2]``."""
        spread = (2.0 - 2.0 * cosines_to_others(features[:, :, 0])).mean(-1)
        # In double precision: confident predictions differ by so little that the reciprocal would amplify rounding.
        plain, moved = similarity.logits(features.double(), class_features.double()).unbind(2)
        instability = reversed_divergence(plain, moved).to(features.dtype)
        return torch.stack([1.0 / (spread + FLOOR), 1.0 / (instability + FLOOR)], -1)

    def _weights(self, quality: Tensor) -> Tensor:
        suitability, stability = stretch(quality).unbind(-1)
        score = self.suitability * suitability + (1.0 - self.suitability) * stability
        return (score / self.temperature).softmax(1)

    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        log_p = logits.softmax(-1).clamp_min(FLOOR).log()
        others = leave_one_out(log_p.exp(), self._weights(quality)).detach()
        divergence = (torch.xlogy(others, others) - others * log_p).sum(-1)
        return (entropy(logits) + self.consistency * divergence).mean(1)


def reversed_divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    r""":math:`\tfrac12 [KL(m \Vert p) + KL(m \Vert q)]` with :math:`m = (p + q)/2` and 1e-8 added to p, q and m.

    >>> reversed_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986]]))
    tensor([0.0348])
    """
    p, q = logits_p.softmax(-1), logits_q.softmax(-1)
    mean = (p + q) / 2 + FLOOR
    return (mean * (mean.log() - ((p + FLOOR).log() + (q + FLOOR).log()) / 2)).sum(-1)


def stretch(values: Tensor) -> Tensor:
    """Values ``[B, V, ...]`` mapped to [0, 1] over the views of each image; equal ones become 0.

    >>> stretch(torch.tensor([[2.0, 4.0, 3.0]]))
    tensor([[0.0000, 1.0000, 0.5000]])
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    return (values - low) / (high - low + FLOOR)


def leave_one_out(probs: Tensor, weights: Tensor) -> Tensor:
    """For each view the weighted mean of the *other* views' predictions, from ``[B, S, K]`` and ``[B, S]``.

    >>> leave_one_out(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0.9, 0.1]]))
    tensor([[[0., 1.],
             [1., 0.]]])
    """
    itself = torch.eye(probs.shape[1], dtype=torch.bool, device=probs.device)
    others = weights[:, None, :].masked_fill(itself, 0.0)
    return others @ probs / others.sum(-1, keepdim=True)
