"""The work that the benchmark measures: images, encoders of known shapes, contenders, and sweeps over them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from react_clip.attacks import Attack
from react_clip.bench.timing import Answer, Comparison
from react_clip.choices import SHAPES
from react_clip.defenses import DefendCLIP, Defense, ReACT
from react_clip.encoders.base import Encoder
from react_clip.encoders.checkpoints import is_image_key
from react_clip.encoders.hf import HFText
from react_clip.encoders.loading import resolve_device, resolve_dtype
from react_clip.encoders.vision import VisionEncoder, VisionTower
from react_clip.errors import ReactClipError
from react_clip.zeroshot import ZeroShotClassifier

BARE = "bare encoder"
"""Name of the encoder without a defence in comparisons."""
PLAIN = "all 14 passes"
"""Name of ReACT without skipped views."""
OURS = "ReACT"
"""Name of ReACT as shipped."""
PUBLISHED = "Defend-CLIP as published"
"""Name of Defend-CLIP with the steps of its released code."""
_PROMPTS = 256
"""Prompts per call of the text tower."""

# ------------------------------------------------------------------ images


def synthetic_photos(count: int, size: int, *, seed: int = 0) -> Tensor:
    """Smooth random colours ``[count, 3, size, size]`` in [0, 1]; speed does not depend on the content."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").clamp(0.0, 1.0)


def attacked_rows(count: int, share: float) -> Tensor:
    """Indices of the attacked images among ``count``, spread evenly so that every batch has its share.

    >>> attacked_rows(10, 0.2), attacked_rows(10, 0.0)
    (tensor([0, 5]), tensor([], dtype=torch.int64))
    """
    attacked = round(share * count)
    return torch.arange(attacked) * count // max(attacked, 1)


class Traffic:
    """Photos repeated to any number, any share of them attacked; each photo is attacked once.

    Without an attack (random weights) all images are clean whatever the share.
    """

    def __init__(
        self, clf: ZeroShotClassifier, photos: Tensor, attack: Attack | None, *, batch: int, seed: int = 0
    ) -> None:
        self.attack = attack
        self._clf, self._photos, self._batch, self._seed = clf, photos.to(clf.device), batch, seed
        self._attacked: dict[int, Tensor] = {}

    def images(self, count: int, share: float) -> Tensor:
        """``[count, 3, S, S]`` images, this share of them attacked."""
        photos = torch.arange(count) % len(self._photos)
        images = self._photos[photos.to(self._photos.device)]
        rows = attacked_rows(count, share)
        if self.attack is None or not len(rows):
            return images
        missing = sorted(set(photos[rows].tolist()) - self._attacked.keys())
        for start in range(0, len(missing), self._batch):
            part = missing[start : start + self._batch]
            clean = self._photos[part]
            with torch.no_grad():
                answers = self._clf(clean).argmax(-1)
            attacked = self.attack(self._clf, clean, answers, seed=self._seed).images
            self._attacked |= dict(zip(part, attacked, strict=True))
        attacked = torch.stack([self._attacked[photo] for photo in photos[rows].tolist()])
        return images.index_copy(0, rows.to(images.device), attacked)


@torch.no_grad()
def gate_scores(clf: ZeroShotClassifier, guard: ReACT, images: Tensor, *, batch: int) -> Tensor:
    """The score of every image ``[B]``, on the host."""
    eager = guard.replace(lazy=False, views=1, max_batch=batch)  # anchor views do not enter the score
    scores = torch.cat([eager(clf, part, seed=0).score for part in torch.split(images, batch)]).double().cpu()
    if not bool(torch.isfinite(scores).all()):
        raise ReactClipError("these weights give scores that are not finite; use another precision")
    return scores


def open_gate_for(guard: ReACT, scores: Tensor, share: float) -> ReACT:
    """The defence with the threshold at which its gate opens for this share of the scores.

    Replaces attacks where weights are random: an attack on them, and their drift under noise, mean nothing.

    >>> open_gate_for(ReACT(), torch.tensor([1.0, 4.0, 2.0, 3.0]), 0.5).tau
    2.5
    """
    ordered, opened = scores.sort(descending=True).values, round(share * len(scores))
    # Halfway between the last score that opens and the first that does not, so that rounding moves neither.
    bounds = torch.cat([ordered[:1] + 1.0, ordered, ordered[-1:] - 1.0])
    return guard.replace(tau=float(bounds[opened : opened + 2].mean()))


