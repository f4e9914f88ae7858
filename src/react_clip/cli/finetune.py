"""``react-clip finetune``: train an image tower against attacks (FARE, TeCoA, PMG-AFT, CLIP-FT)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import react_clip as rc
from react_clip.choices import FINETUNING
from react_clip.cli import common, options
from react_clip.config import fields_of
from react_clip.environment import typed_command
from react_clip.finetune.settings import Settings

if TYPE_CHECKING:
    from react_clip.finetune import Finetuned

EXAMPLE = "react-clip finetune fare photos/ --steps 1400 --out runs/fare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one option per field of ``Settings``, and those for the photos and the model."""
    parser.add_argument("method", choices=FINETUNING, help="loss to train with")
    options.add_dataset_options(parser, note="; for fare also any folder of photos, .tar shards and Parquet files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; rc.load reads it when finished")
    parser.add_argument("--init", type=options.existing, help="checkpoint or finished run with the first weights")
    defaults = Settings().to_dict()
    for name, field in fields_of(Settings).items():
        default = ",".join(map(str, defaults[name])) if isinstance(defaults[name], list) else defaults[name]
        text = field.description.rstrip(".") + ("" if default is None or default is False else f" ({default})")
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif name != "dtype":  # among the options of the model
            parser.add_argument(flag, type=options.typed(field.annotation, *field.metadata), help=text)
    options.add_model_options(parser, dtype=Settings.dtype)


def run(args: argparse.Namespace) -> int:
    """Finetune, and draw the loss."""
    given = {name: value for name in fields_of(Settings) if (value := getattr(args, name)) is not None}
    settings = Settings.from_dict(given)
    from react_clip.finetune import processes

    with processes.joined(args.device) as args.device:
        is_first = processes.group().rank == 0
        args.quiet = args.quiet or not is_first
        result = _finetuned(args, settings)
        if is_first:
            _report(args, result)
    return 0


def _finetuned(args: argparse.Namespace, settings: Settings) -> Finetuned:
    """Train, or find the run finished."""
    import torch

    from react_clip.finetune import METHODS, finetune

    common.notice(args, f"loading {args.model}")
    # The weights stay fp32; --dtype is what the towers compute in.
    encoder = rc.load(args.model, device=args.device, dtype="fp32")
    photos, clf, source = common.load_photos(args, encoder, classes=METHODS[args.method].needs_labels)
    about = {"class_source": source, "dataset": common.describe(args, photos)}
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


def _draw(result: Finetuned) -> None:
    """Draw loss and checks, and write the run's page."""
    from react_clip.finetune.folder import LOG, read_log
    from react_clip.report.page import PAGE, Section, read_figure, write_page
    from react_clip.report.style import budget_colour, legend, new_figure, save_figure, style_axes

    record, settings = result.record, result.record["settings"]
    rows = read_log(result.folder / LOG)
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
    save_figure(figure, result.folder / "loss.png")
    caption = "Without labels a photo is its own class: right is what is nearest to its own original feature"
    drawn = read_figure(result.folder / "loss.svg", "Loss and held-out accuracy", caption)
    facts = {name: str(value) for name, value in record.items()}
    sections = [Section("The run", figures=[drawn]), Section("What the run was", facts=facts)]
    write_page(result.folder / PAGE, f"Finetuned: {result.folder.name}", [_summary(result)], sections)


def _summary(result: Finetuned) -> str:
    record = result.record
    steps = record["settings"]["steps"]
    if result.was_finished:
        return f"{result.folder} is finished already: {record['method']}, {steps} steps; nothing was done"
    losses = f"loss {record['first_loss']:.4g} -> {record['final_loss']:.4g}"
    return f"{record['method']}: {steps} steps on {record['photos']} photos in {record['seconds']:.0f} s, {losses}"
