"""``react-clip bench``: what the defence costs on this machine, as ratios measured side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from react_clip import ReactClipError, ZeroShotClassifier, __version__, attacks, defenses, storage
from react_clip.bench import BARE, Timing, compare, contenders
from react_clip.cli.common import (
    PhotoReader,
    Subparsers,
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    load_encoder,
    new_command,
    notice,
)
from react_clip.cli.demo import bundled_photos
from react_clip.evaluation.sets import device_name

SCHEMA = 1


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = new_command(
        subparsers,
        "bench",
        run,
        summary="Time the bare encoder, the 14-pass algorithm, ReACT and published Defend-CLIP on the same images.",
        example="react-clip bench photos/ --batch 64 --attacked 0.1 --out bench.json",
    )
    add_photo_argument(parser, nargs="*", note=" (bundled ones by default)")
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    parser.add_argument("--images", type=int, default=64, help="photos are repeated up to so many (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images that arrive together (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of every contender; the median counts (%(default)s)"
    )
    parser.add_argument("--singles", type=int, default=20, help="single images, for the latency (%(default)s)")
    parser.add_argument("--attacked", type=float, default=0.0, help="share of attacked images, 0 to 1 (%(default)s)")
    parser.add_argument("--eps", default="4/255", help="strength of these attacks (%(default)s)")
    parser.add_argument(
        "--defenses", default="", help=f"measure these as well, comma-separated: {', '.join(defenses.names())}"
    )
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON."""
    _check(args)
    others = {name: _defense(name, args.batch) for name in _names(args.defenses)}
    args.photos_in = args.photos_in or bundled_photos()
    reader = PhotoReader(args)
    encoder = load_encoder(args)
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    images = _traffic(args, clf, reader)
    lineup = contenders(clf, guard, batch=args.batch, defenses=others)
    steps = len(lineup) * (1 + args.rounds) + args.singles
    with tqdm(total=steps, unit="turn", disable=args.quiet or None) as bar:

        def progress(label: str) -> None:
            bar.set_description(label)
            bar.update(1)

        timings = compare(lineup, images, batch=args.batch, rounds=args.rounds, singles=args.singles, progress=progress)
    report = _report(args, clf, timings)
    if args.out:
        storage.write_text(args.out, json.dumps(report, indent=2) + "\n")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(timings)
        if args.out:
            notice(args, f"written to {args.out}")
    return reader.exit_code


def _check(args: argparse.Namespace) -> None:
    for name in ("images", "batch", "rounds", "singles"):
        if getattr(args, name) < 1:
            raise ReactClipError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if not 0.0 <= args.attacked <= 1.0:
        raise ReactClipError(f"--attacked is {args.attacked}; it is a share between 0 and 1")


def _defense(name: str, batch: int) -> defenses.Defense:
    """A defence with its own values, its encoder calls as large as everybody's."""
    plain = defenses.from_dict(name)
    return defenses.from_dict({**plain.to_dict(), "max_batch": batch}) if "max_batch" in plain.to_dict() else plain


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _traffic(args: argparse.Namespace, clf: ZeroShotClassifier, reader: PhotoReader) -> Tensor:
    """Photos repeated to the number asked for, each copy a little shifted, the first share of them attacked."""
    size = clf.encoder.image_size
    photos = torch.cat([pixels for _, pixels in reader.batches(size)])
    copies = [photos[i % len(photos)].roll(i // len(photos), dims=2) for i in range(args.images)]
    images = torch.stack(copies).to(clf.device)
    count = round(args.attacked * len(images))
    if count:
        attack = attacks.from_dict({"kind": "pgd", "eps": args.eps})
        # Spread over the batches, as in traffic.
        places = torch.arange(count, device=images.device) * len(images) // count
        parts = []
        for part in torch.split(images[places], args.batch):
            with torch.no_grad():
                answers = clf(part).argmax(-1)
            parts.append(attack(clf, part, answers, seed=args.seed).images)
        images = images.index_copy(0, places, torch.cat(parts))
    return images


def _report(args: argparse.Namespace, clf: ZeroShotClassifier, timings: list[Timing]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": shlex.join(["react-clip", *sys.argv[1:]]),
        "model": clf.encoder.name,
        "classes": len(clf.names),
        "dtype": args.dtype,
        "device": device_name(clf.device),
        "threads": torch.get_num_threads(),
        "images": args.images,
        "batch": args.batch,
        "attacked": args.attacked,
        "eps": args.eps,
        "rounds": args.rounds,
        "seed": args.seed,
        "versions": {"react-clip": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "contenders": [dataclasses.asdict(timing) for timing in timings],
    }


def _print(timings: list[Timing]) -> None:
    width = max(len(timing.label) for timing in timings)
    head = ("images/s", "ms/image", "passes", "backward", "overhead", "p50 ms", "p99 ms", "peak MiB")
    print(f"{'':{width}}" + "".join(f"{title:>10}" for title in head))
    for timing in timings:
        peak = "-" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**20:.0f}"
        numbers = (timing.images_per_second, timing.milliseconds, timing.passes, timing.backward_passes)
        print(
            f"{timing.label:{width}}"
            + "".join(f"{number:>10.2f}" for number in numbers)
            + f"{timing.overhead:>10.2f}{timing.latency_p50:>10.1f}{timing.latency_p99:>10.1f}{peak:>10}"
        )
    by_label = {timing.label: timing for timing in timings}
    ours = by_label["ReACT"]
    for other in (BARE, "all 14 passes", "Defend-CLIP as published"):
        print(f"ReACT runs at {ours.images_per_second / by_label[other].images_per_second:.2f} x the speed of {other}")
