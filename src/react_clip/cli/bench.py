"""``react-clip bench``: what the defence costs on this machine, as ratios measured side by side."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.choices import DEFENSES, SHAPES, SWEEPS
from react_clip.cli import common
from react_clip.cli.photos import PhotoReader, add_photo_argument
from react_clip.cli.progress import Progress
from react_clip.environment import device_name, versions
from react_clip.errors import ReactClipError
from react_clip.storage import write_text

if TYPE_CHECKING:
    from react_clip import Encoder, ZeroShotClassifier, bench, defenses

EXAMPLE = "react-clip bench photos/ --batch 64 --attacked 0.1 --out bench.json"
SCHEMA = 2
_CLASSES = 1_000
"""Classes of an encoder with random weights."""
_OPTIONS = ("dtype", "compile", "images", "batch", "attacked", "eps", "rounds", "singles", "seed")
"""Options that the report repeats."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (bundled ones by default)")
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    parser.add_argument(
        "--images", type=int, default=64, help="images to measure on; photos are repeated (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=64, help="images per batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; the median is printed (%(default)s)")
    parser.add_argument("--singles", type=int, default=20, help="images sent one by one, for the latency (%(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one image, one round, without Defend-CLIP: about a minute",
    )
    parser.add_argument("--attacked", type=float, default=0.0, help="share of attacked images, 0 to 1 (%(default)s)")
    parser.add_argument("--eps", default="4/255", help="strength of these attacks (%(default)s)")
    parser.add_argument(
        "--sweep",
        choices=(*SWEEPS, "all"),
        help="instead of the table: ReACT and the bare encoder along an axis, such as 10 to 20,000 classes",
    )
    parser.add_argument(
        "--compile", action="store_true", help="as in serve: CUDA graphs and kernels on a GPU, our layers on any device"
    )
    parser.add_argument(
        "--defenses", default="", help=f"also measure these, comma-separated: {', '.join(DEFENSES)}, module:Class"
    )
    parser.add_argument(
        "--shapes", metavar="NAME", help=f"random weights of these shapes instead of --model: {', '.join(SHAPES)}"
    )
    common.add_model_options(parser)
    common.add_label_options(parser)
    common.add_defense_options(parser, choose=False)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, and write the JSON after every round: an interrupted run keeps its rounds."""
    if args.quick:
        args.images, args.batch, args.rounds, args.singles = 1, 1, 1, 1
    _check(args)
    reader = PhotoReader(args) if args.photos_in or not args.shapes else None
    from react_clip import bench

    job = _bench(args, reader)
    report = _report(args, job)
    axes = SWEEPS if args.sweep == "all" else (args.sweep,)
    left_out = (bench.PUBLISHED,) if args.quick else ()
    swept = {axis: job.sweep(axis) if axis else {0.0: job.table(*left_out)} for axis in axes}
    steps = sum(one.steps(args.rounds, args.singles) for points in swept.values() for one in points.values())
    begun = itertools.count()
    with Progress(quiet=args.quiet, unit="step", total=steps) as progress:
        for axis, points in swept.items():
            for _ in bench.measure(
                list(points.values()),
                rounds=args.rounds,
                singles=args.singles,
                progress=lambda label: progress.show(done=next(begun), note=label),
            ):
                rows = {value: [dataclasses.asdict(row) for row in one.timings()] for value, one in points.items()}
                if axis:
                    report["sweeps"][axis] = [{"value": value, "contenders": each} for value, each in rows.items()]
                else:
                    report["contenders"] = rows[0.0]
                if args.out:
                    write_text(args.out, json.dumps(report, indent=2) + "\n")
        progress.show(done=steps)
    notices = [f"written to {args.out}"] if args.out else []
    common.print_result(args, report, _lines(report, swept), notices)
    return reader.exit_code if reader else 0


def _check(args: argparse.Namespace) -> None:
    common.check_counts(args, "images", "batch", "rounds", "singles")
    common.check_eps(args)
    common.check_label_options(args)
    if not 0.0 <= args.attacked <= 1.0:
        raise ReactClipError(f"--attacked is {args.attacked}; it is a share between 0 and 1")
    if args.shapes is None:
        return
    if args.shapes not in SHAPES:
        raise ReactClipError(f"--shapes is {args.shapes!r}; choose one of {', '.join(SHAPES)}")
    if args.model != common.DEFAULT_MODEL:
        raise ReactClipError(f"--shapes {args.shapes} and --model {args.model} are both given; choose one of them")
    given = [name for name in ("labels", "labels_file", "photos", "template") if getattr(args, name) is not None]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ReactClipError(
            f"--shapes {args.shapes} has random weights, for which {option} means nothing; leave it out"
        )


def _bench(args: argparse.Namespace, reader: PhotoReader | None) -> bench.Bench:
    """The measurement that the options describe."""
    from react_clip import ReACT, attacks, bench
    from react_clip.bench.workload import random_encoder, synthetic_photos

    others = {name: _defense(name, args.batch) for name in common.comma_separated(args.defenses)}
    if args.shapes:
        encoder = random_encoder(args.shapes, device=args.device, dtype=args.dtype)
        clf, guard = _random_classifier(encoder), ReACT()
    else:
        encoder = common.load_encoder(args)
        clf = common.build_classifier(args, encoder)
        guard = ReACT() if args.config else ReACT.for_encoder(encoder)
    if args.config not in (None, "paper"):
        guard = ReACT.load(args.config)
    if args.compile:
        encoder.accelerate()
    if reader:
        photos = reader.sample(args.images, encoder.preprocessing)
    else:
        photos = synthetic_photos(args.images, encoder.image_size, seed=args.seed)
    attack = None if args.shapes else attacks.from_dict({"kind": "pgd", "eps": args.eps})
    return bench.Bench(
        clf=clf,
        guard=guard,
        traffic=bench.Traffic(clf, photos, attack, batch=args.batch, seed=args.seed),
        images=args.images,
        batch=args.batch,
        attacked=args.attacked,
        defenses=others,
    )


def _random_classifier(encoder: Encoder) -> ZeroShotClassifier:
    import torch

    from react_clip import ZeroShotClassifier

    features = torch.randn(_CLASSES, encoder.dim, generator=torch.Generator().manual_seed(0))
    names = [f"class {number + 1}" for number in range(_CLASSES)]
    return ZeroShotClassifier.from_features(encoder, names, features.to(encoder.device))


def _defense(name: str, batch: int) -> defenses.Defense:
    """A defence with its default values and the run's batch size."""
    from react_clip import defenses

    values = defenses.from_dict(name).to_dict()
    return defenses.from_dict({**values, "max_batch": batch} if "max_batch" in values else values)


def _report(args: argparse.Namespace, job: bench.Bench) -> dict[str, Any]:
    """The JSON document, without measurements."""
    import torch

    from react_clip import bench

    clf, notes = job.clf, []
    if args.shapes:
        notes.append(
            "weights are random: no image is attacked, the gate's threshold is set so that the attacked share opens it"
        )
    if not (clf.encoder.has_text or args.sweep or args.quick):
        notes.append(
            f"{bench.PUBLISHED} is measured without encoding the class prompts anew: {clf.encoder.name} has no text "
            "tower"
        )
    return {
        "schema": SCHEMA,
        "command": common.command_line(),
        "model": clf.encoder.name,
        "classes": len(clf.names),
        "device": device_name(clf.device),
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        **{name: getattr(args, name) for name in _OPTIONS},
        "notes": notes,
        "versions": versions(),
        "defenses": {label: one.to_dict() for label, one in {bench.OURS: job.guard, **job.defenses}.items()},
        "contenders": [],
        "sweeps": {},
    }


def _lines(report: dict[str, Any], swept: dict[str | None, dict[float, bench.Comparison]]) -> Iterator[str]:
    """Lines of the terminal."""
    from react_clip import bench
    from react_clip.bench.timing import speedup

    for axis, points in swept.items():
        if axis:
            yield f"\nalong {axis}:"
            rows = {f"{value:>7,g}  {row.label}": row for value, one in points.items() for row in one.timings()}
            yield from _table(rows, axis)
        else:
            by_label = {timing.label: timing for timing in points[0.0].timings()}
            yield from _table(by_label, "")
            for other in filter(by_label.get, (bench.BARE, bench.PLAIN, bench.PUBLISHED)):
                middle, low, high = speedup(by_label[bench.OURS], by_label[other])
                yield f"ReACT runs at {middle:.2f} x the speed of {other!r} ({low:.2f} to {high:.2f})"
    yield "overhead: time per image / (passes x time of a pass of the bare encoder), then its range over the rounds"
    for note in report["notes"]:
        yield f"note: {note}"


_COLUMNS = {
    "images/s": "{.images_per_second:.2f}",
    "ms/image": "{.milliseconds:.2f}",
    "passes": "{.passes:.2f}",
    "backward": "{.backward_passes:.2f}",
    "overhead": "{.overhead:.2f}",
    "range": "{0.overhead_range[0]:.2f}-{0.overhead_range[1]:.2f}",
    "p50 ms": "{.latency_p50:.1f}",
    "p99 ms": "{.latency_p99:.1f}",
}


def _table(rows: dict[str, bench.Timing], axis: str) -> Iterator[str]:
    width = max(len(label) for label in rows)
    yield f"{f'{axis:>7}':{width}}" + "".join(f"{title:>11}" for title in (*_COLUMNS, "peak MiB"))
    for label, timing in rows.items():
        cells = [*(column.format(timing) for column in _COLUMNS.values()), f"{timing.peak_bytes / 2**20:.0f}"]
        yield f"{label:{width}}" + "".join(f"{cell:>11}" for cell in cells)
