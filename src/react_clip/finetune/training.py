"""``finetune``: from an encoder and photos to a folder with a finetuned tower.

Every step attacks the photos of a batch and then descends the method's loss.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import TOWER, image_parameters, image_tower, lasting_name, load_tower
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.finetune.folder import Row, RunFolder, read_log, write_log
from react_clip.finetune.methods import Batch, Method, Tower, get
from react_clip.finetune.photos import Photos, augmented, checked_photos, stream_keys, upload
from react_clip.finetune.settings import Settings
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


def finetune(
    encoder: Encoder,
    method: Method | str,
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
        method: ``"tecoa"``, ``"pmg-aft"``, ``"fare"``, ``"clip-ft"``, or one of their classes with other values.
        pixels: photos ``[N, 3, S, S]``, as uint8 or as floats in [0, 1]; they are kept as uint8.
        labels: a class index per photo; FARE needs none.
        class_features: ``[K, dim]``, fixed throughout; FARE needs none.
        out: the folder.
        settings: how long, in which precision, against which attack; the learning rate belongs to the method.
        about: plain values for ``finetune.json``, such as the data set's name.
        progress: called after each step.
    """
    method = get(method) if isinstance(method, str) else method
    settings, folder = settings or Settings(), Path(out)
    features = _checked_classes(encoder, method, labels, class_features)
    photos = checked_photos(encoder, pixels, labels if method.needs_labels else None, len(features))
    if encoder.dtype != torch.float32:
        raise ReactClipError(
            f"{encoder.name!r} is loaded in {encoder.dtype}; small steps vanish in it: load fp32, and compute in bf16 "
            "with Settings(dtype='bf16')"
        )
    run = RunFolder(folder, _identity(encoder, method, photos, features, settings))
    with run.held():
        student = copy.deepcopy(encoder).eval()
        record = run.record()
        was_finished = record is not None
        if record is None:
            task = Task(student, encoder, method, photos, features, settings)
            seconds = train(task, run, progress)
            tower = {key: tensor.half() if settings.half else tensor for key, tensor in image_tower(student).items()}
            record = run.finish(tower, _record(task, run, seconds, about or {}))
        # Read back, so that the returned encoder is bit for bit the one that rc.load gives.
        load_tower(student, folder / TOWER)
    student.name = str(folder)
    return Finetuned(student, folder, record, was_finished)


def _checked_classes(encoder: Encoder, method: Method, labels: Tensor | None, class_features: Tensor | None) -> Tensor:
    """Unit class features ``[K, D]`` on the encoder's device; one row of zeros for methods without labels."""
    if not method.needs_labels:
        return torch.zeros(1, encoder.dim, device=encoder.device)
    if labels is None or class_features is None:
        missing = "labels" if labels is None else "class_features"
        raise ReactClipError(f"{method.kind} needs {missing}; give them, or use fare, which needs none")
    names = [f"class {number}" for number in range(len(class_features))]
    return ZeroShotClassifier.from_features(encoder, names, class_features.float()).class_features


def _identity(
    encoder: Encoder, method: Method, photos: Photos, class_features: Tensor, settings: Settings
) -> dict[str, Any]:
    """All values that decide the outcome, as JSON values."""
    image_parameters(encoder)  # refuses an encoder without a tower to train
    return {
        "method": method.to_dict(),
        "settings": settings.identity(),
        "weights": encoder.fingerprint(),
        "data": {"photos": tensor_digest(photos.pixels), "labels": tensor_digest(photos.labels)},
        "classes": tensor_digest(class_features),
    }


def _record(task: Task, run: RunFolder, seconds: float, about: Mapping[str, Any]) -> dict[str, Any]:
    losses = [row.loss for row in read_log(run.log)]
    tail = math.ceil(len(losses) / 10)
    classes = len(task.class_features) if task.method.needs_labels else 0
    final_loss = fmean(losses[-tail:]) if losses else None
    return {
        "method": task.method.to_dict(),
        "model": lasting_name(task.original.name),
        "weights": task.original.fingerprint(),
        "photos": len(task.photos),
        "classes": classes,
        "data": run.identity["data"],
        "settings": task.settings.to_dict(),
        "first_loss": losses[0] if losses else None,
        "final_loss": final_loss,
        "final_loss_is": f"the mean of the last {tail} steps",
        "notes": _notes(task.method, classes, final_loss),
        "seconds": round(seconds, 2),
        "device": device_name(task.student.device),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "tower": {"file": TOWER, "layout": "openai", "dtype": "fp16" if task.settings.half else "fp32"},
    }


