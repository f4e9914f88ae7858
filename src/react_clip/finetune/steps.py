"""One step of finetuning: augment, attack, descend the loss, average the weights.

All random numbers of a step come from the seed and the step, so a run that continues goes on as if it had not stopped.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip.augment import affine
from react_clip.data.dataset import ImageDataset
from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import TOWER, find_tower, image_parameters, image_tower, load_tower
from react_clip.encoders.layers import can_compile
from react_clip.encoders.vision import Block
from react_clip.errors import ReactClipError
from react_clip.finetune.methods import Batch, Method, Tower, get
from react_clip.finetune.photos import Photos
from react_clip.finetune.processes import group
from react_clip.finetune.settings import Settings
from react_clip.linf import Ball, ascend, gradient
from react_clip.preprocess import to_float
from react_clip.zeroshot import ZeroShotClassifier


class Trainer:
    """The models, photos and optimiser of a run, checked, and the step that changes the weights of a copy.

    ``student`` is the copy in training, ``mean`` has the moving average of its weights, ``original`` is the target.
    The arguments are those of :func:`react_clip.finetune.finetune`.
    """

    def __init__(
        self,
        encoder: Encoder,
        method: str,
        photos: Tensor | ImageDataset,
        labels: Tensor | None,
        class_features: Tensor | None,
        settings: Settings,
        init: str | Path | None = None,
    ) -> None:
        self.method, self.settings, self.group = get(method), settings, group()
        if encoder.dtype != torch.float32:
            way = "load fp32, and compute in bf16 with Settings(dtype='bf16')"
            raise ReactClipError(f"{encoder.name!r} is loaded in {encoder.dtype}; small steps vanish in it: {way}")
        own = {f"visual.{key}": tensor for key, tensor in image_tower(encoder).items()}
        find_tower(own, Path(encoder.name))  # refuses an encoder without a tower that could be read back
        if self.group.size > 1 and not self.method.splits:
            raise ReactClipError(f"{method} compares all photos of a batch; use a single process, or fare")
        self.rows = self.group.rows(settings.batch)
        self.photos = Photos(photos, encoder.preprocessing)
        labels, features = self._labels(encoder, method, labels, class_features)
        self.labels, self.class_features = labels.long().to(encoder.device), features.to(encoder.device)
        order = shuffled(len(photos), seed_of(settings.seed, "held out"))
        held = min(settings.check_photos, len(photos) // 10) if settings.check_every else 0
        self.held_out, self.trained = order[:held].sort().values, order[held:].sort().values
        self.student, self.original = copy.deepcopy(encoder).eval(), copy.deepcopy(encoder).eval()
        if init is not None:
            load_tower(self.student, tower_file(init))
        self.mean = copy.deepcopy(self.student)
        self.weights, self.means = image_parameters(self.student), image_parameters(self.mean)
        changed = [each.requires_grad_(True) for each in self.weights.values()]
        self.optimiser = self.method.optimiser(changed, lr=self.method.lr, fused=changed[0].is_cuda)
        _compile(self.student, self.mean, self.original)

    def _labels(
        self, encoder: Encoder, method: str, labels: Tensor | None, classes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A class index per photo and unit class features ``[K, D]``; zeros for a method without labels."""
        count = len(self.photos)
        if not self.method.needs_labels:
            return torch.zeros(count), torch.zeros(1, encoder.dim)
        if labels is None or classes is None:
            missing = "labels" if labels is None else "class_features"
            raise ReactClipError(f"{method} needs {missing}; give them, or use fare, which needs none")
        if self.settings.cutmix:
            raise ReactClipError(f"cutmix mixes photos of several classes, and {method} needs labels; leave it out")
        names = [f"class {number}" for number in range(len(classes))]
        features = ZeroShotClassifier.from_features(encoder, names, classes.float()).class_features
        whole = labels.shape == (count,) and not labels.is_floating_point() and labels.dtype != torch.bool
        if not whole or int(labels.min()) < 0 or int(labels.max()) >= len(features):
            given = f"labels are {labels.dtype} of shape {list(labels.shape)}, from {labels.min()} to {labels.max()}"
            raise ReactClipError(f"{given}; {count} photos need one class index each, from 0 to {len(features) - 1}")
        return labels, features

    def chosen(self, step: int) -> Tensor:
        """Indices of the photos of a step that this process computes."""
        return self.trained[photos_of(step, len(self.trained), self.settings)[self.rows]]

    @torch.enable_grad()
    def step(self, number: int, chosen: Tensor, pixels: Tensor) -> tuple[float, float]:
        """Descend the loss of the photos with these indices; returns the loss and the learning rate."""
        rate = (self.settings.lr or self.method.lr) * self.settings.rate(number)
        for each in self.optimiser.param_groups:
            each["lr"] = rate
        loss, weights = self.loss(number, chosen, pixels), list(self.weights.values())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        self.group.average([loss, *(each.grad for each in weights if each.grad is not None)])
        length = torch.nn.utils.clip_grad_norm_(weights, self.method.longest_gradient)
        self.optimiser.step()
        with torch.no_grad():
            decay = min(self.settings.average, (number + 1) / (number + 10))
            torch._foreach_lerp_(tuple(self.means.values()), tuple(weights), 1 - decay)
        value, norm = torch.stack([loss, length]).tolist()  # the one time that a step waits for a GPU
        if not (math.isfinite(value) and math.isfinite(norm)):
            what = f"the loss is {value}" if not math.isfinite(value) else f"the gradient's length is {norm}"
            way = "try a smaller learning rate (--lr) or --dtype fp32, in another --out"
            raise ReactClipError(f"{what} at step {number + 1}; the last checkpoint is kept: {way}")
        return value, rate

    def loss(self, step: int, chosen: Tensor, pixels: Tensor) -> Tensor:
        """The loss of photos, attacked; and of a quarter of them as they are, with the weight ``clean``."""
        settings, device = self.settings, self.student.device
        # All processes draw for the whole batch and use their part.
        count = len(pixels) * self.group.size
        rows = self.group.rows(count)
        few = torch.Generator().manual_seed(seed_of(settings.seed, "step", step))
        cutmix = settings.cutmix if settings.cutmix is not None else 0.0 if self.method.needs_labels else 0.5
        unit = torch.rand(4, count, generator=few)[:, rows]
        pixels = augmented(to_float(pixels.to(device)), self.student.image_size, settings.crop, cutmix, unit, few)
        many = torch.Generator(device).manual_seed(seed_of(settings.seed, "start", step))
        start = torch.rand((count, *pixels.shape[1:]), generator=many, device=device)[rows]
        student, original = (_tower(each, settings.dtype) for each in (self.student, self.original))
        batch = Batch(student, original, pixels, self.labels[chosen.to(device)], self.class_features)
        self.student.tower.requires_grad_(False)  # the attack needs no gradients of the weights
        images = attacked(self.method, batch, settings.budget(step), settings.attack_steps, start)
        self.student.tower.requires_grad_(True)
        loss = self.method.loss(batch, images)
        if settings.clean:
            quarter = batch.quarter()
            loss = loss + settings.clean * self.method.loss(quarter, quarter.pixels)
        return loss

    def saved(self, **about: Any) -> memoryview:
        """Everything that the next step depends on, and plain values ``about`` it, as a file's content."""
        buffer, optimiser = io.BytesIO(), self.optimiser.state_dict()
        torch.save({"weights": self.weights, "means": self.means, "optimiser": optimiser, **about}, buffer)
        return buffer.getbuffer()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`saved` wrote."""
        for own, stored in ((self.weights, state["weights"]), (self.means, state["means"])):
            for name, tensor in own.items():
                tensor.data.copy_(stored[name])
        self.optimiser.load_state_dict(state["optimiser"])


def tower_file(init: str | Path) -> Path:
    """The weights in a file, or in the folder of a finished run."""
    path = Path(init) / TOWER if Path(init).is_dir() else Path(init)
    if not path.is_file():
        raise ReactClipError(f"{path} does not exist; give a checkpoint, or the folder of a finished run")
    return path


def attacked(method: Method, batch: Batch, eps: float, steps: int, start: Tensor) -> Tensor:
    """Sign-gradient ascent on the method's objective; ``start`` are uniform numbers in [0, 1), a place in the ball."""

    def gradient_at(images: Tensor) -> Tensor:
        pixels = images.detach().requires_grad_()
        found = gradient(method.objective(batch, batch.student(pixels)), pixels)
        assert found is not None, "image towers are differentiable"
        return found

    ball = Ball(batch.pixels, eps)
    first = ball.project(batch.pixels + eps * (2 * start - 1))
    return ascend(gradient_at, first, ball, steps=steps, step_size=2 * eps / steps)


