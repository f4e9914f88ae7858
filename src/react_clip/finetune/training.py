"""The training loop: attack the photos, descend the method's loss, keep what a kill must not destroy."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import image_parameters
from react_clip.errors import ReactClipError
from react_clip.finetune.folder import LOG, Place, RunFolder
from react_clip.finetune.loss_log import LossLog, Progress
from react_clip.finetune.methods import Batch, Method, Tower
from react_clip.finetune.photos import Photos, augmented, stream_keys, upload
from react_clip.finetune.settings import Settings


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained on what: the student's image tower moves, all else stands still."""

    student: Encoder
    original: Encoder
    method: Method
    photos: Photos
    class_features: Tensor
    """Unit features ``[K, D]`` on the student's device; one row of zeros for methods without labels."""
    settings: Settings


@torch.enable_grad()
def train(task: Task, folder: RunFolder, progress: Progress | None = None) -> float:
    """Train from where the folder stands to the last step; returns the seconds spent on it in all."""
    settings, began = task.settings, time.monotonic()
    weights = image_parameters(task.student)
    optimiser = torch.optim.AdamW(
        [weight.requires_grad_(True) for weight in weights.values()],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        fused=task.student.device.type == "cuda",
    )
    place = folder.restore(weights, optimiser)
    log = LossLog(folder.path / LOG, done=place.step, total=settings.steps, progress=progress)
    try:
        for step in range(place.step, settings.steps):
            rate = settings.learning_rate(step)
            for group in optimiser.param_groups:
                group["lr"] = rate
            log.add(step + 1, gradients(task, step), rate)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                log.flush()
                _check_finite(list(weights.values()), step + 1)
                folder.save(Place(step + 1, place.seconds + time.monotonic() - began), weights, optimiser)
    except torch.cuda.OutOfMemoryError:
        raise ReactClipError(
            f"a batch of {settings.batch} does not fit into the device's memory; halve --batch and double --accumulate"
        ) from None
    finally:
        log.close()
        task.student.requires_grad_(False)
    return place.seconds + time.monotonic() - began


def gradients(task: Task, step: int) -> Tensor:
    """Add the gradients of one step to the student's weights; returns its mean loss, still on the device."""
    settings, device = task.settings, task.student.device
    student, original = _tower(task.student, settings.dtype), _tower(task.original, settings.dtype)
    indices = task.photos.indices(step, settings.photos_per_step, settings.seed)
    start_keys, change_keys = stream_keys(indices, step, settings.seed)
    total = torch.zeros((), device=device)
    for begin in range(0, len(indices), settings.batch):
        part = slice(begin, begin + settings.batch)
        pixels, labels = task.photos.batch(indices[part], device)
        pixels = augmented(pixels, upload(change_keys[part], device), settings.augment)
        batch = Batch(student, original, pixels, labels, task.class_features)
        attacked = settings.attack(task.method, batch, upload(start_keys[part], device))
        loss = task.method.loss(batch, attacked).mean() / settings.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _tower(encoder: Encoder, precision: str) -> Tower:
    """Raw features in fp32 from a tower that computes in ``precision``."""

    def features(pixels: Tensor) -> Tensor:
        # A context for every pass: autocast remembers cast weights, and those of a pass without gradients would
        # silence the gradients of the next one.
        with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            return encoder.raw_features(pixels)

    return features


def _check_finite(weights: list[torch.nn.Parameter], step: int) -> None:
    """A finite loss can still have had a gradient that was not; such weights must not replace a good checkpoint."""
    if not bool(torch.stack([torch.isfinite(weight).all() for weight in weights]).all()):
        raise ReactClipError(
            f"the weights are not finite after step {step}; the last checkpoint is kept: try a smaller learning rate "
            "(--lr) or --dtype fp32, in another --out"
        )