def _notes(method: Method, classes: int, final_loss: float | None) -> list[str]:
    """A line if the tower answers worse than one that does not look at the image."""
    limit = method.loss_of_equal_answers(classes)
    if final_loss is None or final_loss <= limit:
        return []
    return [
        f"the loss ended at {final_loss:.3g}, above {limit:.3g}, that of equal answers for all {classes:,} classes: "
        "the training has not converged; take more steps, another seed or a smaller learning rate, in another folder"
    ]


# ---------------------------------------------------------------------- the training loop


@dataclass(frozen=True, eq=False)
class Task:
    """Models, method, data and settings of a run; training changes the student's image tower only."""

    student: Encoder
    original: Encoder
    method: Method
    photos: Photos
    class_features: Tensor
    """Unit features ``[K, D]`` on the student's device; one row of zeros for methods without labels."""
    settings: Settings


@torch.enable_grad()
def train(task: Task, folder: RunFolder, progress: Progress | None = None) -> float:
    """Train from the folder's last checkpoint to the last step; returns the seconds of all steps so far."""
    settings, began = task.settings, time.monotonic()
    weights = image_parameters(task.student)
    trained = [weight.requires_grad_(True) for weight in weights.values()]
    optimiser = task.method.optimiser.make(trained, fused=task.student.device.type == "cuda")
    done, seconds = folder.restore(weights, optimiser)
    rows = read_log(folder.log)[:done]
    try:
        for step in range(done + 1, settings.steps + 1):
            rate = task.method.optimiser.lr * settings.schedule(step - 1)
            for group in optimiser.param_groups:
                group["lr"] = rate
            loss = gradients(task, step - 1)
            _check_finite([loss], f"the loss is {loss} at step {step}")
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            rows.append(Row(step, float(loss), rate))
            if progress is not None:
                progress(step, settings.steps, float(loss))
            if step % settings.save_every == 0 or step == settings.steps:
                # A finite loss can have an infinite gradient.
                _check_finite(list(weights.values()), f"the weights are not finite after step {step}")
                # The log first: rows of steps after the checkpoint are dropped when the run continues.
                write_log(folder.log, rows)
                folder.save(step, seconds + time.monotonic() - began, weights, optimiser)
    except torch.cuda.OutOfMemoryError:
        raise ReactClipError(
            f"a batch of {settings.batch} does not fit into the device's memory; halve --batch and double --accumulate"
        ) from None
    finally:
        task.student.requires_grad_(False)
    return seconds + time.monotonic() - began


def _check_finite(values: Sequence[Tensor], problem: str) -> None:
    if not bool(torch.stack([torch.isfinite(value).all() for value in values]).all()):
        raise ReactClipError(
            f"{problem}; the last checkpoint is kept: try a smaller learning rate (--lr) or --dtype fp32, in another "
            "--out"
        )


def gradients(task: Task, step: int) -> Tensor:
    """Add the gradients of one step to the student's weights; returns its mean loss, on the device."""
    settings, device = task.settings, task.student.device
    student, original = _tower(task.student, settings.dtype), _tower(task.original, settings.dtype)
    indices = task.photos.indices(step, settings.photos_per_step, settings.seed)
    start_keys, augment_keys = stream_keys(indices, step, settings.seed)
    total = torch.zeros((), device=device)
    for begin in range(0, len(indices), settings.batch):
        part = slice(begin, begin + settings.batch)
        pixels, labels = task.photos.batch(indices[part], device)
        pixels = augmented(pixels, upload(augment_keys[part], device), settings.augment)
        batch = Batch(student, original, pixels, labels, task.class_features, settings.photos_per_step)
        attacked = settings.attack(task.method, batch, upload(start_keys[part], device))
        loss = task.method.loss(batch, attacked).mean() / settings.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def _tower(encoder: Encoder, precision: str) -> Tower:
    """Raw features in fp32 from a tower that computes in ``precision``."""

    def features(pixels: Tensor) -> Tensor:
        # A context for every pass: autocast caches cast weights, and those cached without gradients would be used in
        # the next pass, whose gradients would then be missing.
        with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            return encoder.raw(pixels)

    return features
