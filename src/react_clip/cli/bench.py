"""``react-clip bench``: what the defence costs on this machine, as ratios measured side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip import Encoder, ReACT, ReactClipError, ZeroShotClassifier, attacks, defenses, storage
from react_clip.bench import (
    BARE,
    OURS,
    PLAIN,
    PUBLISHED,
    SHAPES,
    SWEEPS,
    Bench,
    Point,
    Timing,
    Traffic,
    gate_scores,
    random_encoder,
    roofline,
    speedup,
    synthetic_photos,
)
from react_clip.cli.common import (
    PhotoReader,
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    bundled_photos,
    load_encoder,
    notice,
)
from react_clip.encoders import offline
from react_clip.environment import device_name, versions

SCHEMA = 2
_CLASSES = 1_000
"""Classes of an encoder with random weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser, nargs="*", note=" (bundled ones by default)")
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    parser.add_argument("--images", type=int, default=64, help="photos are repeated up to so many (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images per batch (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of every contender; the median counts (%(default)s)"
    )
    parser.add_argument("--singles", type=int, default=20, help="single images, for the latency (%(default)s)")
    parser.add_argument("--attacked", type=float, default=0.0, help="share of attacked images, 0 to 1 (%(default)s)")
    parser.add_argument("--eps", default="4/255", help="strength of these attacks (%(default)s)")
    parser.add_argument(
        "--sweep",
        choices=(*SWEEPS, "all"),
        help="instead of the table: ReACT and the bare encoder along an axis (classes: 10 to 20,000; attacked: 0 to 1)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="on a GPU: CUDA graphs for small batches and a compiled noise kernel, as the service has",
    )
    parser.add_argument(
        "--defenses", default="", help=f"measure these as well, comma-separated: {', '.join(defenses.names())}"
    )
    parser.add_argument(
        "--shapes", metavar="NAME", help=f"random weights of these shapes instead of --model: {', '.join(SHAPES)}"
    )
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, and write the JSON after every round: an interrupted run keeps its rounds."""
    _check(args)
    reader = PhotoReader(_with_photos(args)) if args.photos_in or not args.shapes else None
    bench = _bench(args, reader)
    report = _report(args, bench)
    axes = SWEEPS if args.sweep == "all" else (args.sweep,) if args.sweep else ("",)
    comparisons = {axis: bench.sweep(axis) if axis else {0.0: bench.table()} for axis in axes}
    steps = sum(one.steps(args.rounds, args.singles) for each in comparisons.values() for one in each.values())
    tables: dict[str, list[Point]] = {}
    with tqdm(total=steps, unit="step", disable=args.quiet or None) as bar:

        def progress(label: str) -> None:
            bar.set_description(label)
            bar.update(1)

        for axis, each in comparisons.items():
            for tables[axis] in bench.measure(each, progress):
                points = [dataclasses.asdict(point) for point in tables[axis]]
                if axis:
                    report["sweeps"][axis] = [{"value": p["value"], "contenders": p["timings"]} for p in points]
                else:
                    report["contenders"] = points[0]["timings"]
                if args.out:
                    storage.write_text(args.out, json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, tables)
        if args.out:
            notice(args, f"written to {args.out}")
    return reader.exit_code if reader else 0


def _check(args: argparse.Namespace) -> None:
    for name in ("images", "batch", "rounds", "singles"):
        if getattr(args, name) < 1:
            raise ReactClipError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 0.0 <= args.attacked <= 1.0:
        raise ReactClipError(f"--attacked is {args.attacked}; it is a share between 0 and 1")
    if args.shapes is None:
        return
    if args.model != offline.NAME:
        raise ReactClipError(f"--shapes {args.shapes} and --model {args.model} are both given; choose one of them")
    given = [name for name in ("labels", "labels_file", "photos", "template") if getattr(args, name) is not None]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ReactClipError(
            f"--shapes {args.shapes} has random weights, for which {option} means nothing; leave it out"
        )


def _with_photos(args: argparse.Namespace) -> argparse.Namespace:
    args.photos_in = args.photos_in or bundled_photos()
    return args


def _bench(args: argparse.Namespace, reader: PhotoReader | None) -> Bench:
    """The measurement that the options describe."""
    others = {name: _defense(name, args.batch) for name in _names(args.defenses)}
    if args.shapes:
        encoder = random_encoder(args.shapes, device=args.device, dtype=args.dtype)
        clf, guard = _random_classifier(encoder), ReACT() if args.config is None else build_guard(args, encoder)
    else:
        encoder = load_encoder(args)
        clf, guard = build_classifier(args, encoder), build_guard(args, encoder)
    if args.compile:
        encoder.accelerate()
    attack = None if args.shapes else attacks.from_dict({"kind": "pgd", "eps": args.eps})
    photos = _photos(reader, encoder.image_size, args.images, args.seed)
    traffic = Traffic(clf, photos, attack, batch=args.batch, seed=args.seed)
    return Bench(
        clf=clf,
        guard=guard,
        traffic=traffic,
        images=args.images,
        batch=args.batch,
        attacked=args.attacked,
        rounds=args.rounds,
        singles=args.singles,
        scores=gate_scores(clf, guard, traffic.images(args.images, 0.0), batch=args.batch) if args.shapes else None,
        defenses=others,
    )


def _random_classifier(encoder: Encoder) -> ZeroShotClassifier:
    generator = torch.Generator().manual_seed(0)
    names = [f"class {number + 1}" for number in range(_CLASSES)]
    return ZeroShotClassifier.from_features(
        encoder, names, torch.randn(_CLASSES, encoder.dim, generator=generator).to(encoder.device)
    )


def _defense(name: str, batch: int) -> defenses.Defense:
    """A defence with its default values and the run's batch size."""
    plain = defenses.from_dict(name)
    return defenses.from_dict({**plain.to_dict(), "max_batch": batch}) if "max_batch" in plain.to_dict() else plain


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _photos(reader: PhotoReader | None, size: int, count: int, seed: int) -> Tensor:
    """At most ``count`` readable photos, spread evenly over the list; synthetic ones without a reader."""
    if reader is None:
        return synthetic_photos(count, size, seed=seed)
    files, wanted = reader.files, min(count, len(reader.files))
    reader.files = [files[number * len(files) // wanted] for number in range(wanted)]
    found = [pixels for _, pixels in reader.batches(size)]
    if not found:
        raise ReactClipError("none of the photos can be read; give others")
    return torch.cat(found)


def _report(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    clf = bench.clf
    notes = []
    if args.shapes:
        notes.append(
            "weights are random: no image is attacked, the gate's threshold is set so that the attacked share opens it"
        )
    if not clf.encoder.has_text and not args.sweep:
        notes.append(
            f"{PUBLISHED} is measured without encoding the class prompts anew: {clf.encoder.name} has no text tower"
        )
    return {
        "schema": SCHEMA,
        "command": shlex.join(["react-clip", *sys.argv[1:]]),
        "model": clf.encoder.name,
        "classes": len(clf.names),
        "dtype": args.dtype,
        "compile": args.compile,
        "device": device_name(clf.device),
        "threads": torch.get_num_threads(),
        "images": args.images,
        "batch": args.batch,
        "attacked": args.attacked,
        "eps": args.eps,
        "rounds": args.rounds,
        "singles": args.singles,
        "seed": args.seed,
        "notes": notes,
        "versions": versions(),
        "roofline": dataclasses.asdict(roofline(clf.encoder)),
        "contenders": [],
        "sweeps": {},
    }


def _print(report: dict[str, Any], tables: dict[str, list[Point]]) -> None:
    for axis, points in tables.items():
        if axis:
            print(f"\nalong {axis}:")
            rows = [(f"{point.value:>7,g}  {timing.label}", timing) for point in points for timing in point.timings]
            _print_rows(rows, f"{axis:>7}")
        else:
            _print_rows([(timing.label, timing) for timing in points[0].timings], "")
            _print_ratios(report, {timing.label: timing for timing in points[0].timings})
    for note in report["notes"]:
        print(f"note: {note}")


_COLUMNS = {
    "images/s": "{.images_per_second:.2f}",
    "ms/image": "{.milliseconds:.2f}",
    "passes": "{.passes:.2f}",
    "backward": "{.backward_passes:.2f}",
    "overhead": "{.overhead:.2f}",
    "of rounds": "{0.overhead_range[0]:.2f}-{0.overhead_range[1]:.2f}",
    "p50 ms": "{.latency_p50:.1f}",
    "p99 ms": "{.latency_p99:.1f}",
    "syncs": "{.host_syncs}",
}


def _print_rows(rows: Sequence[tuple[str, Timing]], corner: str) -> None:
    width = max(len(label) for label, _ in rows)
    print(f"{corner:{width}}" + "".join(f"{title:>11}" for title in (*_COLUMNS, "peak MiB")))
    for label, timing in rows:
        cells = [*(column.format(timing) for column in _COLUMNS.values()), f"{timing.peak_bytes / 2**20:.0f}"]
        print(f"{label:{width}}" + "".join(f"{cell:>11}" for cell in cells))


def _print_ratios(report: dict[str, Any], by_label: dict[str, Timing]) -> None:
    for other in (BARE, PLAIN, PUBLISHED):
        ratio = speedup(by_label[OURS], by_label[other])
        print(f"ReACT runs at {ratio.middle:.2f} x the speed of {other} ({ratio.low:.2f} to {ratio.high:.2f})")
    limits = report["roofline"]
    if limits["pass_flops"]:
        share = by_label[BARE].images_per_second * limits["pass_flops"] / limits["matmul_flops"]
        print(
            f"one pass is {limits['pass_flops'] / 1e9:.1f} GFLOP; the bare encoder reaches {share:.0%} of the "
            f"{limits['matmul_flops'] / 1e12:.3g} TFLOP/s of a large matrix product here"
        )