def with_classes(clf: ZeroShotClassifier, count: int) -> ZeroShotClassifier:
    """The classifier with its first classes repeated until there are ``count``.

    Copies of a class share its probability evenly, so J, the gate and the passes stay the same.
    """
    base = next(number for number in (10, 5, 2, 1) if number <= len(clf.names))
    copies = -(-count // base)
    features = clf.class_features[:base].repeat(copies, 1)[:count]
    names = [f"{name} {copy}" for copy in range(copies) for name in clf.names[:base]][:count]
    return ZeroShotClassifier.from_features(clf.encoder, names, features)


# ------------------------------------------------------------------ encoders with random weights

_START, _END = 49406, 49407
"""Tokens of CLIP's tokenizer around every prompt."""


def random_encoder(name: str, *, device: str | None = None, dtype: str = "fp32", seed: int = 0) -> Encoder:
    """A complete CLIP of these shapes with random weights and the image tower of the offline model, for speed only.

    >>> random_encoder("ViT-Z-1")
    Traceback (most recent call last):
    react_clip.errors.ReactClipError: no shapes are called 'ViT-Z-1'; choose one of ViT-B-32, ViT-B-16
    """
    if name not in SHAPES:
        raise ReactClipError(f"no shapes are called {name!r}; choose one of {', '.join(SHAPES)}")
    from transformers import CLIPConfig, CLIPModel

    where, config = resolve_device(device), CLIPConfig(**SHAPES[name])
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
        torch.manual_seed(seed)
        model: Any = CLIPModel(config)
    model, vision = model.to(dtype=resolve_dtype(dtype)), config.vision_config
    weights = {key: weight for key, weight in model.named_parameters() if is_image_key(key)}
    tower = VisionTower.of(weights, heads=vision.num_attention_heads, activation=vision.hidden_act)
    assert tower is not None
    label = f"{name} shapes, random weights"
    return VisionEncoder(
        tower,
        name=label,
        image_size=vision.image_size,
        dim=config.projection_dim,
        patch_size=vision.patch_size,
        text=HFText(model, _tokenize, label),
    ).to(where)


def _tokenize(prompts: list[str], *, max_length: int, **_: object) -> Any:
    """One arbitrary token per word: enough for the cost of prompts of this length."""
    from transformers import BatchEncoding

    words = [[zlib.crc32(word.encode()) % _START for word in prompt.split()] for prompt in prompts]
    rows = [torch.tensor([_START, *tokens[: max_length - 2], _END]) for tokens in words]
    ids = pad_sequence(rows, batch_first=True, padding_value=_END)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return BatchEncoding({"input_ids": ids, "attention_mask": mask})


# ------------------------------------------------------------------ contenders


def contenders(
    clf: ZeroShotClassifier, guard: ReACT, *, batch: int, defenses: Mapping[str, Defense]
) -> dict[str, Answer]:
    """The bare encoder, all 14 passes, ReACT as shipped, published Defend-CLIP, then ``defenses``."""
    return {
        BARE: _bare(clf),
        PLAIN: _defended(clf, guard.replace(lazy=False, max_batch=batch)),
        OURS: _defended(clf, guard.replace(max_batch=batch)),
        PUBLISHED: _published(clf, DefendCLIP()),
        **{label: _defended(clf, defense) for label, defense in defenses.items()},
    }


def _bare(clf: ZeroShotClassifier) -> Answer:
    """Features alone, without classes and without waiting for the result: the lower bound."""

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
            out.labels.cpu()  # waiting for the answer is part of the cost
        return out.passes, out.backward_passes

    return answer


def _published(clf: ZeroShotClassifier, config: DefendCLIP) -> Answer:
    """Defend-CLIP's published procedure: every pass for every image, view by view, prompts encoded for every batch.

    Without a text tower the cost of the prompts is left out.
    """
    encoder, prompts = clf.encoder, [f"a photo of a {name}." for name in clf.names]
    scale = config.mapping(torch.zeros(1)).item()

    def mean_feature(pixels: Tensor, sigma: float, draws: int, generator: torch.Generator) -> Tensor:
        total = torch.zeros(len(pixels), encoder.dim, device=pixels.device)
        for _ in range(draws):
            noise = torch.randn(pixels.shape, generator=generator, device=pixels.device)
            total += encoder.encode_views(pixels + sigma * noise)
        return total / draws

    def answer(pixels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if encoder.has_text:
                for start in range(0, len(prompts), _PROMPTS):
                    encoder.encode_text(prompts[start : start + _PROMPTS])
            # One generator for the batch, as published; cheaper than a stream per image.
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


# ------------------------------------------------------------------ sweeps

_CLASSES = (10, 100, 1_000, 20_000)
_SHARES = (0.0, 0.01, 0.1, 1.0)
_BATCHES = (1, 8, 64, 256, 1024)
_DIVISORS = (8, 4, 2, 1)


@dataclass(frozen=True, eq=False)
class Bench:
    """Weights and images of a measurement; a sweep changes one field at a time.

    Where the traffic has no attack (random weights), tau is set so that the gate opens for the attacked share.
    """

    clf: ZeroShotClassifier
    guard: ReACT
    traffic: Traffic
    images: int = 64
    batch: int = 64
    attacked: float = 0.0
    defenses: Mapping[str, Defense] = field(default_factory=dict)

    def table(self, *left_out: str) -> Comparison:
        """Every contender but those left out, on the same images."""
        images, guard = self.traffic.images(self.images, self.attacked), self.guard
        if self.traffic.attack is None:
            scores = gate_scores(self.clf, guard, images, batch=self.batch)
            guard = open_gate_for(guard, scores, self.attacked)
        compared = contenders(self.clf, guard, batch=self.batch, defenses=self.defenses)
        return Comparison({k: v for k, v in compared.items() if k not in left_out}, images, batch=self.batch)

    def sweep(self, axis: str) -> dict[float, Comparison]:
        """The bare encoder, ReACT and ``defenses`` at each value of an axis.

        The plain algorithm and Defend-CLIP do the same work for any traffic, so they are in the table only.
        """
        return {value: self._at(axis, value).table(PLAIN, PUBLISHED) for value in self.values(axis)}

    def values(self, axis: str) -> list[float]:
        """Values of an axis: batches up to the number of images, an eighth of the images up to all of them."""
        if axis == "batch":
            return [batch for batch in _BATCHES if batch <= self.images] or [self.images]
        if axis == "images":
            return sorted({max(1, self.images // divisor) for divisor in _DIVISORS})
        return list(_CLASSES if axis == "classes" else _SHARES)

    def _at(self, axis: str, value: float) -> Bench:
        if axis == "classes":
            return replace(self, clf=with_classes(self.clf, int(value)))
        return replace(self, **{axis: value})  # type: ignore[arg-type]
