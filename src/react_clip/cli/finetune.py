"""``react-clip finetune``: train an image tower against attacks (TeCoA, PMG-AFT, FARE, CLIP-FT)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path

import torch

from react_clip import ReactClipError, load
from react_clip.cli.common import (
    add_dataset_options,
    add_model_options,
    command_line,
    load_photos,
    notice,
    try_to_plot,
)
from react_clip.cli.progress import Progress
from react_clip.config import pop_kind
from react_clip.finetune import Finetuned, InnerAttack, Method, Settings, finetune, get, names
from react_clip.finetune.folder import read_log
from react_clip.finetune.photos import check_memory

_PLOT = "loss.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("method", help=f"one of {', '.join(names())}")
    add_dataset_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"updates of the weights ({Settings.steps})")
    length.add_argument("--epochs", type=float, help="passes over the photos, instead of --steps")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="photos at a time (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=Settings.accumulate, help="batches per update (%(default)s)")
    parser.add_argument("--lr", type=float, default=Settings.lr, help="largest learning rate (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=Settings.weight_decay, help="of AdamW (%(default)s)")
    parser.add_argument("--warmup", type=int, help="steps until that rate (a tenth of all)")
    parser.add_argument("--eps", default="1/255", help="largest change of a pixel in the attack (%(default)s)")
    parser.add_argument("--attack-step", default="1/255", help="step size of the attack (%(default)s)")
    parser.add_argument("--attack-steps", type=int, default=InnerAttack.steps, help="its iterations (%(default)s)")
    parser.add_argument("--clean-weight", type=float, help="pmg-aft: weight of KL(clean || adversarial) (1)")
    parser.add_argument("--original-weight", type=float, help="pmg-aft: weight of KL(original || adversarial) (1)")
    parser.add_argument("--augment", default=Settings.augment, help="none, flip, crop (%(default)s)")
    parser.add_argument("--save-every", type=int, default=Settings.save_every, help="steps a checkpoint (%(default)s)")
    parser.add_argument("--half", action="store_true", help="write the finished tower in fp16, half the size")
    parser.add_argument("--seed", type=int, default=0, help="of order, augmentation and attack (%(default)s)")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    method, settings = _method(args), _settings(args)
    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = load(args.model, device=args.device, dtype="fp32")
    photos, clf, source = load_photos(args, encoder, classes=method.needs_labels)
    check_memory(len(photos), encoder.image_size, _memory())
    if args.epochs is not None:
        steps = max(1, math.ceil(args.epochs * len(photos) / settings.photos_per_step))
        settings = dataclasses.replace(settings, steps=steps, warmup=args.warmup)
    pixels = photos.pixels(encoder.image_size, progress=not args.quiet)
    about = {
        "command": command_line(),
        "class_source": source,
        "dataset": {
            "name": args.dataset,
            "split": args.split,
            "sha256": photos.fingerprint(),
            "notes": list(photos.notes),
        },
    }
    with Progress(quiet=args.quiet, unit="step") as progress:
        result = finetune(
            encoder,
            method,
            pixels,
            torch.tensor(photos.labels),
            None if clf is None else clf.class_features,
            out=args.out,
            settings=settings,
            about=about,
            progress=lambda done, total, loss: progress.show(done=done, total=total, note=f"loss {loss:.4g}"),
        )
    try_to_plot(args, lambda: _plot(result))
    _print(args, result)
    return 0


def _method(args: argparse.Namespace) -> Method:
    weights = {name: getattr(args, name) for name in ("clean_weight", "original_weight")}
    given = {name: value for name, value in weights.items() if value is not None}
    if given and args.method in names() and args.method != "pmg-aft":
        raise ReactClipError(
            f"--{next(iter(given)).replace('_', '-')} belongs to pmg-aft, not {args.method}; leave it out"
        )
    return get(args.method, **given)


def _settings(args: argparse.Namespace) -> Settings:
    if args.epochs is not None and not 0 < args.epochs < math.inf:
        raise ReactClipError(f"--epochs is {args.epochs:g}; it must be above 0")
    length = {"steps": args.steps} if args.steps is not None else {}
    attack = InnerAttack(_length("--eps", args.eps), _length("--attack-step", args.attack_step), args.attack_steps)
    # With --epochs the number of steps is known once the photos are; the warm-up is checked against it then.
    warmup = None if args.epochs is not None else args.warmup
    same = ("batch", "accumulate", "lr", "weight_decay", "dtype", "augment", "seed", "half", "save_every")
    return Settings(**length, attack=attack, warmup=warmup, **{name: getattr(args, name) for name in same})


def _length(name: str, text: str) -> float:
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1)
    except (ValueError, ZeroDivisionError):
        raise ReactClipError(f"{name} is {text!r}; give a number such as 1/255") from None


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _plot(result: Finetuned) -> None:
    """Draw the loss; a finished run keeps the plot it has."""
    path = result.folder / _PLOT
    if result.was_finished and path.is_file():
        return
    from react_clip.report.style import COLOURS, new_figure, save_figure

    rows = read_log(result.folder / "log.csv")
    figure = new_figure(height=2.6)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], color=COLOURS["react"], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss of {pop_kind(dict(result.record['method']))}")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _print(args: argparse.Namespace, result: Finetuned) -> None:
    record = result.record
    if args.json:
        print(json.dumps({"folder": str(result.folder), "was_finished": result.was_finished, **record}, indent=2))
        return
    steps, photos, name = record["settings"]["steps"], record["photos"], pop_kind(dict(record["method"]))
    if result.was_finished:
        print(f"{result.folder} is finished already: {name}, {steps} steps; nothing was done")
    else:
        losses = f"loss {record['first_loss']:.4g} -> {record['final_loss']:.4g}"
        print(f"{name}: {steps} steps on {photos} photos in {record['seconds']:.0f} s, {losses}")
    notice(args, f"use it with --model {result.folder} or rc.load({str(result.folder)!r})")
