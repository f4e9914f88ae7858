"""``react-clip finetune``: train an image tower against attacks (TeCoA, PMG-AFT, FARE, CLIP-FT)."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.choices import FINETUNING
from react_clip.cli import common, options
from react_clip.environment import typed_command
from react_clip.errors import ReactClipError
from react_clip.finetune.optimiser import Optimiser
from react_clip.finetune.settings import InnerAttack, Settings

if TYPE_CHECKING:
    from react_clip.finetune import Finetuned, Method

EXAMPLE = "react-clip finetune tecoa folder:photos --model my-clip/ --steps 300 --dtype bf16 --out runs/tecoa"
_PLOT = "loss.png"
_SETTINGS = ("batch", "accumulate", "dtype", "augment", "seed", "half", "save_every")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("method", help=f"one of {', '.join(FINETUNING)}")
    options.add_dataset_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=Settings.steps, help="updates of the weights (%(default)s)")
    length.add_argument("--epochs", type=float, help="passes over the photos, instead of --steps")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="photos at a time (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=Settings.accumulate, help="batches per update (%(default)s)")
    parser.add_argument("--optimiser", help="sgd (with momentum 0.9) or adamw (the method's published one)")
    parser.add_argument("--lr", type=float, help="largest learning rate (the method's published one)")
    parser.add_argument("--weight-decay", type=float, help="weight decay of the optimiser (the method's published one)")
    parser.add_argument("--warmup", type=int, help="steps until the largest learning rate (a tenth of all)")
    parser.add_argument("--eps", default="1/255", help="largest change of a pixel in the attack (%(default)s)")
    parser.add_argument("--attack-step", default="1/255", help="step size of the attack (%(default)s)")
    parser.add_argument(
        "--attack-steps", type=int, default=InnerAttack.steps, help="iterations of the attack (%(default)s)"
    )
    parser.add_argument("--clean-weight", type=float, help="pmg-aft: weight of KL(clean || adversarial) (1)")
    parser.add_argument("--original-weight", type=float, help="pmg-aft: weight of KL(original || adversarial) (1)")
    parser.add_argument(
        "--augment", default=Settings.augment, help="random changes of the photos: none, flip, crop (%(default)s)"
    )
    parser.add_argument(
        "--save-every", type=int, default=Settings.save_every, help="steps between checkpoints (%(default)s)"
    )
    parser.add_argument("--half", action="store_true", help="write the finished tower in fp16, half the size")
    parser.add_argument("--seed", type=int, default=0, help="seed of order, augmentation and attack (%(default)s)")
    options.add_model_options(
        parser, dtypes="precision of the computation: fp32 or bf16; weights are fp32 (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    settings = _settings(args)
    common.notice(args, f"loading {args.model}")
    method = _method(args)
    import torch

    from react_clip import load
    from react_clip.finetune import finetune
    from react_clip.finetune.photos import check_memory

    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = load(args.model, device=args.device, dtype="fp32")
    photos, clf, source = common.load_photos(args, encoder, classes=method.needs_labels)
    check_memory(len(photos), encoder.image_size)
    if args.epochs is not None:
        steps = max(1, math.ceil(args.epochs * len(photos) / settings.photos_per_step))
        settings = settings.replace(steps=steps, warmup=args.warmup)
    pixels = photos.pixels(encoder.preprocessing, progress=not args.quiet)
    with common.progress(args, "step", settings.steps) as bar:

        def show(done: int, total: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
            bar.update(done - bar.n)

        result = finetune(
            encoder,
            method,
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
    common.try_to_plot(args, lambda: _plot(result, method))
    usage = f"use it with --model {result.folder} or rc.load({str(result.folder)!r})"
    document = {"folder": str(result.folder), "was_finished": result.was_finished, **result.record}
    notes = [f"note: {note}" for note in result.record.get("notes", [])]
    common.print_result(args, document, [_summary(result, method)], [*notes, usage])
    return 0


def _method(args: argparse.Namespace) -> Method:
    if args.method not in FINETUNING:
        raise ReactClipError(f"method {args.method!r} does not exist; choose one of {', '.join(FINETUNING)}")
    weights = {name: getattr(args, name) for name in ("clean_weight", "original_weight")}
    given = {name: value for name, value in weights.items() if value is not None}
    if given and args.method != "pmg-aft":
        raise ReactClipError(
            f"--{next(iter(given)).replace('_', '-')} belongs to pmg-aft, not {args.method}; leave it out"
        )
    options = {"algorithm": args.optimiser, "lr": args.lr, "weight_decay": args.weight_decay}
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    Optimiser.from_dict({"algorithm": "sgd", "lr": 1e-5} | changes)  # refuses wrong values before the slow import
    from react_clip.finetune import get

    method = get(args.method, **given)
    return method.replace(optimiser=method.optimiser.replace(**changes))


def _settings(args: argparse.Namespace) -> Settings:
    """Settings from the options; with --epochs, steps and warm-up are set when the number of photos is known."""
    if args.epochs is not None and not 0 < args.epochs < math.inf:
        raise ReactClipError(f"--epochs is {args.epochs:g}; it must be above 0")
    attack = InnerAttack.from_dict({"eps": args.eps, "step": args.attack_step, "steps": args.attack_steps})
    warmup = None if args.epochs is not None else args.warmup
    same = {name: getattr(args, name) for name in _SETTINGS}
    return Settings(steps=args.steps, attack=attack, warmup=warmup, **same)


def _plot(result: Finetuned, method: Method) -> None:
    """Draw the loss; a finished run keeps the plot it has."""
    path = result.folder / _PLOT
    if result.was_finished and path.is_file():
        return
    from react_clip.finetune.folder import read_log
    from react_clip.report.style import COLOURS, new_figure, save_figure

    rows = read_log(result.folder / "log.csv")
    figure = new_figure(height=2.6)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], color=COLOURS["react"], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss of {method.kind}")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _summary(result: Finetuned, method: Method) -> str:
    record = result.record
    steps = record["settings"]["steps"]
    if result.was_finished:
        return f"{result.folder} is finished already: {method.kind}, {steps} steps; nothing was done"
    losses = f"loss {record['first_loss']:.4g} -> {record['final_loss']:.4g}"
    return f"{method.kind}: {steps} steps on {record['photos']} photos in {record['seconds']:.0f} s, {losses}"
