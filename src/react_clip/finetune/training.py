"""Adversarial finetuning: from photos to a folder with a finetuned tower."""

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
from react_clip.encoders.checkpoints import TOWER, image_tower, lasting_name, load_tower
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.finetune.check import Check
from react_clip.finetune.folder import LOG, Row, RunFolder, read_log
from react_clip.finetune.settings import Settings
from react_clip.finetune.steps import Trainer, tower_file
from react_clip.storage import sha256_of, tensor_digest

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
    trainer = Trainer(encoder, method, photos, labels, class_features, settings, init)
    identity = {
        "method": method,
        "settings": settings.identity(),
        "weights": encoder.fingerprint(),
        "init": init and sha256_of(tower_file(init)),
        "data": {"photos": trainer.photos.digest(), "labels": tensor_digest(trainer.labels.cpu())},
        "classes": tensor_digest(trainer.class_features.cpu()),
    }
    run, is_first = RunFolder(Path(out), identity), trainer.group.rank == 0
    with run.held() if is_first else nullcontext():
        trainer.group.wait()  # until the first process has checked the folder
        was_finished = run.record() is not None
        if not was_finished:
            trainer.photos.load(encoder.device, progress=show)
            seconds = train(trainer, run, progress)
            if is_first:
                tower = image_tower(trainer.mean)
                tower = {key: each.half() if settings.half else each for key, each in tower.items()}
                run.finish(tower, {**_record(trainer, run, seconds), **(about or {})})
            trainer.group.wait()
        record = run.record()
        assert record is not None
        # Read back, so that the returned encoder is bit for bit the one that rc.load gives.
        finished = copy.deepcopy(encoder)
        load_tower(finished, run.path / TOWER)
    finished.name = str(run.path)
    return Finetuned(finished, run.path, record, was_finished)


def train(trainer: Trainer, run: RunFolder, progress: Progress | None = None) -> float:
    """Train from the last checkpoint to the last step; returns the seconds of all steps so far."""
    settings, first, began = trainer.settings, 0, time.monotonic()
    if (checkpoint := run.checkpoint()) is not None:
        trainer.restore(checkpoint)
        first, began = checkpoint["step"], began - checkpoint["seconds"]
    rows, steps = read_log(run.path / LOG)[:first], range(first, settings.steps)
    check = Check(trainer) if trainer.group.rank == 0 and len(trainer.held_out) > 1 else None
    written: Future[None] | None = None
    try:
        # The thread writes checkpoints while training goes on.
        with ThreadPoolExecutor(1) as writer:
            for step, (chosen, pixels) in zip(steps, trainer.photos.batches(map(trainer.chosen, steps)), strict=True):
                loss, rate = trainer.step(step, chosen, pixels)
                done, is_last = step + 1, step + 1 == settings.steps
                checked = check is not None and (is_last or done % settings.check_every == 0)
                rows.append(Row(done, loss, rate, *(check(done) if check and checked else ())))
                if progress is not None:
                    progress(done, settings.steps, loss)
                if trainer.group.rank == 0 and (is_last or done % settings.save_every == 0):
                    if written is not None:
                        written.result()  # raises what kept the last one from being written
                    seconds = time.monotonic() - began
                    state = trainer.saved(step=done, seconds=seconds, identity=run.identity)
                    written = writer.submit(run.write, [*rows], state)
            if written is not None:
                written.result()
    except torch.cuda.OutOfMemoryError:
        raise ReactClipError(f"a batch of {settings.batch} does not fit into the device's memory; halve it") from None
    return time.monotonic() - began


def _record(trainer: Trainer, run: RunFolder, seconds: float) -> dict[str, Any]:
    """The content of ``finetune.json`` for a run of this many seconds."""
    settings, encoder = trainer.settings, trainer.original
    losses = [row.loss for row in read_log(run.path / LOG)]
    last = losses[-math.ceil(len(losses) / 10) :]
    return {
        **{name: run.identity[name] for name in ("method", "weights", "init", "data")},
        "model": lasting_name(encoder.name),
        "photos": len(trainer.trained),
        "held_out": len(trainer.held_out),
        "unreadable": trainer.photos.unreadable,
        "classes": len(trainer.class_features) if trainer.method.needs_labels else 0,
        "settings": settings.to_dict(),
        "first_loss": losses[0],
        "final_loss": sum(last) / len(last),
        "seconds": round(seconds, 2),
        "photos_per_second": round(settings.steps * settings.batch / seconds, 1),
        "device": device_name(encoder.device),
        "processes": trainer.group.size,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tower": {"file": TOWER, "layout": "openai", "dtype": "fp16" if settings.half else "fp32"},
    }
