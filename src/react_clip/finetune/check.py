"""The check of a run on held-out photos: accuracy on clean ones, and against PGD-10 of two budgets."""

from __future__ import annotations

import torch

from react_clip.attacks import PGD
from react_clip.config import write_length
from react_clip.errors import ReactClipError
from react_clip.finetune.steps import Trainer, centre, computing
from react_clip.preprocess import to_float
from react_clip.zeroshot import ZeroShotClassifier

RISE = 0.05
"""Accuracy may rise by this much with the budget: 200 photos count to a few hundredths."""


class Check:
    """Accuracy of a run's average weights.

    A photo without a label is its own class: right is an answer that is nearest to the photo's own original feature.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.settings, encoder = trainer.settings, trainer.mean
        held, batch = trainer.held_out.to(encoder.device), trainer.settings.batch
        pixels = centre(to_float(trainer.photos.take(held).to(encoder.device)), encoder.image_size)
        labels, features = trainer.labels[held], trainer.class_features
        if not trainer.method.needs_labels:
            labels = torch.arange(len(pixels), device=encoder.device)
            with torch.no_grad():
                features = torch.cat([trainer.original.raw(each) for each in torch.split(pixels, batch)])
        self.batches = list(zip(torch.split(pixels, batch), torch.split(labels, batch), strict=True))
        names = [f"class {number}" for number in range(len(features))]
        self.clf = ZeroShotClassifier.from_features(encoder, names, features)

    def __call__(self, step: int) -> tuple[float, float, float]:
        """Accuracy without an attack, with half of the largest budget, with all of it; it must not rise."""
        eps = self.settings.eps
        clean, half, full = curve = self._accuracy(0.0), self._accuracy(eps / 2), self._accuracy(eps)
        if max(half - clean, full - half) > RISE:
            values = " / ".join(f"{100 * value:.1f}" for value in curve)
            raise ReactClipError(
                f"held-out accuracy after step {step} is {values} % at 0 / {write_length(eps / 2)} / "
                f"{write_length(eps)}; it rises with the budget, so gradients are masked, and the last checkpoint is "
                "kept: try a smaller --eps-start or a longer --ramp, in another --out"
            )
        return curve

    def _accuracy(self, eps: float) -> float:
        attack, right = PGD(eps=eps, steps=10, step_size="eps/4"), []
        for pixels, labels in self.batches:
            with computing(self.clf.encoder, self.settings.dtype):
                right.append(~attack(self.clf, pixels, labels, seed=self.settings.seed).success)
        return float(torch.cat(right).float().mean())
