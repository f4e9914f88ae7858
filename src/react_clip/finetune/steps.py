"""One step of finetuning: augment, attack, descend the loss, average the weights.

All random numbers of a step come from the seed and the step.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from react_clip.augment import affine
from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import image_parameters
from react_clip.encoders.layers import can_compile
from react_clip.encoders.vision import Block
from react_clip.errors import ReactClipError
from react_clip.finetune.methods import Batch, Method, Tower
from react_clip.finetune.photos import Photos
from react_clip.finetune.processes import Group
from react_clip.finetune.settings import Settings
from react_clip.linf import Ball, ascend, gradient
from react_clip.preprocess import to_float


@dataclass(frozen=True, eq=False)
class Task:
    """Models, method, photos and settings of a run; training changes the weights of ``student`` and ``mean`` only."""

    student: Encoder
    mean: Encoder
    """Has the average of the student's weights."""
    original: Encoder
    method: Method
    photos: Photos
    trained: Tensor
    """Indices of the photos that are trained on; the others are held out."""
    labels: Tensor
    class_features: Tensor
    """Unit features ``[K, D]``; without labels there is one row of zeros."""
    settings: Settings
    group: Group

    def chosen(self, step: int) -> Tensor:
        """Indices of the photos of a step that this process computes."""
        rows = self.group.rows(self.settings.batch)
        return self.trained[photos_of(step, len(self.trained), self.settings)[rows]]


class Trainer:
    """The weights, their average, the optimiser, and a step that changes them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.weights, self.means = image_parameters(task.student), image_parameters(task.mean)
        trained = [each.requires_grad_(True) for each in self.weights.values()]
        self.optimiser = task.method.optimiser(trained, lr=task.method.lr, fused=trained[0].is_cuda)
        _compile(task.student, task.mean, task.original)

    @torch.enable_grad()
    def step(self, number: int, chosen: Tensor, pixels: Tensor) -> tuple[float, float]:
        """Descend the loss of the photos with these indices; returns the loss and the learning rate."""
        settings, method, weights = self.task.settings, self.task.method, list(self.weights.values())
        rate = (settings.lr or method.lr) * settings.rate(number)
        for each in self.optimiser.param_groups:
            each["lr"] = rate
        loss = loss_of(self.task, number, chosen, pixels)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        self.task.group.average([loss, *(each.grad for each in weights if each.grad is not None)])
        length = torch.nn.utils.clip_grad_norm_(weights, method.longest_gradient)
        self.optimiser.step()
        with torch.no_grad():
            decay = min(settings.average, (number + 1) / (number + 10))
            torch._foreach_lerp_(tuple(self.means.values()), tuple(weights), 1 - decay)
        value, norm = torch.stack([loss, length]).tolist()  # the one time that a step waits for a GPU
        if not (math.isfinite(value) and math.isfinite(norm)):
            what = f"the loss is {value}" if not math.isfinite(value) else f"the gradient's length is {norm}"
            way = "try a smaller learning rate (--lr) or --dtype fp32, in another --out"
            raise ReactClipError(f"{what} at step {number + 1}; the last checkpoint is kept: {way}")
        return value, rate


def loss_of(task: Task, step: int, chosen: Tensor, pixels: Tensor) -> Tensor:
    """The loss of photos, attacked; and of a quarter of them as they are, with the weight ``clean``."""
    settings, device, size = task.settings, task.student.device, task.student.image_size
    # All processes draw for the whole batch and use their part.
    count = len(pixels) * task.group.size
    rows = task.group.rows(count)
    few = torch.Generator().manual_seed(seed_of(settings.seed, "step", step))
    cutmix = settings.cutmix if settings.cutmix is not None else 0.0 if task.method.needs_labels else 0.5
    pixels = to_float(pixels.to(device))
    pixels = augmented(pixels, size, settings.crop, cutmix, torch.rand(4, count, generator=few)[:, rows], few)
    many = torch.Generator(device).manual_seed(seed_of(settings.seed, "start", step))
    start = torch.rand((count, *pixels.shape[1:]), generator=many, device=device)[rows]
    student, original = _tower(task.student, settings.dtype), _tower(task.original, settings.dtype)
    batch = Batch(student, original, pixels, task.labels[chosen.to(device)], task.class_features)
    task.student.tower.requires_grad_(False)  # the attack needs no gradients of the weights
    images = attacked(task.method, batch, settings.budget(step), settings.attack_steps, start)
    task.student.tower.requires_grad_(True)
    loss = task.method.loss(batch, images)
    if settings.clean:
        quarter = batch.quarter()
        loss = loss + settings.clean * task.method.loss(quarter, quarter.pixels)
    return loss


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
