"""``finetune``: from an encoder and photos to a folder with a finetuned tower.

Every step attacks the photos of a batch and then descends the method's loss. All random numbers of a step come from the
seed and the step, so a run that continues from a checkpoint goes on as if it had not stopped.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip.augment import affine
from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import TOWER, image_parameters, image_tower, lasting_name, load_tower
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.finetune.folder import Row, RunFolder, read_log, write_log
from react_clip.finetune.methods import Batch, Method, Tower, get
from react_clip.finetune.settings import Settings
from react_clip.linf import Ball, ascend, gradient
from react_clip.storage import tensor_digest
from react_clip.zeroshot import ZeroShotClassifier

Progress = Callable[[int, int, float], None]
"""Called with the steps done, the steps in all, and the latest loss."""


@dataclass(frozen=True, eq=False)
class Finetuned:
    """A finished run."""

    encoder: Encoder
    """The finetuned encoder, the same as ``rc.load(folder)``."""
    folder: Path
    record: dict[str, Any]
    """The content of ``finetune.json``."""
    was_finished: bool
    """The folder was finished before this call, which did nothing."""


@dataclass(frozen=True, eq=False)
class Task:
    """Models, method, photos and settings of a run; training changes the student's image tower only."""

    student: Encoder
    original: Encoder
    method: Method
    pixels: Tensor
    """uint8 ``[N, 3, S, S]``, on the device where they fit there."""
    labels: Tensor
    class_features: Tensor
    """Unit features ``[K, D]``; without labels there is one row of zeros."""
    settings: Settings


