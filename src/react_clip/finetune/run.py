"""``finetune``: from an encoder and photos to a folder with a finetuned tower."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
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
from react_clip.finetune.folder import RunFolder, read_log
from react_clip.finetune.methods import Method, get
from react_clip.finetune.photos import Photos, checked_photos
from react_clip.finetune.training import Progress, Settings, Task, train
from react_clip.storage import tensor_digest
from react_clip.zeroshot import ZeroShotClassifier


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
        settings: how long, how fast, in which precision.
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
    return {
        "method": task.method.to_dict(),
        "model": lasting_name(task.original.name),
        "weights": task.original.fingerprint(),
        "photos": len(task.photos),
        "classes": len(task.class_features) if task.method.needs_labels else 0,
        "data": run.identity["data"],
        "settings": task.settings.to_dict(),
        "first_loss": losses[0] if losses else None,
        "final_loss": fmean(losses[-tail:]) if losses else None,
        "final_loss_is": f"the mean of the last {tail} steps",
        "seconds": round(seconds, 2),
        "device": device_name(task.student.device),
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "tower": {"file": TOWER, "layout": "openai", "dtype": "fp16" if task.settings.half else "fp32"},
    }
