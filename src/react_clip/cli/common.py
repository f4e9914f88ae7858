"""Functions that several commands share: print, load the model, build the classifier and the defence.

Heavy modules are imported where they are used.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.errors import ReactClipError
from react_clip.storage import read_text

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

    from react_clip.secret import Seed

# ---------------------------------------------------------------------- output


def notice(args: argparse.Namespace, line: str) -> None:
    """Print a line for people to stderr, unless --quiet is given."""
    if not args.quiet:
        print(line, file=sys.stderr)


def print_result(
    args: argparse.Namespace, document: object, lines: Iterable[str] = (), notices: Iterable[str] = ()
) -> None:
    """Print ``document`` as JSON with --json; otherwise lines to stdout and notices to stderr."""
    if args.json:
        print(json.dumps(document, indent=2))
        return
    for line in lines:
        print(line)
    for line in notices:
        notice(args, line)


def progress(args: argparse.Namespace, unit: str, total: int | None = None, stage: str = "") -> tqdm[Any]:
    """A progress bar on stderr; without a terminal a line every few seconds, with --quiet nothing."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 4.0
    return tqdm(total=total, unit=f" {unit}", desc=stage, disable=args.quiet, mininterval=interval, dynamic_ncols=True)


def show(bar: tqdm[Any], done: float, total: int | None = None, text: str = "") -> None:
    """Set the steps that are done, all steps if they were not known, and a text behind the bar."""
    bar.total = total or bar.total
    bar.set_postfix_str(text, refresh=False)
    bar.update(done - bar.n)


def say(line: str, *, error: bool = False) -> None:
    """Print a line to stdout, or to stderr, above the progress bar, at once."""
    from tqdm import tqdm

    with tqdm.external_write_mode():
        print(line, file=sys.stderr if error else sys.stdout, flush=True)


def diagnostics(out: rc.Defended) -> list[dict[str, Any]]:
    """For each image the values that decided whether it was corrected, for JSON; None where one was not measured."""
    from react_clip.defenses.result import MEASUREMENTS

    unmeasured = dict.fromkeys(MEASUREMENTS)
    answer = ("name", "probability")
    return [unmeasured | {key: value for key, value in row.items() if key not in answer} for row in out.to_dict()]


# ---------------------------------------------------------------------- model, classes, defence


def secret_seed(args: argparse.Namespace) -> Seed:
    """--seed, the secret of --secret-file, or that of the process and a notice if it is a new one."""
    from react_clip.secret import read_secret, seed_or_secret, was_drawn

    key = seed_or_secret(args.seed, None if args.secret_file is None else read_secret(args.secret_file))
    if was_drawn(key):
        repeat = "--secret-file keeps it, --seed 0 repeats answers in public"
        notice(args, f"the noise is keyed by a new random secret: answers may differ from run to run; {repeat}")
    return key


def load_encoder(args: argparse.Namespace) -> rc.Encoder:
    """Load --model on --device in --dtype, after a notice."""
    notice(args, f"loading {args.model}")  # before the imports, which take seconds
    return rc.load(args.model, device=args.device, dtype=args.dtype)


def provenance(args: argparse.Namespace, encoder: rc.Encoder) -> dict[str, Any]:
    """Command, model and machine, for a calibration file."""
    from react_clip.environment import device_name, typed_command, versions

    return {
        "command": typed_command(),
        "model": encoder.name,
        "weights": encoder.fingerprint(),
        "dtype": args.dtype,
        "device": device_name(encoder.device),
        "versions": versions(),
    }


def batch_size(encoder: rc.Encoder, largest: int) -> int:
    """Images at a time: few on a CPU, which gains nothing from more, so that answers and progress come sooner."""
    return 4 if encoder.device.type == "cpu" else largest


def build_classifier(args: argparse.Namespace, encoder: rc.Encoder) -> rc.ZeroShotClassifier:
    """The classifier that --labels, --labels-file or --photos describe; the label table's vocabulary without them."""
    if args.photos is not None:
        return rc.ZeroShotClassifier.from_folder(encoder, args.photos, progress=not args.quiet)
    return rc.ZeroShotClassifier(encoder, _class_names(args), templates=args.template)


def build_clip(args: argparse.Namespace, encoder: rc.Encoder) -> rc.ZeroShotClassifier | rc.Encoder:
    """The same, or the encoder alone where no classes are given and it cannot name anything."""
    from react_clip.zeroshot import can_name

    named = args.labels or args.labels_file or args.photos or can_name(encoder)
    return build_classifier(args, encoder) if named else encoder