def augmented(
    pixels: Tensor, size: int, crop: tuple[float, float], cutmix: float, unit: Tensor, draws: torch.Generator
) -> Tensor:
    """Photos ``[B, 3, size, size]``: half of them mirrored, random squares cut out, rectangles exchanged in pairs.

    ``unit`` are uniform numbers ``[4, B]``; those of the rectangle, which is the same for all, are drawn.
    """
    mirror, side, left, top = unit.to(pixels.device)
    pixels = torch.where((mirror < 0.5)[:, None, None, None], pixels.flip(3), pixels)
    if crop != (1, 1):
        side = crop[0] + (crop[1] - crop[0]) * side
        shift = (2 * torch.stack([left, top], dim=1) - 1) * (1 - side)[:, None]
        pixels = affine(pixels, side[:, None, None] * torch.eye(2, device=side.device), shift, "border", size)
    pixels = centre(pixels, size)
    mix, area, across, down = torch.rand(4, generator=draws).tolist()
    if mix < cutmix:
        length = round(size * math.sqrt(area))
        x, y = round(across * (size - length)), round(down * (size - length))
        partner = (torch.arange(len(pixels)) ^ 1).clamp_max(len(pixels) - 1).to(pixels.device)
        pixels = pixels.clone()
        pixels[:, :, y : y + length, x : x + length] = pixels[partner, :, y : y + length, x : x + length]
    return pixels