def finetune(
    encoder: Encoder,
    method: str,
    pixels: Tensor,
    labels: Tensor | None = None,
    class_features: Tensor | None = None,
    *,
    out: str | Path,
    settings: Settings | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Finetuned:
    """Finetune a copy of an encoder's image tower against attacks, into a folder that ``rc.load`` reads.

    The same call on the same folder continues a run that was interrupted, and ends with the same tower (bit for bit on
    the CPU). The encoder that is given is not touched.

    Args:
        encoder: from :func:`react_clip.load`, in fp32.
        method: ``"tecoa"``, ``"pmg-aft"``, ``"fare"`` or ``"clip-ft"``.
        pixels: photos ``[N, 3, S, S]``, as uint8 or as floats in [0, 1]; they are kept as uint8.
        labels: a class index per photo; FARE needs none.
        class_features: ``[K, dim]``, fixed throughout; FARE needs none.
        out: the folder.
        settings: how long, in which precision, against which attack.
        about: plain values for ``finetune.json``, such as the data set's name.
        progress: called after each step.
    """
    settings = settings or Settings()
    task = _task(encoder, method, pixels, labels, class_features, settings)
    identity = {
        "method": method,
        "settings": settings.identity(),
        "weights": encoder.fingerprint(),
        "data": {"photos": tensor_digest(task.pixels.cpu()), "labels": tensor_digest(task.labels.cpu())},
        "classes": tensor_digest(task.class_features.cpu()),
    }
    run = RunFolder(Path(out), identity)
    with run.held():
        record = run.record()
        was_finished = record is not None
        if record is None:
            seconds = train(task, run, progress)
            losses = [row.loss for row in read_log(run.log)]
            last = losses[-math.ceil(len(losses) / 10) :]
            record = {
                "method": method,
                "model": lasting_name(encoder.name),
                "weights": identity["weights"],
                "photos": len(task.pixels),
                "classes": len(task.class_features) if task.method.needs_labels else 0,
                "data": identity["data"],
                "settings": settings.to_dict(),
                "first_loss": losses[0],
                "final_loss": sum(last) / len(last),
                "seconds": round(seconds, 2),
                "photos_per_second": round(settings.steps * settings.batch / seconds, 1),
                "device": device_name(encoder.device),
                "versions": versions(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                **(about or {}),
                "tower": {"file": TOWER, "layout": "openai", "dtype": "fp16" if settings.half else "fp32"},
            }
            tower = {key: each.half() if settings.half else each for key, each in image_tower(task.student).items()}
            record = run.finish(tower, record)
        # Read back, so that the returned encoder is bit for bit the one that rc.load gives.
        load_tower(task.student, run.path / TOWER)
    task.student.name = str(run.path)
    return Finetuned(task.student, run.path, record, was_finished)


def _task(
    encoder: Encoder, name: str, pixels: Tensor, labels: Tensor | None, classes: Tensor | None, settings: Settings
) -> Task:
    """Everything checked and on the encoder's device."""
    method = get(name)
    image_parameters(encoder)  # refuses an encoder without a tower to train
    if encoder.dtype != torch.float32:
        way = "load fp32, and compute in bf16 with Settings(dtype='bf16')"
        raise ReactClipError(f"{encoder.name!r} is loaded in {encoder.dtype}; small steps vanish in it: {way}")
    if pixels.dtype != torch.uint8:
        encoder.check(pixels)
        pixels = pixels.detach().mul(255).round().to(torch.uint8)
    size = encoder.image_size
    if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size) or not len(pixels):
        takes = f"{encoder.name!r} takes [N, 3, {size}, {size}] with N >= 1"
        raise ReactClipError(f"photos have shape {list(pixels.shape)}; {takes}")
    if not method.needs_labels:
        labels, features = torch.zeros(len(pixels), dtype=torch.long), torch.zeros(1, encoder.dim)
    elif labels is None or classes is None:
        missing = "labels" if labels is None else "class_features"
        raise ReactClipError(f"{name} needs {missing}; give them, or use fare, which needs none")
    elif settings.cutmix:
        raise ReactClipError(f"cutmix mixes photos of several classes, and {name} needs labels; leave it out")
    else:
        class_names = [f"class {number}" for number in range(len(classes))]
        features = ZeroShotClassifier.from_features(encoder, class_names, classes.float()).class_features
        if labels.shape != (len(pixels),) or labels.is_floating_point() or labels.dtype == torch.bool:
            given = f"labels are {labels.dtype} of shape {list(labels.shape)}"
            raise ReactClipError(f"{given}; {len(pixels)} photos need one class index each")
        if int(labels.min()) < 0 or int(labels.max()) >= len(features):
            span = f"labels span {int(labels.min())} to {int(labels.max())}"
            raise ReactClipError(f"{span}; there are class features for 0 to {len(features) - 1}")
    device = encoder.device
    fits = device.type != "cuda" or pixels.nbytes < torch.cuda.mem_get_info(device)[0] // 2
    pixels = pixels.detach().to(device if fits else "cpu")
    student = copy.deepcopy(encoder).eval()
    return Task(student, encoder, method, pixels, labels.long().to(device), features.to(device), settings)


# ---------------------------------------------------------------------- the training loop


@torch.enable_grad()
def train(task: Task, run: RunFolder, progress: Progress | None = None) -> float:
    """Train from the last checkpoint to the last step; returns the seconds of all steps so far."""
    settings, method, began = task.settings, task.method, time.monotonic()
    weights = image_parameters(task.student)
    optimiser = _optimiser(method, [each.requires_grad_(True) for each in weights.values()])
    average = {name: each.detach().clone() for name, each in weights.items()} if settings.average else {}
    first, seconds = run.restore(weights, average, optimiser)
    rows = read_log(run.log)[:first]
    try:
        for step in range(first, settings.steps):
            rate = (settings.lr or method.lr) * settings.rate(step)
            for group in optimiser.param_groups:
                group["lr"] = rate
            loss = _loss(task, step)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            value = loss.item()
            if not math.isfinite(value):
                raise _not_finite(f"the loss is {value} at step {step + 1}")
            optimiser.step()
            for name, mean in average.items():
                mean.lerp_(weights[name].detach(), 1 - min(settings.average, (step + 1) / (step + 10)))
            rows.append(Row(step + 1, value, rate))
            if progress is not None:
                progress(step + 1, settings.steps, value)
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                # A finite loss can have an infinite gradient.
                if not all(bool(each.isfinite().all()) for each in weights.values()):
                    raise _not_finite(f"the weights are not finite after step {step + 1}")
                # The log first: rows of steps after the checkpoint are dropped when the run continues.
                write_log(run.log, rows)
                run.save(step + 1, seconds + time.monotonic() - began, weights, average, optimiser)
        with torch.no_grad():
            for name, mean in average.items():
                weights[name].copy_(mean)
    except torch.cuda.OutOfMemoryError:
        raise ReactClipError(f"a batch of {settings.batch} does not fit into the device's memory; halve it") from None
    finally:
        task.student.requires_grad_(False)
    return seconds + time.monotonic() - began


def _loss(task: Task, step: int) -> Tensor:
    """The loss of a step's photos, attacked; and of a quarter of them as they are, with the weight ``clean``."""
    settings, device = task.settings, task.student.device
    draws = torch.Generator(device).manual_seed(_seed(settings.seed, "step", step))
    chosen = _photos_of(step, len(task.pixels), settings)
    pixels = task.pixels[chosen.to(task.pixels.device)].to(device).float().div_(255.0)
    pixels = augmented(pixels, settings, draws)
    student, original = _tower(task.student, settings.dtype), _tower(task.original, settings.dtype)
    batch = Batch(student, original, pixels, task.labels[chosen.to(device)], task.class_features)
    loss = task.method.loss(batch, attacked(task.method, batch, settings, step, draws))
    if settings.clean:
        quarter = batch.first(max(1, len(pixels) // 4))
        loss = loss + settings.clean * task.method.loss(quarter, quarter.pixels)
    return loss


def attacked(method: Method, batch: Batch, settings: Settings, step: int, draws: torch.Generator) -> Tensor:
    """Sign-gradient ascent on the method's objective, from a uniform start in the ball of this step's budget."""

    def gradient_at(images: Tensor) -> Tensor:
        pixels = images.detach().requires_grad_()
        found = gradient(method.objective(batch, batch.student(pixels)), pixels)
        assert found is not None, "image towers are differentiable"
        return found

    eps = settings.budget(step)
    ball = Ball(batch.pixels, eps)
    start = ball.project(batch.pixels + eps * (2 * _uniform(batch.pixels.shape, draws) - 1))
    return ascend(gradient_at, start, ball, steps=settings.attack_steps, step_size=2 * eps / settings.attack_steps)


def augmented(pixels: Tensor, settings: Settings, draws: torch.Generator) -> Tensor:
    """Half of the photos mirrored, random squares cut out and resized, a rectangle of the next photo pasted in."""
    count, size = len(pixels), pixels.shape[-1]
    mirror, side, left, top = _uniform((4, count), draws)
    pixels = torch.where((mirror < 0.5)[:, None, None, None], pixels.flip(3), pixels)
    if settings.crop < 1:
        side = settings.crop + (1 - settings.crop) * side
        shift = (2 * torch.stack([left, top], dim=1) - 1) * (1 - side)[:, None]
        pixels = affine(pixels, side[:, None, None] * torch.eye(2, device=side.device), shift, "border")
    mix, area, across, down = _uniform((4,), draws).tolist()
    if mix < settings.cutmix:
        length = round(size * math.sqrt(area))
        x, y = round(across * (size - length)), round(down * (size - length))
        pixels = pixels.clone()
        pixels[:, :, y : y + length, x : x + length] = pixels.roll(1, 0)[:, :, y : y + length, x : x + length]
    return pixels


def _photos_of(step: int, count: int, settings: Settings) -> Tensor:
    """Indices of a step's photos: the next batch of an endless sequence of shuffled passes over all photos."""
    begin = step * settings.batch
    passes = range(begin // count, (begin + settings.batch - 1) // count + 1)
    seeds = [torch.Generator().manual_seed(_seed(settings.seed, "pass", each)) for each in passes]
    order = torch.cat([torch.randperm(count, generator=seed) for seed in seeds])
    return order[begin % count : begin % count + settings.batch]


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def _uniform(shape: tuple[int, ...] | torch.Size, draws: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=draws, device=draws.device)


def _optimiser(method: Method, weights: list[Tensor]) -> torch.optim.Optimizer:
    fused = weights[0].is_cuda
    if method.optimiser == "sgd":
        return torch.optim.SGD(weights, lr=method.lr, momentum=0.9, weight_decay=method.weight_decay, fused=fused)
    return torch.optim.AdamW(weights, lr=method.lr, weight_decay=method.weight_decay, fused=fused)


def _tower(encoder: Encoder, precision: str) -> Tower:
    """Raw features in fp32 from a tower that computes in ``precision``."""

    def features(pixels: Tensor) -> Tensor:
        # A context for every pass: autocast caches cast weights, and those cached without gradients would be used in
        # the next pass, whose gradients would then be missing.
        with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            return encoder.raw(pixels)

    return features


def _not_finite(problem: str) -> ReactClipError:
    way = "try a smaller learning rate (--lr) or --dtype fp32, in another --out"
    return ReactClipError(f"{problem}; the last checkpoint is kept: {way}")