def _class_names(args: argparse.Namespace) -> list[str]:
    if args.labels is not None:
        # A trailing comma is common and does not mean a blank label.
        return str(args.labels).rstrip().removesuffix(",").split(",")
    if args.labels_file is None:
        return list(rc.LabelTable.load().vocabulary())
    if not (names := [line for line in read_text(args.labels_file).splitlines() if line.strip()]):
        raise ReactClipError(f"{args.labels_file} holds no names; write one a line")
    return names


def build_guard(args: argparse.Namespace, encoder: rc.Encoder) -> rc.defenses.Defense:
    """The defence: --config or --defense where given, else the default for the encoder."""
    defense = getattr(args, "defense", None)
    if defense == "none":
        return rc.Undefended()
    if args.config == "paper":
        return rc.ReACT()
    if args.config is not None:
        guard = rc.defenses.Defense.load(args.config)
        guard.check(encoder)
        return guard
    if defense is None:
        return rc.defenses.default_for(encoder)
    return (rc.SecondLook if defense == "second_look" else rc.ReACT).for_encoder(encoder)


def load_defended(args: argparse.Namespace) -> tuple[rc.ZeroShotClassifier, rc.defenses.Defense]:
    """The classifier and the defence that the options describe, and a notice about it."""
    encoder = load_encoder(args)
    clf, guard = build_classifier(args, encoder), build_guard(args, encoder)
    what = "there is no defence" if isinstance(guard, rc.Undefended) else f"the defence is {type(guard).label}"
    notice(args, f"{what}; --defense or --config gives another")
    return clf, guard


def both_guards(args: argparse.Namespace, encoder: rc.Encoder) -> list[rc.defenses.Defense]:
    """SecondLook and ReACT where they have constants for the encoder; --config comes first, for the one of its kind."""
    guards = [] if args.config is None else [build_guard(args, encoder)]
    for kind in (rc.SecondLook, rc.ReACT):
        if kind.kind not in [guard.kind for guard in guards]:
            with suppress(ReactClipError):
                guards.append(kind.for_encoder(encoder))
    return guards or [rc.defenses.default_for(encoder)]  # with neither, this raises and says what to do


def calibrated(
    args: argparse.Namespace,
    clip: rc.ZeroShotClassifier | rc.Encoder,
    files: Sequence[Path],
    pixels: Tensor,
    **given: Any,
) -> rc.Calibration:
    """SecondLook's calibration on clean photos, with a progress bar; it holds the files whose answers change."""
    from react_clip.calibration import calibrate_threshold

    with progress(args, "photo", len(pixels), "calibrating") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed by the caller
        result = calibrate_threshold(clip, pixels, progress=lambda *done: show(bar, *done), **given)
    changed = {"changed_photos": [str(files[number]) for number in result.changed or ()]}
    return result.replace(provenance=result.provenance | changed)


# ---------------------------------------------------------------------- labelled photos


def load_photos(
    args: argparse.Namespace, encoder: rc.Encoder, *, classes: bool = True, average_train: bool = True
) -> tuple[rc.data.ImageDataset, rc.ZeroShotClassifier | None, str]:
    """The photos that the data set options describe, their classifier, and where its class features come from.

    Photos of classes that --heads lacks are dropped. Without ``classes`` there is no classifier, and any folder or file
    of photos will do; without ``average_train`` there is none that is made of photos of the train split.
    """
    from react_clip.data.formats import find_photos
    from react_clip.evaluation.sets import class_source

    root, path = args.data or rc.data.default_root(), Path(args.dataset.removeprefix("folder:")).expanduser()
    if not classes and path.exists():
        photos = find_photos(path)
    else:
        photos = rc.data.load(args.dataset, root=root, split=args.split, seed=args.seed)
    classifier, description = None, "none needed"
    if classes:
        source = class_source(encoder, photos, args.heads, root, average_train=average_train)
        classifier, photos = source.classifier(encoder, progress=not args.quiet)
        description = source.description
    return photos if args.limit is None else photos.take(args.limit, args.seed), classifier, description


def describe(args: argparse.Namespace, photos: rc.data.ImageDataset) -> dict[str, Any]:
    """Name, split and number of the photos of :func:`load_photos`, as result files record them."""
    return {"name": args.dataset, "split": args.split, "photos": len(photos), "notes": list(photos.notes)}
