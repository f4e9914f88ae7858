"""Adversarial finetuning: from photos to a folder with a finetuned tower.

Every step attacks the photos of a batch and then descends the method's loss. All random numbers of a step come from the
seed and the step, so a run that continues from a checkpoint goes on as if it had not stopped.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip.data.dataset import ImageDataset
from react_clip.encoders import Encoder
from react_clip.encoders.checkpoints import TOWER, find_tower, image_tower, lasting_name, load_tower
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.finetune.check import Check
from react_clip.finetune.folder import Row, RunFolder, read_log, snapshot
from react_clip.finetune.methods import get
from react_clip.finetune.photos import Photos
from react_clip.finetune.processes import group
from react_clip.finetune.settings import Settings
from react_clip.finetune.steps import Task, Trainer, seed_of, shuffled
from react_clip.preprocess import check_range
from react_clip.storage import sha256_of, tensor_digest
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
    method: str,
    photos: Tensor | ImageDataset,
    labels: Tensor | None = None,
    class_features: Tensor | None = None,
    *,
    out: str | Path,
    settings: Settings | None = None,
    init: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    show: bool = False,
) -> Finetuned:
    """Finetune a copy of an encoder's image tower against attacks, into a folder that ``rc.load`` reads.

    The same call on the same folder continues a run that was interrupted, and ends with the same tower (bit for bit on
    the CPU). The encoder that is given is not touched. In processes of ``torchrun`` all make the same call.

    Args:
        encoder: from :func:`react_clip.load`, in fp32.
        method: ``"tecoa"``, ``"pmg-aft"``, ``"fare"`` or ``"clip-ft"``.
        photos: a set, or squares ``[N, 3, S, S]`` as uint8 or as floats in [0, 1], kept as uint8; larger squares than
            the encoder takes leave more to crop.
        labels: a class index per photo; FARE needs none.
        class_features: ``[K, dim]``, fixed throughout; FARE needs none.
        out: the folder.
        settings: how long, in which precision, against which attack.
        init: a checkpoint or the folder of another run whose weights are the first ones; the target stays ``encoder``.
        about: plain values for ``finetune.json``, such as the data set's name.
        progress: called after each step.
        show: show how far the photos are read.
    """
    settings = settings or Settings()
    task = task_of(encoder, method, photos, labels, class_features, settings, init)
    identity = {
        "method": method,
        "settings": settings.identity(),
        "weights": encoder.fingerprint(),
        "init": init and sha256_of(_tower_file(init)),
        "data": {"photos": task.photos.digest(), "labels": tensor_digest(task.labels.cpu())},
        "classes": tensor_digest(task.class_features.cpu()),
    }
    run = RunFolder(Path(out), identity)
    with run.held() if task.group.rank == 0 else nullcontext():
        task.group.wait()  # until the first process has checked the folder
        record = run.record()
        was_finished = record is not None
        if record is None:
            task.photos.load(encoder.device, progress=show)
            seconds = train(task, run, progress)
            if task.group.rank == 0:
                tower = {key: each.half() if settings.half else each for key, each in image_tower(task.mean).items()}
                run.finish(tower, {**_record(task, run, seconds), **(about or {})})
            task.group.wait()
            record = run.record()
        assert record is not None
        # Read back, so that the returned encoder is bit for bit the one that rc.load gives.
        finished = copy.deepcopy(encoder)
        load_tower(finished, run.path / TOWER)
    finished.name = str(run.path)
    return Finetuned(finished, run.path, record, was_finished)


def _record(task: Task, run: RunFolder, seconds: float) -> dict[str, Any]:
    """What ``finetune.json`` says of a run of this many seconds."""
    settings, encoder = task.settings, task.original
    losses = [row.loss for row in read_log(run.log)]
    last = losses[-math.ceil(len(losses) / 10) :]
    return {
        "method": run.identity["method"],
        "model": lasting_name(encoder.name),
        "weights": run.identity["weights"],
        "init": run.identity["init"],
        "photos": len(task.trained),
        "held_out": len(task.photos) - len(task.trained),
        "unreadable": task.photos.unreadable,
        "classes": len(task.class_features) if task.method.needs_labels else 0,
        "data": run.identity["data"],
        "settings": settings.to_dict(),
        "first_loss": losses[0],
        "final_loss": sum(last) / len(last),
        "seconds": round(seconds, 2),
        "photos_per_second": round(settings.steps * settings.batch / seconds, 1),
        "device": device_name(encoder.device),
        "processes": task.group.size,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tower": {"file": TOWER, "layout": "openai", "dtype": "fp16" if settings.half else "fp32"},
    }


# ---------------------------------------------------------------------- the training loop


def train(task: Task, run: RunFolder, progress: Progress | None = None) -> float:
    """Train from the last checkpoint to the last step; returns the seconds of all steps so far."""
    settings, began = task.settings, time.monotonic()
    trainer = Trainer(task)
    first, seconds = run.restore(trainer.weights, trainer.means, trainer.optimiser)
    rows = read_log(run.log)[:first]
    check = Check(task) if task.group.rank == 0 and len(task.photos) - len(task.trained) > 1 else None
    steps = range(first, settings.steps)
    written: Future[None] | None = None
    try:
        # The thread writes checkpoints while training goes on.
        with ThreadPoolExecutor(1) as writer:
            for step, (chosen, pixels) in zip(steps, task.photos.batches(map(task.chosen, steps)), strict=True):
                loss, rate = trainer.step(step, chosen, pixels)
                done, is_last = step + 1, step + 1 == settings.steps
                checked = check is not None and (is_last or done % settings.check_every == 0)
                rows.append(Row(done, loss, rate, *(check(done) if check and checked else ())))
                if progress is not None:
                    progress(done, settings.steps, loss)
                if task.group.rank == 0 and (is_last or done % settings.save_every == 0):
                    if written is not None:
                        written.result()  # raises what kept the last one from being written
                    tensors = snapshot(trainer.weights, trainer.means, trainer.optimiser)
                    written = writer.submit(run.write, [*rows], tensors, done, seconds + time.monotonic() - began)
            if written is not None:
                written.result()
    except torch.cuda.OutOfMemoryError:
        raise ReactClipError(f"a batch of {settings.batch} does not fit into the device's memory; halve it") from None
    return seconds + time.monotonic() - began


# ---------------------------------------------------------------------- what is checked first


def task_of(
    encoder: Encoder,
    name: str,
    source: Tensor | ImageDataset,
    labels: Tensor | None,
    classes: Tensor | None,
    settings: Settings,
    init: str | Path | None = None,
) -> Task:
    """Everything checked; models, labels and class features on the encoder's device."""
    method, processes = get(name), group()
    own = {f"visual.{key}": tensor for key, tensor in image_tower(encoder).items()}
    find_tower(own, Path(encoder.name))  # refuses an encoder without a tower that could be read back
    if encoder.dtype != torch.float32:
        way = "load fp32, and compute in bf16 with Settings(dtype='bf16')"
        raise ReactClipError(f"{encoder.name!r} is loaded in {encoder.dtype}; small steps vanish in it: {way}")
    if isinstance(source, Tensor):
        source = _as_uint8(source, encoder)
    if not method.needs_labels:
        labels, features = torch.zeros(len(source), dtype=torch.long), torch.zeros(1, encoder.dim)
    elif labels is None or classes is None:
        missing = "labels" if labels is None else "class_features"
        raise ReactClipError(f"{name} needs {missing}; give them, or use fare, which needs none")
    elif settings.cutmix:
        raise ReactClipError(f"cutmix mixes photos of several classes, and {name} needs labels; leave it out")
    else:
        class_names = [f"class {number}" for number in range(len(classes))]
        features = ZeroShotClassifier.from_features(encoder, class_names, classes.float()).class_features
        if labels.shape != (len(source),) or labels.is_floating_point() or labels.dtype == torch.bool:
            given = f"labels are {labels.dtype} of shape {list(labels.shape)}"
            raise ReactClipError(f"{given}; {len(source)} photos need one class index each")
        if int(labels.min()) < 0 or int(labels.max()) >= len(features):
            span = f"labels span {int(labels.min())} to {int(labels.max())}"
            raise ReactClipError(f"{span}; there are class features for 0 to {len(features) - 1}")
    if processes.size > 1 and not method.splits:
        raise ReactClipError(f"{name} compares all photos of a batch, which processes cannot share; use one, or fare")
    processes.rows(settings.batch)
    student = copy.deepcopy(encoder).eval()
    if init is not None:
        load_tower(student, _tower_file(init))
    mean, original = copy.deepcopy(student), copy.deepcopy(encoder).eval()
    trained = torch.arange(len(source))
    if settings.check_every:
        trained = shuffled(len(source), seed_of(settings.seed, "held out"))
        trained = trained[min(settings.check_photos, len(source) // 10) :].sort().values
    device = encoder.device
    photos, labels, features = Photos(source, encoder.preprocessing), labels.long().to(device), features.to(device)
    return Task(student, mean, original, method, photos, trained, labels, features, settings, processes)


def _as_uint8(pixels: Tensor, encoder: Encoder) -> Tensor:
    size = encoder.image_size
    if pixels.ndim != 4 or pixels.shape[1] != 3 or not size <= pixels.shape[2] == pixels.shape[3] or not len(pixels):
        takes = f"{encoder.name!r} takes [N, 3, {size}, {size}] with N >= 1, or larger squares"
        raise ReactClipError(f"photos have shape {list(pixels.shape)}; {takes}")
    if pixels.dtype == torch.uint8:
        return pixels.detach()
    check_range(pixels)
    return pixels.detach().mul(255).round().to(torch.uint8)


def _tower_file(init: str | Path) -> Path:
    """The weights in a file, or in the folder of a finished run."""
    path = Path(init) / TOWER if Path(init).is_dir() else Path(init)
    if not path.is_file():
        raise ReactClipError(f"{path} does not exist; give a checkpoint, or the folder of a finished run")
    return path
