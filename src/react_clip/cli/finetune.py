"""``react-clip finetune``: train an image tower against attacks (TeCoA, PMG-AFT, FARE, CLIP-FT)."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.choices import FINETUNING
from react_clip.cli import common, options
from react_clip.environment import typed_command
from react_clip.errors import ReactClipError
from react_clip.finetune.settings import Settings

if TYPE_CHECKING:
    from react_clip.finetune import Finetuned

EXAMPLE = "react-clip finetune tecoa folder:photos --model my-clip/ --steps 300 --dtype bf16 --out runs/tecoa"
_PLOT = "loss.png"
_SETTINGS = (
    *("steps", "batch", "lr", "warmup", "eps", "eps_start", "ramp", "attack_steps", "clean", "crop", "cutmix"),
    *("average", "dtype", "seed", "half", "save_every"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("method", help=f"one of {', '.join(FINETUNING)}")
    options.add_dataset_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=options.count, default=Settings.steps, help="updates of the weights")
    length.add_argument("--epochs", type=options.positive, help="passes over the photos, instead of --steps")
    parser.add_argument("--batch", type=options.count, default=Settings.batch, help="photos of an update (%(default)s)")
    parser.add_argument("--lr", type=float, help="largest learning rate (the method's published one)")
    parser.add_argument("--warmup", type=options.whole, help="steps until the largest learning rate (a tenth of all)")
    parser.add_argument("--eps", default="1/255", help="largest change of a pixel in the attack (%(default)s)")
    parser.add_argument("--eps-start", help="the same at the start of the run (--eps)")
    parser.add_argument(
        "--ramp", type=float, default=Settings.ramp, help="fraction of the run in which it rises (%(default)s)"
    )
    parser.add_argument(
        "--attack-steps", type=options.count, default=Settings.attack_steps, help="steps of the attack (%(default)s)"
    )
    parser.add_argument(
        "--clean", type=float, default=Settings.clean, help="weight of the loss without an attack (%(default)s)"
    )
    parser.add_argument(
        "--crop", type=float, default=Settings.crop, help="smallest side of random crops, 1: none (%(default)s)"
    )
    parser.add_argument(
        "--cutmix", type=float, default=Settings.cutmix, help="fraction of mixed batches, for fare (%(default)s)"
    )
    parser.add_argument(
        "--average",
        type=float,
        default=Settings.average,
        help="decay of the mean weights, 0: the last (%(default)s)",
    )
    parser.add_argument(
        "--save-every", type=options.count, default=Settings.save_every, help="steps between checkpoints (%(default)s)"
    )
    parser.add_argument("--half", action="store_true", help="write the finished tower in fp16, half the size")
    parser.add_argument("--seed", type=int, default=0, help="seed of order, augmentation and attack (%(default)s)")
    options.add_model_options(
        parser, dtypes="precision of the computation: fp32 or bf16; weights are fp32 (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    if args.method not in FINETUNING:
        raise ReactClipError(f"method {args.method!r} does not exist; choose one of {', '.join(FINETUNING)}")
    settings = Settings.from_dict({name: value for name in _SETTINGS if (value := getattr(args, name)) is not None})
    common.notice(args, f"loading {args.model}")
    import torch

    from react_clip import load
    from react_clip.finetune import METHODS, finetune

    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = load(args.model, device=args.device, dtype="fp32")
    photos, clf, source = common.load_photos(args, encoder, classes=METHODS[args.method].needs_labels)
    if args.epochs is not None:
        settings = settings.replace(steps=max(1, math.ceil(args.epochs * len(photos) / settings.batch)))
    pixels = photos.pixels(encoder.preprocessing, progress=not args.quiet)
    with common.progress(args, "photo", settings.steps * settings.batch) as bar:

        def show(done: int, total: int, loss: float) -> None:
            bar.set_postfix_str(f"step {done} of {total}, loss {loss:.4g}", refresh=False)
            common.show(bar, done * settings.batch)

        result = finetune(
            encoder,
            args.method,
            pixels,
            torch.tensor(photos.labels),
            None if clf is None else clf.class_features,
            out=args.out,
            settings=settings,
            about={
                "command": typed_command(),
                "class_source": source,
                "dataset": common.describe_photos(args, photos),
            },
            progress=show,
        )
    common.try_to_plot(args, lambda: _plot(result))
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
