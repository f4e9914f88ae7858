"""``react-clip calibrate``: fit the defence to an encoder, once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from react_clip import ReactClipError
from react_clip.calibration import BUDGETS, SIGMAS, Calibration, calibrate
from react_clip.cli import common
from react_clip.cli.progress import Progress
from react_clip.environment import device_name, versions
from react_clip.preprocess import to_float

EXAMPLE = "react-clip calibrate folder:photos --model my-clip/ --clean-pass 0.95 --out calibration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    common.add_dataset_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("calibration.json"), help="result (%(default)s; plot beside it)"
    )
    parser.add_argument("--mapping", default="linear", help="linear, logistic or power_law (%(default)s)")
    parser.add_argument("--clean-pass", type=float, default=0.95, help="share of clean photos left alone (%(default)s)")
    parser.add_argument("--sigmas", help="comma-separated anchor scales to try (0.01 to 0.20 in steps of 0.01)")
    parser.add_argument("--steps", type=int, default=10, help="PGD iterations (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of attack and noise (%(default)s)")
    common.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate, write the JSON and its plot."""
    common.check_at_least_one(args, "steps", "batch")
    sigmas = SIGMAS if args.sigmas is None else _read_scales(args.sigmas)
    encoder = common.load_encoder(args)
    photos, clf, _ = common.load_photos(args, encoder)
    assert clf is not None
    provenance = {
        "command": common.command_line(),
        "model": encoder.name,
        "weights": encoder.fingerprint(),
        "dtype": args.dtype,
        "device": device_name(encoder.device),
        "data": common.describe_photos(args, photos),
        "classes": len(clf.names),
        "versions": versions(),
    }
    pixels = to_float(photos.pixels(encoder.image_size, progress=not args.quiet))
    with Progress(quiet=args.quiet, unit="batch") as progress:

        def advance(stage: str, done: int, total: int) -> None:
            progress.show(stage, total=total * len(BUDGETS))
            progress.advance()

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
            progress=advance,
            provenance=provenance,
        )
    result.save(args.out)
    common.try_to_plot(args, lambda: _plot(result, args.out.with_suffix(".png")))
    usage = f"written to {args.out}; use it with --config {args.out} or rc.ReACT.load({str(args.out)!r})"
    common.print_result(args, result.to_dict(), _describe(result), [usage])
    return 0


def _read_scales(text: str) -> tuple[float, ...]:
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ReactClipError(f"--sigmas is {text!r}; give numbers such as 0.02,0.05,0.1") from None
    if not all(0 < scale <= 1 for scale in scales):
        raise ReactClipError(f"--sigmas is {text!r}; every anchor scale lies in (0, 1]")
    return scales


def _plot(result: Calibration, path: Path) -> None:
    from react_clip.report.figures import calibration_figure
    from react_clip.report.style import save_figure

    save_figure(calibration_figure(result), path)


def _describe(result: Calibration) -> Iterator[str]:
    """Lines of the terminal: the measured points, the fits and the threshold."""
    yield f"{'budget':>8}{'mean r':>10}{'best sigma':>12}{'accuracy there':>16}"
    for point in result.points:
        best = point.accuracy[f"{point.best_sigma:g}"]
        yield f"{point.eps * 255:>5g}/255{point.mean_drift:>9.3f}{point.best_sigma:>12.3f}{best:>15.1%}"
    for name, fit in result.fits.items():
        chosen = "  <- used" if fit == result.config.mapping else ""
        yield f"{name:>10}: {fit}{chosen}"
    for note in result.notes:
        yield f"{'note':>10}: {note}"
    yield f"{'tau':>10}: {result.config.tau:g}, which leaves {result.clean_pass:.0%} of the clean photos alone"
