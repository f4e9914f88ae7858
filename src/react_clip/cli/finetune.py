"""``react-clip finetune``: train an image tower against attacks (FARE, TeCoA, PMG-AFT, CLIP-FT)."""

from __future__ import annotations

import argparse
import json
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

EXAMPLE = "react-clip finetune fare photos/ --steps 1400 --out runs/fare"
_PLOT = "loss.png"


def _range(text: str) -> tuple[float, ...]:
    """Numbers such as ``0.5,0.95``."""
    return tuple(map(float, options.comma_separated(text)))


_SETTINGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "batch": (options.count, "photos of an update"),
    "lr": (float, "largest learning rate (the method's published one)"),
    "warmup": (options.whole, "steps until the largest learning rate (100, or a tenth of a shorter run)"),
    "eps": (str, "largest change of a pixel in the attack"),
    "eps_start": (str, "the same at the start of the run"),
    "ramp": (float, "fraction of the run in which it rises"),
    "attack_steps": (options.count, "steps of the attack"),
    "clean": (float, "weight of the loss without an attack"),
    "crop": (_range, "smallest and largest side of random crops; 1,1: none"),
    "cutmix": (float, "fraction of mixed batches (0.5 for fare, 0 for methods with labels)"),
    "average": (float, "decay of the mean weights, 0: the last"),
    "check_every": (options.whole, "steps between attacks on held-out photos, 0: none"),
    "check_photos": (options.count, "held-out photos"),
    "save_every": (options.count, "steps between checkpoints"),
    "seed": (int, "seed of order, augmentation and attack"),
}
"""Type and help of the options that are fields of ``Settings``, which has their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("method", help=f"one of {', '.join(FINETUNING)}")
    options.add_dataset_options(parser, note="; for fare also any folder of photos, .tar shards and Parquet files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    init = "checkpoint, or folder of a finished run, whose weights are the first ones"
    parser.add_argument("--init", type=options.existing, help=init)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=options.count, help=f"updates of the weights ({Settings.steps})")
    length.add_argument("--epochs", type=options.positive, help="passes over the photos, instead of --steps")
    defaults = Settings().to_dict()
    for name, (kind, text) in _SETTINGS.items():
        value = defaults[name]
        default = ",".join(map(str, value)) if isinstance(value, list) else value
        text += "" if default is None else f" ({default})"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    parser.add_argument("--half", action="store_true", help="write the finished tower in fp16, half the size")
    precisions = "precision of the computation: fp32 or bf16; weights are fp32 (%(default)s)"
    options.add_model_options(parser, dtype=Settings.dtype, dtypes=precisions)


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    if args.method not in FINETUNING:
        raise ReactClipError(f"method {args.method!r} does not exist; choose one of {', '.join(FINETUNING)}")
    names = ("steps", "dtype", "half", *_SETTINGS)
    settings = Settings.from_dict({name: value for name in names if (value := getattr(args, name)) is not None})
    from react_clip.finetune import processes

    with processes.joined(args.device) as args.device:
        if processes.group().rank == 0:
            _report(args, _finetuned(args, settings))
        else:
            args.quiet = True
            _finetuned(args, settings)
    return 0


def _finetuned(args: argparse.Namespace, settings: Settings) -> Finetuned:
    """Train, or find the run finished."""
    import torch

    from react_clip.finetune import METHODS, finetune

    common.notice(args, f"loading {args.model}")
    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = rc.load(args.model, device=args.device, dtype="fp32")
    photos, clf, about = _photos(args, encoder, METHODS[args.method].needs_labels)
    if args.epochs is not None:
        settings = settings.replace(steps=max(1, math.ceil(args.epochs * len(photos) / settings.batch)))
    with common.progress(args, "photo", settings.steps * settings.batch) as bar:

        def show(done: int, total: int, loss: float) -> None:
            if not bar.n:  # a run that continues has not done the first steps in this time
                bar.initial = bar.n = (done - 1) * settings.batch
            common.show(bar, done * settings.batch, text=f"step {done} of {total}, loss {loss:.4g}")

        return finetune(
            encoder,
            args.method,
            photos,
            torch.tensor(photos.labels),
            None if clf is None else clf.class_features,
            out=args.out,
            settings=settings,
            init=args.init,
            about={"command": typed_command(), **about},
            progress=show,
            show=not args.quiet,
        )


def _report(args: argparse.Namespace, result: Finetuned) -> None:
    """Draw the run and print what it gave."""
    try:
        _draw(result)
    except ImportError:
        common.notice(args, "no page: it needs matplotlib and pandas, of the extra `eval`; the same command draws it")
    for name, reason in result.record["unreadable"].items():
        common.notice(args, f"left out {name}: {reason}")
    document = {"folder": str(result.folder), "was_finished": result.was_finished, **result.record}
    usage = f"use it with --model {result.folder} or rc.load({str(result.folder)!r})"
    common.print_result(args, document, [_summary(result)], [usage])


def _photos(
    args: argparse.Namespace, encoder: rc.Encoder, labelled: bool
) -> tuple[rc.data.ImageDataset, rc.ZeroShotClassifier | None, dict[str, Any]]:
    """The photos, their classifier if the method needs labels, and what the record says of them."""
    from react_clip.finetune.photos import find_photos

    if not labelled and (path := Path(args.dataset.removeprefix("folder:")).expanduser()).exists():
        photos = find_photos(path)
        photos = photos if args.limit is None else photos.take(args.limit, args.seed)
        about = {"name": args.dataset, "photos": len(photos), "notes": list(photos.notes)}
        return photos, None, {"class_source": "none needed", "dataset": about}
    photos, clf, source = common.load_photos(args, encoder, classes=labelled)
    return photos, clf, {"class_source": source, "dataset": common.describe(args, photos)}


def _draw(result: Finetuned) -> None:
    """Draw loss and checks, and write the run's page; a finished run keeps those it has."""
    if result.was_finished and (result.folder / _PLOT).is_file():
        return
    from react_clip.finetune.folder import read_log
    from react_clip.report.page import PAGE, Section, read_figure, write_page
    from react_clip.report.style import budget_colour, legend, new_figure, save_figure, style_axes

    record, settings = result.record, result.record["settings"]
    rows = read_log(result.folder / "log.csv")
    figure = new_figure(height=2.6)
    losses, checks = figure.subplots(1, 2)
    style_axes(losses, "step", f"loss of {record['method']}")
    losses.plot([row.step for row in rows], [row.loss for row in rows], linewidth=1.2)
    style_axes(checks, "step", "accuracy on held-out photos, %")
    checked = [row for row in rows if row.clean is not None]
    curves = {"clean": "clean", "half": f"PGD-10, half of {settings['eps']}", "full": f"PGD-10, {settings['eps']}"}
    for place, (name, label) in enumerate(curves.items()):
        values = [100 * getattr(row, name) for row in checked]
        checks.plot([row.step for row in checked], values, ".-", color=budget_colour(place, 2), label=label)
    checks.set_ylim(0, 100)
    legend(figure)
    save_figure(figure, result.folder / _PLOT)
    caption = "Without labels a photo is its own class: right is what is nearest to its own original feature"
    drawn = read_figure(result.folder / "loss.svg", "Loss and held-out accuracy", caption)
    facts = {
        name: json.dumps(value) if isinstance(value, dict | list) else str(value) for name, value in record.items()
    }
    sections = [Section("The run", figures=[drawn]), Section("What the run was", facts=facts)]
    write_page(result.folder / PAGE, f"Finetuned: {result.folder.name}", [_summary(result)], sections)


def _summary(result: Finetuned) -> str:
    record = result.record
    steps = record["settings"]["steps"]
    if result.was_finished:
        return f"{result.folder} is finished already: {record['method']}, {steps} steps; nothing was done"
    losses = f"loss {record['first_loss']:.4g} -> {record['final_loss']:.4g}"
    return f"{record['method']}: {steps} steps on {record['photos']} photos in {record['seconds']:.0f} s, {losses}"
