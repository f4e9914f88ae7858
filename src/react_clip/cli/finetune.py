"""``react-clip finetune``: train an image tower against attacks (TeCoA, PMG-AFT, FARE, CLIP-FT)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.choices import FINETUNING
from react_clip.cli import common, options
from react_clip.environment import typed_command
from react_clip.errors import ReactClipError
from react_clip.finetune.settings import Settings

if TYPE_CHECKING:
    from react_clip.finetune import Finetuned

EXAMPLE = "react-clip finetune tecoa folder:photos --model my-clip/ --steps 300 --dtype bf16 --out runs/tecoa"
_PLOT = "loss.png"
_SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch": (options.count, "photos of an update"),
    "lr": (float, "largest learning rate (the method's published one)"),
    "warmup": (options.whole, "steps until the largest learning rate (a tenth of all)"),
    "eps": (str, "largest change of a pixel in the attack"),
    "eps_start": (str, "the same at the start of the run (--eps)"),
    "ramp": (float, "fraction of the run in which it rises"),
    "attack_steps": (options.count, "steps of the attack"),
    "clean": (float, "weight of the loss without an attack"),
    "crop": (float, "smallest side of random crops, 1: none"),
    "cutmix": (float, "fraction of mixed batches, for fare"),
    "average": (float, "decay of the mean weights, 0: the last"),
    "save_every": (options.count, "steps between checkpoints"),
    "seed": (int, "seed of order, augmentation and attack"),
}
"""Type and help of the options that are fields of ``Settings``, which has their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("method", help=f"one of {', '.join(FINETUNING)}")
    options.add_dataset_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=options.count, help=f"updates of the weights ({Settings.steps})")
    length.add_argument("--epochs", type=options.positive, help="passes over the photos, instead of --steps")
    defaults = Settings().to_dict()
    for name, (kind, text) in _SETTINGS.items():
        default = "" if defaults[name] is None else f" ({defaults[name]})"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text + default)
    parser.add_argument("--half", action="store_true", help="write the finished tower in fp16, half the size")
    options.add_model_options(
        parser, dtypes="precision of the computation: fp32 or bf16; weights are fp32 (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    if args.method not in FINETUNING:
        raise ReactClipError(f"method {args.method!r} does not exist; choose one of {', '.join(FINETUNING)}")
    names = ("steps", "dtype", "half", *_SETTINGS)
    settings = Settings.from_dict({name: value for name in names if (value := getattr(args, name)) is not None})
    common.notice(args, f"loading {args.model}")
    import torch

    from react_clip.finetune import METHODS, finetune

    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = rc.load(args.model, device=args.device, dtype="fp32")
    photos, clf, source = common.load_photos(args, encoder, classes=METHODS[args.method].needs_labels)
    if args.epochs is not None:
        settings = settings.replace(steps=max(1, math.ceil(args.epochs * len(photos) / settings.batch)))
    pixels = photos.pixels(encoder.preprocessing, progress=not args.quiet)
    with common.progress(args, "photo", settings.steps * settings.batch) as bar:

        def show(done: int, total: int, loss: float) -> None:
            common.show(bar, done * settings.batch, text=f"step {done} of {total}, loss {loss:.4g}")

        result = finetune(
            encoder,
            args.method,
            pixels,
            torch.tensor(photos.labels),
            None if clf is None else clf.class_features,
            out=args.out,
            settings=settings,
            about={"command": typed_command(), "class_source": source, "dataset": common.describe(args, photos)},
            progress=show,
        )
    try:
        _plot(result)
    except ImportError:
        common.notice(args, "no plot: it needs matplotlib, of the extra `eval`")
    document = {"folder": str(result.folder), "was_finished": result.was_finished, **result.record}
    usage = f"use it with --model {result.folder} or rc.load({str(result.folder)!r})"
    common.print_result(args, document, [_summary(result)], [usage])
    return 0


def _plot(result: Finetuned) -> None:
    """Draw the loss; a finished run keeps the plot it has."""
    path = result.folder / _PLOT
    if result.was_finished and path.is_file():
        return
    from react_clip.finetune.folder import read_log
    from react_clip.report.style import new_figure, save_figure

    rows = read_log(result.folder / "log.csv")
    figure = new_figure(height=2.6)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss of {result.record['method']}")
    save_figure(figure, path)


def _summary(result: Finetuned) -> str:
    record = result.record
    steps = record["settings"]["steps"]
    if result.was_finished:
        return f"{result.folder} is finished already: {record['method']}, {steps} steps; nothing was done"
    losses = f"loss {record['first_loss']:.4g} -> {record['final_loss']:.4g}"
    return f"{record['method']}: {steps} steps on {record['photos']} photos in {record['seconds']:.0f} s, {losses}"
