"""``react-clip calibrate``: fit a defence to an encoder and to photos, once."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import react_clip as rc
from react_clip.choices import MAPPINGS
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader
from react_clip.intervals import share_in_words

EXAMPLE = "react-clip calibrate photos/ --model my-clip/ --out calibration.json"
_PHOTOS = 500
"""Photos that SecondLook is calibrated on unless --limit says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    options.add_dataset_options(parser, metavar="PHOTOS", note="; for second_look a folder of clean photos")
    parser.add_argument("--defense", choices=options.DEFENSES, default="second_look", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="result (%(default)s)")
    parser.add_argument("--clean-pass", type=options.fraction, help="fraction left as it is (0.995, react 0.95)")
    parser.add_argument("--batch", type=options.count, help="images at a time (64, on a CPU 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of attack, motion and noise (%(default)s)")
    parser.add_argument("--mapping", choices=MAPPINGS, default="linear", help="for react (%(default)s)")
    parser.add_argument("--steps", type=options.count, default=10, help="PGD iterations, for react (%(default)s)")
    options.add_label_options(parser)
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate and write the JSON."""
    encoder = common.load_encoder(args)
    given = {"batch": args.batch or common.batch_size(encoder, 64), "seed": args.seed}
    given |= {} if args.clean_pass is None else {"clean_pass": args.clean_pass}
    calibrate = _react if args.defense == "react" else _second_look
    result, exit_code = calibrate(args, encoder, common.provenance(args, encoder), given)
    result.save(args.out)
    usage = f"written to {args.out}; use it with --config {args.out}"
    common.print_result(args, result.to_dict(), _lines(result), [usage])
    return exit_code


def _second_look(
    args: argparse.Namespace, encoder: rc.Encoder, provenance: dict[str, Any], given: dict[str, Any]
) -> tuple[rc.Calibration, int]:
    """From a folder or a file; the exit code is 2 if some photos could not be read."""
    reader = PhotoReader([options.existing(args.dataset.removeprefix("folder:"))], args)
    clip = common.build_clip(args, encoder)
    pixels = reader.sample(args.limit or _PHOTOS, encoder)
    given["provenance"] = provenance | {"photos": args.dataset}
    return common.calibrated(args, clip, reader.files, pixels, **given), reader.exit_code


def _react(
    args: argparse.Namespace, encoder: rc.Encoder, provenance: dict[str, Any], given: dict[str, Any]
) -> tuple[rc.Calibration, int]:
    import torch

    from react_clip.calibration import BUDGETS, calibrate
    from react_clip.preprocess import to_float

    # Classes made of the very photos that are attacked would look better than they are.
    photos, clf, _ = common.load_photos(args, encoder, average_train=args.split != "train")
    assert clf is not None, "classes were asked for"
    pixels = to_float(photos.pixels(encoder.preprocessing, progress=not args.quiet))
    given |= {"mapping": args.mapping, "steps": args.steps}
    data = common.describe(args, photos) | {"sha256": photos.fingerprint()}
    given["provenance"] = provenance | {"data": data, "classes": len(clf.names)}
    with common.progress(args, "batch") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed by the caller

        def advance(stage: str, done: int, total: int) -> None:
            common.show(bar, bar.n + 1, total * len(BUDGETS), stage)

        return calibrate(clf, pixels, torch.tensor(photos.labels), progress=advance, **given), 0


def _lines(result: rc.Calibration) -> Iterator[str]:
    """Lines of the terminal: the measured points and the fits of ReACT, the threshold, the warnings."""
    if result.points:
        yield f"{'budget':>8}{'mean r':>10}{'best sigma':>12}{'accuracy there':>16}"
    for point in result.points:
        best = point.accuracy[f"{point.best_sigma:g}"]
        yield f"{point.eps * 255:>5g}/255{point.mean_drift:>9.3f}{point.best_sigma:>12.3f}{best:>15.1%}"
    for name, fit in result.fits.items():
        yield f"{name:>10}: {fit}{'  <- used' if fit == getattr(result.config, 'mapping', None) else ''}"
    threshold = result.drift_threshold if result.threshold is None else result.threshold
    yield f"threshold {threshold:g} leaves {100 * (result.clean_pass or 0):g} % of {result.photos} clean photos alone"
    if result.changed is not None:
        yield f"the answer changes for {share_in_words(len(result.changed), result.photos)} clean photos"
    yield from (f"  changed: {photo}" for photo in result.provenance.get("changed_photos", ()))
    yield from (f"note: {note}" for note in result.notes)
