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

    from react_clip import Encoder
    from react_clip.calibration import Calibration

EXAMPLE = "react-clip calibrate photos/ --model my-clip/ --out calibration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    options.add_dataset_options(parser, metavar="PHOTOS", note="; for second_look any folder of clean photos")
    defense = "what to calibrate (%(default)s)"
    parser.add_argument("--defense", choices=options.DEFENSES, default="second_look", help=defense)
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="result (%(default)s)")
    clean_pass = "fraction of clean photos left as they are (0.97 for second_look, 0.95 for react)"
    parser.add_argument("--clean-pass", type=options.fraction, help=clean_pass)
    parser.add_argument("--batch", type=options.count, help="images at a time (64, on a CPU 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of attack, motion and noise (%(default)s)")
    mapping = "curve of sigma over drift, for react (%(default)s)"
    parser.add_argument("--mapping", choices=MAPPINGS, default="linear", help=mapping)
    parser.add_argument("--steps", type=options.count, default=10, help="PGD iterations, for react (%(default)s)")
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate and write the JSON."""
    encoder = common.load_encoder(args)
    calibrate = _react if args.defense == "react" else _second_look
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed below
        result, exit_code = calibrate(args, encoder)
    result.save(args.out)
    usage = f"written to {args.out}; use it with --config {args.out}, `react-clip report --calibration` draws it"
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

    from react_clip.calibration import BUDGETS, calibrate

    # Classes made of the very photos that are attacked would look better than they are.
    photos, clf, _ = common.load_photos(args, encoder, average_train=args.split != "train")
    assert clf is not None, "classes were asked for"
    pixels = common.pixels_of(args, photos, encoder)
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
            steps=args.steps,
            progress=advance,
            **given,
        )
    return result, 0


def _common_arguments(args: argparse.Namespace, encoder: Encoder, **photos: Any) -> dict[str, Any]:
    """Options of both calibrations."""
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
    args.limit = args.limit or common.CALIBRATION_PHOTOS
    path = Path(args.dataset.removeprefix("folder:")).expanduser()
    if path.exists():
        reader = PhotoReader([path], args)
        return reader.sample(args.limit, encoder), reader.exit_code
    photos, *_ = common.load_photos(args, encoder, classes=False)
    return common.pixels_of(args, photos, encoder), 0


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
