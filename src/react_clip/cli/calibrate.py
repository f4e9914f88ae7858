"""``react-clip calibrate``: fit a defence to an encoder and to photos, once."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.choices import MAPPINGS
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader
from react_clip.environment import device_name, typed_command, versions

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip import Calibration, Encoder

EXAMPLE = "react-clip calibrate photos/ --model my-clip/ --out calibration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    options.add_dataset_options(parser, metavar="PHOTOS", note="; for second_look any folder of clean photos")
    parser.add_argument(
        "--defense", choices=options.DEFENSES, default="second_look", help="what to calibrate (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("calibration.json"), help="result (%(default)s; ReACT's plot beside it)"
    )
    parser.add_argument(
        "--clean-pass",
        type=options.fraction,
        help="fraction of clean photos left as they are (0.97 for second_look, 0.95 for react)",
    )
    parser.add_argument("--batch", type=options.count, help="images at a time (64, on a CPU 4)")
    parser.add_argument("--seed", type=options.seed, default=0, help="seed of attack, motion and noise (%(default)s)")
    group = parser.add_argument_group("for --defense react")
    group.add_argument("--mapping", choices=MAPPINGS, default="linear", help="curve of sigma over drift (%(default)s)")
    scales = "comma-separated anchor scales to try (0.01 to 0.28 in steps of 0.01)"
    group.add_argument("--sigmas", type=_scales, help=scales)
    group.add_argument("--steps", type=options.count, default=10, help="PGD iterations (%(default)s)")
    options.add_model_options(parser)


def _scales(text: str) -> tuple[float, ...]:
    scales = tuple(map(options.fraction, options.comma_separated(text)))
    if not scales or 0 in scales:
        raise options.BadValueError(f"{text!r}: give anchor scales above 0 such as 0.02,0.05,0.1")
    return scales


def run(args: argparse.Namespace) -> int:
    """Calibrate and write the JSON, and for ReACT a plot."""
    encoder = common.load_encoder(args)
    calibrate = _react if args.defense == "react" else _second_look
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed below
        result, exit_code = calibrate(args, encoder)
    result.save(args.out)
    if result.points:
        common.try_to_plot(args, lambda: _plot(result, args.out.with_suffix(".png")))
    usage = f"written to {args.out}; use it with --config {args.out} or rc.Defense.load({str(args.out)!r})"
    common.print_result(args, result.to_dict(), _lines(result), [usage])
    return exit_code


def _second_look(args: argparse.Namespace, encoder: Encoder) -> tuple[Calibration, int]:
    from react_clip.calibration import calibrate_threshold

    pixels, exit_code = _clean_photos(args, encoder)
    given = _common_arguments(args, encoder, photos=args.dataset)
    with common.progress(args, "photo", len(pixels), "measuring") as bar:
        result = calibrate_threshold(encoder, pixels, progress=lambda done, total: common.show(bar, done), **given)
    return result, exit_code


def _react(args: argparse.Namespace, encoder: Encoder) -> tuple[Calibration, int]:
    import torch

    from react_clip.calibration import BUDGETS, SIGMAS, calibrate
    from react_clip.preprocess import to_float

    # Classes made of the very photos that are attacked would look better than they are.
    photos, clf, _ = common.load_photos(args, encoder, average_train=args.split != "train")
    assert clf is not None, "classes were asked for"
    pixels = to_float(photos.pixels(encoder.preprocessing, progress=not args.quiet))
    given = _common_arguments(args, encoder, data=common.describe_photos(args, photos), classes=len(clf.names))
    with common.progress(args, "batch") as bar:

        def advance(stage: str, done: int, total: int) -> None:
            bar.total = total * len(BUDGETS)
            bar.set_description(stage, refresh=False)
            bar.update()

        result = calibrate(
            clf,
            pixels,
            torch.tensor(photos.labels),
            mapping=args.mapping,
            sigmas=args.sigmas or SIGMAS,
            steps=args.steps,
            progress=advance,
            **given,
        )
    return result, 0


def _common_arguments(args: argparse.Namespace, encoder: Encoder, **photos: Any) -> dict[str, Any]:
    """What both calibrations take."""
    provenance = {
        "command": typed_command(),
        "model": encoder.name,
        "weights": encoder.fingerprint(),
        "dtype": args.dtype,
        "device": device_name(encoder.device),
        "versions": versions(),
        **photos,
    }
    given = {} if args.clean_pass is None else {"clean_pass": args.clean_pass}
    batch = args.batch or common.batch_size(encoder, 64)
    return {"batch": batch, "seed": args.seed, "provenance": provenance, **given}


def _clean_photos(args: argparse.Namespace, encoder: Encoder) -> tuple[Tensor, int]:
    """Pixels of a folder, of a file or of a data set, and the exit code: 2 if some files could not be read."""
    limit = args.limit or common.CALIBRATION_PHOTOS
    path = Path(args.dataset.removeprefix("folder:")).expanduser()
    if path.exists():
        reader = PhotoReader([path], args)
        return reader.sample(limit, encoder), reader.exit_code
    from react_clip import data
    from react_clip.preprocess import to_float

    photos = data.load(args.dataset, root=args.data or data.default_root(), split=args.split, seed=args.seed)
    photos = photos.take(limit, args.seed)
    return to_float(photos.pixels(encoder.preprocessing, progress=not args.quiet)), 0


def _plot(result: Calibration, path: Path) -> None:
    from react_clip.report.figures import calibration_figure
    from react_clip.report.style import save_figure

    save_figure(calibration_figure(result), path)


def _lines(result: Calibration) -> Iterator[str]:
    """Lines of the terminal: the measured points and the fits of ReACT, the threshold, the warnings."""
    if result.points:
        yield f"{'budget':>8}{'mean r':>10}{'best sigma':>12}{'accuracy there':>16}"
    for point in result.points:
        best = point.accuracy[f"{point.best_sigma:g}"]
        yield f"{point.eps * 255:>5g}/255{point.mean_drift:>9.3f}{point.best_sigma:>12.3f}{best:>15.1%}"
    for name, fit in result.fits.items():
        yield f"{name:>10}: {fit}{'  <- used' if fit == getattr(result.config, 'mapping', None) else ''}"
    interval = "" if result.interval is None else " (95 % interval {:g} to {:g})".format(*result.interval)
    yield f"threshold {result.threshold:g}{interval}"
    median = "" if result.median is None else f"; their median score is {result.median:g}"
    yield f"leaves {result.clean_pass:.0%} of {result.photos} clean photos alone{median}"
    for note in result.notes:
        yield f"note: {note}"
