"""``react-clip calibrate``: fit a defence to an encoder and to photos, once."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.choices import MAPPINGS
from react_clip.cli import common, options
from react_clip.cli.photos import CALIBRATION_PHOTOS, PhotoReader

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE = "react-clip calibrate photos/ --model my-clip/ --out calibration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    options.add_dataset_options(parser, metavar="PHOTOS", note="; for second_look any folder of clean photos")
    defense = "what to calibrate (%(default)s)"
    parser.add_argument("--defense", choices=options.DEFENSES, default="second_look", help=defense)
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="result (%(default)s)")
    clean_pass = "fraction of clean photos left as they are (second_look 0.995, without classes 0.97; react 0.95)"
    parser.add_argument("--clean-pass", type=options.fraction, help=clean_pass)
    parser.add_argument("--batch", type=options.count, help="images at a time (64, on a CPU 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of attack, motion and noise (%(default)s)")
    mapping = "curve of sigma over drift, for react (%(default)s)"
    parser.add_argument("--mapping", choices=MAPPINGS, default="linear", help=mapping)
    parser.add_argument("--steps", type=options.count, default=10, help="PGD iterations, for react (%(default)s)")
    options.add_label_options(parser)
    options.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate and write the JSON."""
    encoder = common.load_encoder(args)
    given = {"batch": args.batch or common.batch_size(encoder, 64), "seed": args.seed}
    given |= {} if args.clean_pass is None else {"clean_pass": args.clean_pass}
    provenance = common.provenance(args, encoder)
    calibrate = _react if args.defense == "react" else _second_look
    result, photos, exit_code = calibrate(args, encoder, provenance, given)
    result.save(args.out)
    usage = f"written to {args.out}; use it with --config {args.out}, `react-clip report --calibration` draws it"
    common.print_result(args, result.to_dict(), _lines(result, photos), [usage])
    return exit_code


def _second_look(
    args: argparse.Namespace, encoder: rc.Encoder, provenance: dict[str, Any], given: dict[str, Any]
) -> tuple[rc.Calibration, Sequence[object], int]:
    """From a folder, a file or a data set; also the photos by name, and 2 as exit code if some could not be read."""
    from react_clip.zeroshot import with_everyday_names

    named = args.labels or args.labels_file or args.photos
    clip = common.build_classifier(args, encoder) if named else with_everyday_names(encoder)
    args.limit = args.limit or CALIBRATION_PHOTOS
    path, exit_code = Path(args.dataset.removeprefix("folder:")).expanduser(), 0
    if path.exists():
        reader = PhotoReader([path], args)
        pixels, exit_code = reader.sample(args.limit, encoder), reader.exit_code
        names: Sequence[object] = reader.files
    else:
        pixels = _pixels(args, encoder, common.load_photos(args, encoder, classes=False)[0])
        names = [f"photo {number} of {args.dataset}" for number in range(len(pixels))]
    given["provenance"] = provenance | {"photos": args.dataset}
    result = common.calibrated(args, clip, pixels, **given)
    changed = {"changed_photos": [str(names[number]) for number in result.changed or ()]}
    return result.replace(provenance=result.provenance | changed), names, exit_code


def _react(
    args: argparse.Namespace, encoder: rc.Encoder, provenance: dict[str, Any], given: dict[str, Any]
) -> tuple[rc.Calibration, Sequence[object], int]:
    import torch

    from react_clip.calibration import BUDGETS, calibrate

    # Classes made of the very photos that are attacked would look better than they are.
    photos, clf, _ = common.load_photos(args, encoder, average_train=args.split != "train")
    assert clf is not None, "classes were asked for"
    pixels, labels = _pixels(args, encoder, photos), torch.tensor(photos.labels)
    given |= {"mapping": args.mapping, "steps": args.steps}
    given["provenance"] = provenance | {"data": common.describe(args, photos), "classes": len(clf.names)}
    with common.progress(args, "batch") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed by the caller

        def advance(stage: str, done: int, total: int) -> None:
            common.show(bar, bar.n + 1, total * len(BUDGETS), stage)

        return calibrate(clf, pixels, labels, progress=advance, **given), (), 0


def _pixels(args: argparse.Namespace, encoder: rc.Encoder, photos: rc.data.ImageDataset) -> Tensor:
    from react_clip.preprocess import to_float

    return to_float(photos.pixels(encoder.preprocessing, progress=not args.quiet))


def _lines(result: rc.Calibration, photos: Sequence[object]) -> Iterator[str]:
    """Lines of the terminal: the measured points and the fits of ReACT, the threshold, the warnings."""
    if result.points:
        yield f"{'budget':>8}{'mean r':>10}{'best sigma':>12}{'accuracy there':>16}"
    for point in result.points:
        best = point.accuracy[f"{point.best_sigma:g}"]
        yield f"{point.eps * 255:>5g}/255{point.mean_drift:>9.3f}{point.best_sigma:>12.3f}{best:>15.1%}"
    for name, fit in result.fits.items():
        yield f"{name:>10}: {fit}{'  <- used' if fit == getattr(result.config, 'mapping', None) else ''}"
    interval = "" if result.interval is None else " (95 % interval {:g} to {:g})".format(*result.interval)
    threshold = result.drift_threshold if result.threshold is None else result.threshold
    yield f"threshold {threshold:g}{interval}"
    median = "" if result.median is None else f"; their median score is {result.median:g}"
    yield f"leaves {100 * (result.clean_pass or 0):g} % of {result.photos} clean photos alone{median}"
    yield from common.changed_answers(result, photos)
    for note in result.notes:
        yield f"note: {note}"