def centre(pixels: Tensor, size: int) -> Tensor:
    """The central ``[B, 3, size, size]`` of square photos."""
    begin = (pixels.shape[-1] - size) // 2
    return pixels[:, :, begin : begin + size, begin : begin + size]


def photos_of(step: int, count: int, settings: Settings) -> Tensor:
    """Indices of a step's photos: the next batch of an endless sequence of shuffled passes over all photos."""
    begin = step * settings.batch
    passes = range(begin // count, (begin + settings.batch - 1) // count + 1)
    order = torch.cat([shuffled(count, seed_of(settings.seed, "pass", each)) for each in passes])
    return order[begin % count : begin % count + settings.batch]


@lru_cache(maxsize=4)
def shuffled(count: int, seed: int) -> Tensor:
    """The numbers below ``count`` in random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def seed_of(*parts: object) -> int:
    """The seed of a stream of random numbers of its own."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


# ---------------------------------------------------------------------- towers


def _tower(encoder: Encoder, precision: str) -> Tower:
    """Raw features in fp32 from a tower that computes in ``precision``."""

    def features(pixels: Tensor) -> Tensor:
        with computing(encoder, precision):
            return encoder.raw(pixels)

    return features


def computing(encoder: Encoder, precision: str) -> torch.autocast:
    """Compute in ``precision`` from weights in fp32.

    A context for every pass: autocast caches cast weights, and those cached without gradients would be used in the next
    pass, whose gradients would then be missing.
    """
    return torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _compile(*encoders: Encoder) -> None:
    """Compile the blocks of vision transformers, on a GPU with a C compiler: all blocks share a few programs."""
    if not (encoders[0].device.type == "cuda" and can_compile()):
        return
    import torch._dynamo

    # One program for each place in the tower (3), use (attack, training, no gradients) and size of batch.
    torch._dynamo.config.cache_size_limit = 64
    for encoder in encoders:
        for module in encoder.tower.modules():
            if isinstance(module, Block):
                module.compile()
