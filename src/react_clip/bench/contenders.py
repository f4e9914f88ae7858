"""The contenders of the benchmark, and the images that all of them answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from react_clip.attacks import Attack
from react_clip.bench.timing import Answer
from react_clip.defenses import DefendCLIP, Defense
from react_clip.encoders import Encoder
from react_clip.finetune.settings import Settings
from react_clip.finetune.steps import Trainer
from react_clip.zeroshot import ZeroShotClassifier

BARE = "bare encoder"
"""Label of the encoder without a defence."""
FINETUNING = "step of finetuning"
"""Label of a step of FARE with the default settings."""
PUBLISHED = "Defend-CLIP as published"
"""Label of Defend-CLIP with the steps of its released code."""


def attacked_rows(count: int, fraction: float) -> Tensor:
    """Indices of the attacked images among ``count``, spread evenly so that every batch has its part.

    >>> attacked_rows(10, 0.2), attacked_rows(10, 0.0)
    (tensor([0, 5]), tensor([], dtype=torch.int64))
    """
    attacked = round(fraction * count)
    return torch.arange(attacked) * count // max(attacked, 1)


def traffic(
    clf: ZeroShotClassifier, photos: Tensor, attack: Attack, *, count: int, attacked: float, batch: int, seed: int = 0
) -> Tensor:
    """``[count, 3, S, S]`` images: the photos, repeated, with this fraction of them attacked."""
    images = photos.to(clf.device)[torch.arange(count) % len(photos)]
    for rows in torch.split(attacked_rows(count, attacked), batch):
        if len(rows):
            clean = images[rows]
            images[rows] = attack(clf, clean, clf(clean).argmax(-1), seed=seed).images
    return images


def contenders(clf: ZeroShotClassifier, defenses: Iterable[Defense]) -> dict[str, Answer]:
    """The bare encoder, which overheads refer to, and the defences under their labels."""
    return {BARE: _bare(clf), **{type(defense).label: _defended(clf, defense) for defense in defenses}}


def _bare(clf: ZeroShotClassifier) -> Answer:
    """Features alone, without classes: the lower bound."""

    @torch.no_grad()
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        clf.encoder.encode(pixels)
        ones = torch.ones(len(pixels))
        return ones, torch.zeros_like(ones)

    return answer


def _defended(clf: ZeroShotClassifier, defense: Defense) -> Answer:
    @torch.no_grad()
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        out = defense(clf, pixels, seed=0)
        out.labels.cpu()  # waiting for the answer is part of the cost
        return out.passes, out.backward_passes

    return answer


def published(clf: ZeroShotClassifier) -> Answer:
    """Defend-CLIP's published procedure: every pass for every image, view by view, prompts encoded for every batch.

    Without a text tower the cost of the prompts is left out.
    """
    encoder, config = clf.encoder, DefendCLIP()
    prompts = [f"a photo of a {name}." for name in clf.names] if encoder.has_text else []
    scale, tau = float(config.mapping(torch.zeros(1))), config.tau or 0.0

    def mean_feature(pixels: Tensor, sigma: float, draws: int, generator: torch.Generator) -> Tensor:
        total = torch.zeros(len(pixels), encoder.dim, device=pixels.device)
        for _ in range(draws):
            noise = torch.randn(pixels.shape, generator=generator, device=pixels.device)
            total += encoder.encode(pixels + sigma * noise)
        return total / draws

    @torch.no_grad()
    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        if prompts:
            encoder.encode_text(prompts)
        # One generator for the batch, as published; cheaper than a stream per image.
        generator = torch.Generator(device=pixels.device).manual_seed(0)
        plain = encoder.encode(pixels)
        low = mean_feature(pixels, config.sigma_low, config.probe_samples, generator)
        high = mean_feature(pixels, config.sigma_high, config.probe_samples, generator)
        drift_low, drift_high = (low - plain).norm(dim=1), (high - plain).norm(dim=1)
        anchor = mean_feature(pixels, scale, config.views, generator)
        gated = (drift_high - drift_low) / drift_low >= tau
        moved = torch.where(gated[:, None], plain + config.alpha * (anchor - plain), plain)
        clf.logits(torch.nn.functional.normalize(moved, dim=1)).argmax(-1).cpu()
        passes = torch.full((len(pixels),), 1.0 + 2 * config.probe_samples + config.views)
        return passes, torch.zeros_like(passes)

    return answer


def finetuning(encoder: Encoder, images: Tensor, batch: int, dtype: str) -> Answer:
    """A step of FARE on each batch. A backward pass to pixels alone counts half: it costs as much as a forward pass.

    So a photo takes 10.75 forward passes: 6 for three steps of the attack, 3 for the update, 1 for the target and 0.75
    for the clean quarter. At the speed of the bare encoder that is the arithmetic limit.
    """
    settings = Settings(batch=batch, dtype="fp32" if dtype == "fp32" else "bf16", check_every=0)
    trainer = Trainer(encoder, "fare", images, None, None, settings)
    attack, clean = settings.attack_steps, 0.25 if settings.clean else 0.0
    forward, backward = attack + 1 + 1 + clean, attack / 2 + 1 + clean

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        trainer.step(0, torch.zeros(len(pixels), dtype=torch.long), pixels)
        return torch.full((len(pixels),), forward), torch.full((len(pixels),), backward)

    return answer
