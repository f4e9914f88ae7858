"""``react-clip bench``: what defences cost on this machine, as ratios measured side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import react_clip as rc
from react_clip.choices import DEFENSES
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader, add_photo_argument
from react_clip.storage import write_text

if TYPE_CHECKING:
    from react_clip.bench import Timing

EXAMPLE = "react-clip bench photos/ --batch 64 --attacked 0.1 --out bench.json"
SCHEMA = 3
_REPEATED = ("compile", "images", "batch", "attacked", "rounds", "seed")
"""Options that the report repeats."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (bundled ones by default)")
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    count, fraction = options.count, options.fraction
    parser.add_argument("--images", type=count, default=64, help="images; photos are repeated (%(default)s)")
    parser.add_argument("--batch", type=count, default=64, help="images per batch; 1 gives the latency (%(default)s)")
    parser.add_argument("--rounds", type=count, default=5, help="measurements; the median is printed (%(default)s)")
    parser.add_argument("--attacked", type=fraction, default=0.0, help="fraction of attacked images (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="accelerate the encoder, as `react-clip serve` does")
    parser.add_argument("--finetuning", action="store_true", help="measure a step of finetuning too")
    parser.add_argument("--defenses", type=options.comma_separated, default=(), help=f"others: {', '.join(DEFENSES)}")
    options.add_model_options(parser)
    options.add_label_options(parser)
    options.add_defense_options(parser, choose=False)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the JSON after every round: an interrupted run keeps its rounds."""
    reader = PhotoReader(args.photos_in, args)
    import torch

    from react_clip import bench

    guards = [rc.defenses.from_dict(name) for name in args.defenses]
    encoder = common.load_encoder(args)
    clf = common.build_classifier(args, encoder)
    if args.compile:
        encoder.accelerate()
    guards = [*common.both_guards(args, encoder), *guards]
    photos = reader.sample(args.images, encoder)
    images = bench.traffic(
        clf,
        photos,
        rc.attacks.PGD(eps=4 / 255),
        count=args.images,
        attacked=args.attacked,
        batch=args.batch,
        seed=args.seed,
    )
    contenders = bench.contenders(clf, guards)
    contenders[bench.PUBLISHED] = bench.published(clf)
    if args.finetuning:
        trained = rc.load(args.model, device=args.device, dtype="fp32")
        contenders[bench.FINETUNING] = bench.finetuning(trained, images, args.batch, args.dtype)
    comparison = bench.Comparison(contenders, images, batch=args.batch)
    report = {
        "schema": SCHEMA,
        **common.provenance(args, encoder),
        "classes": len(clf.names),
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        **{name: getattr(args, name) for name in _REPEATED},
        "defenses": {type(guard).label: guard.to_dict() for guard in guards},
        "contenders": [],
    }
    timings: list[Timing] = []
    with common.progress(args, "step", comparison.steps(args.rounds)) as bar:
        for timings in comparison.measure(
            rounds=args.rounds, progress=lambda label: common.show(bar, bar.n + 1, text=label)
        ):
            report["contenders"] = [dataclasses.asdict(timing) for timing in timings]
            if args.out:
                write_text(args.out, json.dumps(report, indent=2) + "\n")
    notices = [f"written to {args.out}"] if args.out else []
    if not encoder.has_text:
        notices.append(f"{encoder.name} has no text tower: Defend-CLIP as published is timed without its class prompts")
    common.print_result(args, report, _lines(timings), notices)
    return reader.exit_code


_COLUMNS = {
    "images/s": "{.images_per_second:.2f}",
    "ms/image": "{.milliseconds:.2f}",
    "passes": "{.passes:.2f}",
    "backward": "{.backward_passes:.2f}",
    "overhead": "{.overhead:.2f}",
    "range": "{0.overhead_range[0]:.2f}-{0.overhead_range[1]:.2f}",
}


def _lines(timings: Sequence[Timing]) -> Iterator[str]:
    """Lines of the terminal: the table, and the first defence's speed against every other contender."""
    from react_clip.bench import FINETUNING, speedup

    width = max(len(timing.label) for timing in timings)
    yield " " * width + "".join(f"{title:>11}" for title in (*_COLUMNS, "peak MiB"))
    for timing in timings:
        cells = [*(column.format(timing) for column in _COLUMNS.values()), f"{timing.peak_bytes / 2**20:.0f}"]
        yield f"{timing.label:{width}}" + "".join(f"{cell:>11}" for cell in cells)
    bare, ours, *others = timings
    for other in (bare, *others):
        middle, low, high = speedup(ours, other)
        yield f"{ours.label} runs at {middle:.2f} x the speed of {other.label} ({low:.2f} to {high:.2f})"
        if other.label == FINETUNING:
            yield f"a step of finetuning runs at {1 / other.overhead:.2f} of its arithmetic limit"
    yield "overhead: time per image / (passes x time of a pass of the bare encoder), then its range over the rounds"
