"""The ways to answer that the benchmark compares."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from react_clip import noise
from react_clip.bench.timing import Answer, Contender
from react_clip.defenses import DefendCLIP, Defense, ReACT
from react_clip.zeroshot import ZeroShotClassifier

BARE = "bare encoder"


def contenders(
    clf: ZeroShotClassifier, guard: ReACT, *, batch: int, defenses: Mapping[str, Defense] | None = None
) -> list[Contender]:
    """The bare encoder first, then the algorithm without its shortcuts, as shipped, and the procedure it grew from.

    ``defenses`` are measured beside them.
    """
    found = [
        Contender(BARE, _bare(clf)),
        Contender("all 14 passes", _defended(clf, guard.replace(lazy=False, max_batch=batch))),
        Contender("ReACT", _defended(clf, guard.replace(max_batch=batch))),
        Contender("Defend-CLIP as published", _published(clf, DefendCLIP())),
    ]
    return found + [Contender(label, _defended(clf, defense)) for label, defense in (defenses or {}).items()]


def _bare(clf: ZeroShotClassifier) -> Answer:
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            clf.logits(clf.encoder.encode_views(pixels)).argmax(-1)
        ones = torch.ones(len(pixels), dtype=torch.long)
        return ones, torch.zeros_like(ones)

    return answer


def _defended(clf: ZeroShotClassifier, defense: Defense) -> Answer:
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = defense(clf, pixels, seed=0)
            # The answer reaches the caller, so waiting for it is part of the cost.
            out.labels.cpu()
        return out.passes.cpu(), out.backward_passes.cpu()

    return answer


def _published(clf: ZeroShotClassifier, config: DefendCLIP) -> Answer:
    """Defend-CLIP as its published procedure goes: every pass for every image, view by view, prompts encoded per batch.

    Without a text tower the prompts cannot be encoded again; that part of its cost is then left out.
    """
    encoder, classes = clf.encoder, [f"a photo of a {name}." for name in clf.names]
    scale = config.mapping(torch.zeros(1)).item()

    def mean_feature(pixels: Tensor, sigma: float, draws: int, keys: Tensor) -> Tensor:
        total = torch.zeros(len(pixels), encoder.dim, device=pixels.device)
        for draw in range(draws):
            grain = noise.normal(noise.fork(keys, draw), pixels.shape[1:]).to(pixels.dtype)
            total += encoder.encode_views(pixels + sigma * grain)
        return total / draws

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if encoder.has_text:
                encoder.encode_text(classes)
            keys = noise.stream_keys(pixels, 0)
            plain = encoder.encode_views(pixels)
            low = mean_feature(pixels, config.sigma_low, config.probe_samples, noise.fork(keys, 0))
            high = mean_feature(pixels, config.sigma_high, config.probe_samples, noise.fork(keys, 1))
            drift_low, drift_high = (low - plain).norm(dim=1), (high - plain).norm(dim=1)
            anchor = mean_feature(pixels, scale, config.views, noise.fork(keys, 2))
            opened = (drift_high - drift_low) / drift_low >= config.tau
            moved = torch.where(opened[:, None], plain + config.alpha * (anchor - plain), plain)
            clf.logits(torch.nn.functional.normalize(moved, dim=1)).argmax(-1).cpu()
        passes = torch.full((len(pixels),), 1 + 2 * config.probe_samples + config.views)
        return passes, torch.zeros_like(passes)

    return answer
