"""``react-clip calibrate``: fit the defence to an encoder, once."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from react_clip import ReactClipError, data
from react_clip.calibration import BUDGETS, SIGMAS, Calibration, calibrate
from react_clip.cli.common import add_model_options, load_encoder, notice
from react_clip.environment import device_name, versions
from react_clip.evaluation.classes import class_source
from react_clip.evaluation.images import read_pixels, to_float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("dataset", help=f"folder:PATH with a sub-folder per class, or one of {', '.join(data.names())}")
    parser.add_argument(
        "--out", type=Path, default=Path("calibration.json"), help="result (%(default)s; plot beside it)"
    )
    parser.add_argument("--data", type=Path, help="root folder of the data sets")
    parser.add_argument("--heads", type=Path, help="folder of ready class features, NAME.npz")
    parser.add_argument("--split", default="train", help="which photos (%(default)s)")
    parser.add_argument("--limit", type=int, help="at most so many photos")
    parser.add_argument("--mapping", default="linear", help="linear, logistic or power_law (%(default)s)")
    parser.add_argument("--clean-pass", type=float, default=0.95, help="share of clean photos left alone (%(default)s)")
    parser.add_argument("--sigmas", help="comma-separated anchor scales to try (0.01 to 0.20 in steps of 0.01)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of attack and noise (%(default)s)")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the JSON and its plot."""
    for name in ("limit", "steps", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ReactClipError(f"--{name} is {value}; it must be at least 1")
    sigmas = SIGMAS if args.sigmas is None else _read_scales(args.sigmas)
    encoder = load_encoder(args)
    root = args.data or data.default_root()
    photos = data.load(args.dataset, root=root, split=args.split, seed=args.seed)
    clf, photos = class_source(encoder, photos, args.heads, root).classifier(encoder, progress=not args.quiet)
    photos = photos if args.limit is None else photos.take(args.limit, args.seed)
    pixels = to_float(read_pixels(photos, encoder.image_size, progress=not args.quiet))
    with _Bar(args.quiet) as bar:
        result = calibrate(
            clf,
            pixels,
            torch.tensor(photos.labels),
            mapping=args.mapping,
            sigmas=sigmas,
            steps=args.steps,
            clean_pass=args.clean_pass,
            batch=args.batch,
            seed=args.seed,
            progress=bar.advance,
            provenance={
                "command": "react-clip " + " ".join(sys.argv[1:]),
                "model": encoder.name,
                "weights": encoder.fingerprint(),
                "dtype": args.dtype,
                "device": device_name(encoder.device),
                "data": {
                    "name": args.dataset,
                    "split": args.split,
                    "photos": len(photos),
                    "sha256": photos.fingerprint(),
                },
                "classes": len(clf.names),
                "versions": versions(),
            },
        )
    result.save(args.out)
    plot = args.out.with_suffix(".png")
    _plot(args, result, plot)
    if args.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _describe(result)
        notice(args, f"written to {args.out}; use it with --config {args.out} or rc.ReACT.load({str(args.out)!r})")
    return 0


def _read_scales(text: str) -> tuple[float, ...]:
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ReactClipError(f"--sigmas is {text!r}; give numbers such as 0.02,0.05,0.1") from None
    if not all(0 < scale <= 1 for scale in scales):
        raise ReactClipError(f"--sigmas is {text!r}; every anchor scale lies in (0, 1]")
    return scales


def _plot(args: argparse.Namespace, result: Calibration, path: Path) -> None:
    """The picture is a convenience: without matplotlib the calibration still counts."""
    try:
        from react_clip.report.figures import calibration_figure
        from react_clip.report.style import save_figure

        save_figure(calibration_figure(result), path)
    except ImportError:
        notice(args, "no plot: it needs matplotlib (`pip install 'react-clip[eval]'`)")


def _describe(result: Calibration) -> None:
    print(f"{'budget':>8}{'mean r':>10}{'best sigma':>12}{'accuracy there':>16}")
    for point in result.points:
        best = point.accuracy[f"{point.best_sigma:g}"]
        print(f"{point.eps * 255:>5g}/255{point.mean_drift:>9.3f}{point.best_sigma:>12.3f}{best:>15.1%}")
    for name, fit in result.fits.items():
        chosen = "  <- used" if fit == result.config.mapping else ""
        print(f"{name:>10}: {fit}{chosen}")
    for note in result.notes:
        print(f"{'note':>10}: {note}")
    print(f"{'tau':>10}: {result.config.tau:g}, which leaves {result.clean_pass:.0%} of the clean photos alone")


class _Bar:
    """One bar over all budgets."""

    def __init__(self, quiet: bool) -> None:
        self._bar: tqdm[Any] = tqdm(total=1, unit="batch", disable=quiet or None)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def advance(self, stage: str, done: int, total: int) -> None:
        self._bar.total = total * len(BUDGETS)
        self._bar.set_description(stage)
        self._bar.update(1)
