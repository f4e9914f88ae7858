r"""Test-time prompt tuning, shared by R-TPT and SS-TPT: the words before the class name are tuned for each image.

The prompt of class k is "a photo of a {name}."; the embeddings c of its first words start as they are and take a step
of AdamW per image, down a loss on the views of the image with the lowest entropy. The answer is a weighted mean over
all views, scored with the tuned prompts:

.. math:: z_k(x) = 100 \sum_v w_v \langle f(v), t_k(c^*) \rangle

Image features do not depend on the prompt, so a view is encoded once, where the published codes encode it three or four
times; ``passes`` counts these image-tower passes. The text tower has to run on all K prompts again for every image: one
forward and one backward pass per step (``backward_passes`` counts the latter), one more forward pass for the answer,
and a repetition of the former where K prompts do not fit into one call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from react_clip import functional, noise
from react_clip.config import Count, Positive, Whole
from react_clip.defenses.augmix import AugMix
from react_clip.defenses.base import Defended, answer
from react_clip.defenses.config import BaseDefense
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.preprocess import Images
from react_clip.zeroshot import ZeroShotClassifier

# Branches of an image's random stream.
_VIEWS, _VARIANTS = range(2)


class SoftPrompts:
    """The prompts "{words} {name}." with the words as trainable vectors; a call returns class features.

    ``start`` holds the embeddings of the words, ``[n, width]``, in fp32 however coarse the tower computes.
    """

    def __init__(self, encoder: Encoder, words: str, names: Sequence[str]) -> None:
        self._text = encoder.text
        embedded, ends = self._text.embed([words])
        # Between the start token and the end token stand the words.
        start = embedded[0, 1 : int(ends[0])]
        self.start = start if start.dtype == torch.float64 else start.float()
        self._embeddings, self._ends = self._text.embed([f"{words} {name}." for name in names])

    def __len__(self) -> int:
        return len(self._ends)

    def __call__(self, context: Tensor, max_batch: int) -> Tensor:
        """Unit class features ``[B, K, dim]`` of contexts ``[B, n, width]``, ``max_batch`` prompts at a time.

        Differentiable in the context. Where that takes several calls, the backward pass runs each again instead of
        keeping what they computed, so that memory does not grow with the number of classes.
        """
        total = len(context) * len(self)
        parts = []
        for first in range(0, total, max_batch):
            last = min(first + max_batch, total)
            if total > max_batch and torch.is_grad_enabled() and context.requires_grad:
                part: Any = checkpoint(
                    self._encode, context, first, last, use_reentrant=False, preserve_rng_state=False
                )
            else:
                part = self._encode(context, first, last)
            parts.append(part)
        return torch.cat(parts).reshape(len(context), len(self), -1)

    def _encode(self, context: Tensor, first: int, last: int) -> Tensor:
        rows = torch.arange(first, last, device=context.device)
        image, label = rows // len(self), rows % len(self)
        fixed = self._embeddings[label]
        soft = context[image].to(fixed.dtype)
        embeddings = torch.cat([fixed[:, :1], soft, fixed[:, 1 + soft.shape[1] :]], 1)
        return self._text.encode_embedded(embeddings, self._ends[label])


class PromptTuning(BaseDefense):
    """Fields and algorithm; a subclass defines the quality of views, their weights and the loss."""

    views: Count = 64
    """The image itself and its augmentations."""
    selected: Count = 6
    """How many views, those of lowest entropy, the prompt is tuned on."""
    temperature: Positive = 0.01
    """Of the softmax that weighs the views."""
    learning_rate: Positive = 5e-3
    """Of AdamW; its other constants are torch's defaults, as in the published codes."""
    steps: Whole = 1
    """Steps per image; 0 keeps the words as they are."""
    words: str = "a photo of a"
    """What stands before the name, and is tuned. The classifier's own templates are not used."""
    augmix: AugMix = field(default_factory=AugMix)
    max_batch: Count = 64
    """Most views, and most prompts, in one encoder call."""

    def __post_init__(self) -> None:
        if self.selected > self.views:
            raise ReactClipError(f"selected is {self.selected}; there are only {self.views} views to select from")
        if not self.words.strip():
            raise ReactClipError(f"words is {self.words!r}; give the words before the name, such as 'a photo of a'")

    def cost(self) -> tuple[int, int]:
        """Image-tower forward passes and text-tower backward passes (each over all prompts) of an image."""
        return self.views * self._variants_per_view, self.steps

    # ------------------------------------------------------------------ for subclasses

    _variants_per_view: ClassVar[int] = 1

    def _augment(self, images: Tensor, keys: Tensor) -> Tensor:
        """One random view per image."""
        return self.augmix(images, keys)

    def _variants(self, views: Tensor, keys: Tensor) -> list[Tensor]:
        """Images to encode for each view, the view itself first."""
        return [views]

    @abstractmethod
    def _quality(self, features: Tensor, class_features: Tensor) -> Tensor:
        """Quality of each view ``[B, V, ...]`` from the features ``[B, V, variants, D]`` of its variants."""

    @abstractmethod
    def _weights(self, quality: Tensor) -> Tensor:
        """Weights ``[B, V]`` that add up to one."""

    @abstractmethod
    def _loss(self, logits: Tensor, quality: Tensor) -> Tensor:
        """The loss per image ``[B]`` from the logits ``[B, S, K]`` of the selected views."""

    # ------------------------------------------------------------------ the algorithm

    def check(self, encoder: Encoder) -> None:
        """Refuse an encoder without a text tower."""
        if not encoder.has_text:
            raise ReactClipError(
                f"{self.name} tunes prompt tokens and {encoder.name!r} has no text tower; use a complete CLIP "
                "(openai/clip-vit-base-patch32) or a defence without prompts"
            )

    def __call__(self, clf: ZeroShotClassifier, images: Images, seed: Seed = 0) -> Defended:
        """Defended answers for pixels in [0, 1], PIL images, paths or bytes; see :class:`Defended`.

        Gradients, where the pixels ask for them, flow through the views and their weights; the tuned prompt counts as a
        constant.
        """
        self.check(clf.encoder)
        pixels = clf.encoder.prepare(images)
        differentiable = torch.is_grad_enabled() and pixels.requires_grad
        # Tuning needs gradients of its own, which inference mode would forbid.
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            return self._defend(clf, pixels, noise.stream_keys(pixels, seed))

    def _defend(self, clf: ZeroShotClassifier, pixels: Tensor, keys: Tensor) -> Defended:
        prompts = SoftPrompts(clf.encoder, self.words, clf.names)
        with torch.no_grad():
            class_features = prompts(prompts.start[None], self.max_batch)[0]
        features = self._encode_views(clf.encoder, pixels, keys)
        quality = self._quality(features, class_features)
        features = features[:, :, 0]
        chosen = most_confident(functional.logits(features, class_features), self.selected)
        mean = (self._weights(quality)[..., None] * features).sum(1)

        tuned = []
        sure = torch.arange(len(pixels), device=pixels.device)[:, None], chosen
        sure_features, sure_quality = features[sure].detach(), quality[sure].detach()
        group = max(1, self.max_batch // len(prompts))
        for first in range(0, len(pixels), group):
            rows = slice(first, first + group)
            context = self._tune(prompts, sure_features[rows], sure_quality[rows])
            with torch.no_grad():
                tuned.append(prompts(context, self.max_batch))
        logits = _score(mean[:, None], torch.cat(tuned))[:, 0]
        forward, backward = self.cost()
        return answer(clf, features=functional.normalize(mean), logits=logits, passes=forward, backward_passes=backward)

    def _encode_views(self, encoder: Encoder, pixels: Tensor, keys: Tensor) -> Tensor:
        """Unit features ``[B, V, variants, D]``; view 0 is the image itself."""
        numbers = torch.arange(self.views, device=pixels.device)
        view_keys = noise.fork(noise.fork(keys, _VIEWS)[:, None], numbers).flatten()
        parts = []
        for first in range(0, len(view_keys), self.max_batch):
            rows = torch.arange(first, min(first + self.max_batch, len(view_keys)), device=pixels.device)
            images, streams = pixels[rows // self.views], view_keys[rows]
            itself = (rows % self.views == 0)[:, None, None, None]
            views = torch.where(itself, images, self._augment(images, streams))
            variants = self._variants(views, noise.fork(streams, _VARIANTS))
            parts.append(torch.stack([encoder.encode_views(variant) for variant in variants], 1))
        unit = torch.cat(parts)
        return unit.reshape(len(pixels), self.views, *unit.shape[1:])

    def _tune(self, prompts: SoftPrompts, features: Tensor, quality: Tensor) -> Tensor:
        """Tuned contexts ``[B, n, width]``; AdamW works element by element, so images do not affect each other."""
        context = prompts.start.repeat(len(features), 1, 1).requires_grad_()
        optimizer = torch.optim.AdamW([context], lr=self.learning_rate)
        for _ in range(self.steps):
            with torch.enable_grad():
                loss = self._loss(_score(features, prompts(context, self.max_batch)), quality).sum()
            # Only the context receives a gradient, even if the encoder is not frozen.
            (context.grad,) = torch.autograd.grad(loss, [context])
            optimizer.step()
        return context.detach()


def _score(features: Tensor, class_features: Tensor) -> Tensor:
    """Logits ``[B, V, K]`` of features ``[B, V, D]`` where each image has class features of its own, ``[B, K, D]``."""
    return functional.LOGIT_SCALE * features @ class_features.mT


def entropy(logits: Tensor) -> Tensor:
    r"""Entropy of predictions in nats: :math:`H(p) = -\sum_k p_k \ln p_k`.

    >>> entropy(torch.zeros(1, 2))
    tensor([0.6931])
    """
    log_p = logits.log_softmax(-1)
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
