"""The ways to answer that the benchmark compares."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from react_clip.bench.timing import Answer, Contender
from react_clip.defenses import DefendCLIP, Defense, ReACT
from react_clip.zeroshot import ZeroShotClassifier

BARE = "bare encoder"
PLAIN = "all 14 passes"
OURS = "ReACT"
PUBLISHED = "Defend-CLIP as published"
_PROMPTS = 256
"""Prompts that the text tower reads at once."""


def contenders(
    clf: ZeroShotClassifier, guard: ReACT, *, batch: int, defenses: Mapping[str, Defense] | None = None
) -> list[Contender]:
    """The bare encoder first, then the algorithm without its shortcuts, as shipped, and the procedure it grew from.

    ``defenses`` are measured beside them.
    """
    found = [
        Contender(BARE, _bare(clf)),
        Contender(PLAIN, _defended(clf, guard.replace(lazy=False, max_batch=batch))),
        Contender(OURS, _defended(clf, guard.replace(max_batch=batch))),
        Contender(PUBLISHED, _published(clf, DefendCLIP())),
    ]
    return found + [Contender(label, _defended(clf, defense)) for label, defense in (defenses or {}).items()]


def _bare(clf: ZeroShotClassifier) -> Answer:
    """Features and nothing else, not even classes or waiting for them: the floor."""

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            clf.encoder.encode_views(pixels)
        ones = torch.ones(len(pixels), dtype=torch.long)
        return ones, torch.zeros_like(ones)

    return answer


def _defended(clf: ZeroShotClassifier, defense: Defense) -> Answer:
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = defense(clf, pixels, seed=0)
            # The answer reaches the caller, so waiting for it is part of the cost.
            out.labels.cpu()
        return out.passes, out.backward_passes

    return answer


def _published(clf: ZeroShotClassifier, config: DefendCLIP) -> Answer:
    """Defend-CLIP as its published procedure goes: every pass for every image, view by view, prompts encoded per batch.

    Without a text tower the prompts cannot be encoded again; that part of its cost is then left out.
    """
    encoder, prompts = clf.encoder, [f"a photo of a {name}." for name in clf.names]
    scale = config.mapping(torch.zeros(1)).item()

    def mean_feature(pixels: Tensor, sigma: float, draws: int, generator: torch.Generator) -> Tensor:
        total = torch.zeros(len(pixels), encoder.dim, device=pixels.device)
        for _ in range(draws):
            grain = torch.randn(pixels.shape, generator=generator, device=pixels.device)
            total += encoder.encode_views(pixels + sigma * grain)
        return total / draws

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if encoder.has_text:
                for start in range(0, len(prompts), _PROMPTS):
                    encoder.encode_text(prompts[start : start + _PROMPTS])
            # Noise of the batch from torch's own generator, as published: cheaper than a stream per image.
            generator = torch.Generator(device=pixels.device).manual_seed(0)
            plain = encoder.encode_views(pixels)
            low = mean_feature(pixels, config.sigma_low, config.probe_samples, generator)
            high = mean_feature(pixels, config.sigma_high, config.probe_samples, generator)
            drift_low, drift_high = (low - plain).norm(dim=1), (high - plain).norm(dim=1)
            anchor = mean_feature(pixels, scale, config.views, generator)
            opened = (drift_high - drift_low) / drift_low >= config.tau
            moved = torch.where(opened[:, None], plain + config.alpha * (anchor - plain), plain)
            clf.logits(torch.nn.functional.normalize(moved, dim=1)).argmax(-1).cpu()
        passes = torch.full((len(pixels),), 1 + 2 * config.probe_samples + config.views)
        return passes, torch.zeros_like(passes)

    return answer
