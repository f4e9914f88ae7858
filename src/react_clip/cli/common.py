"""Options and building blocks that several commands share. Heavy modules are imported where they are used."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.choices import dataset_names
from react_clip.errors import MissingFileError, ReactClipError, missing_or_wrong

if TYPE_CHECKING:
    from react_clip import Defended, Encoder, ReACT, SecondLook, ZeroShotClassifier
    from react_clip.data import ImageDataset
    from react_clip.noise import Seed

DEFAULT_MODEL = "clip-vit-b-16"
MOST_PHOTOS = 500
"""Photos that SecondLook is calibrated on unless --limit says otherwise."""
DEFENSES = ("second_look", "react")
DEFENSE_HELP = "second_look, or react: the paper's (second_look where the model has a threshold for it, else react)"

# ---------------------------------------------------------------------- options


def comma_separated(text: str) -> tuple[str, ...]:
    """The names in a list such as ``"cifar10, dtd10"``."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)


def add_model_options(
    parser: argparse.ArgumentParser,
    *,
    dtype: str | None = "fp32",
    dtypes: str = "fp32, bf16, fp16, or auto: fp16 on a GPU where that is safe (%(default)s)",
) -> None:
    """Add --model, --device and --dtype; ``dtype`` is the default of the last one and ``dtypes`` its help text."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT, onnx:DIR, openvino:DIR (%(default)s)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (CUDA if there is one)")
    group.add_argument("--dtype", default=dtype, help=dtypes)


def add_label_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for classes."""
    group = parser.add_argument_group("labels")
    group.add_argument("--labels", help="comma-separated names, such as 'cat, dog, teapot'")
    group.add_argument("--labels-file", type=Path, help="a text file with one name a line")
    group.add_argument("--photos", type=Path, help="a folder with one sub-folder of photos per class, instead of names")
    group.add_argument("--template", action="append", help="prompt with {} for the name; repeat for an ensemble")


def add_defense_options(parser: argparse.ArgumentParser, *, choose: bool = True, seed: str = "a new secret") -> None:
    """Add the options for the defence; --defense, --calibrate-on and a secret ``seed`` only with ``choose``."""
    group = parser.add_argument_group("defence")
    if choose:
        group.add_argument("--defense", choices=DEFENSES, help=DEFENSE_HELP)
        measure = "clean photos on which SecondLook measures its threshold first"
        group.add_argument("--calibrate-on", type=Path, metavar="PHOTOS", help=measure)
    group.add_argument(
        "--config",
        help="JSON written by `react-clip calibrate`, or `paper`: the paper's constants (by default the model's own)",
    )
    # Commands that defend photos draw a secret seed, so that the noise cannot be predicted; demo and bench repeat.
    default, text = (None, seed) if choose else (0, "0")
    group.add_argument("--seed", type=int, default=default, help=f"seed of the random numbers ({text})")


def add_dataset_options(parser: argparse.ArgumentParser, *, metavar: str = "DATASET", note: str = "") -> None:
    """Add the options that choose labelled photos: the data set, its root, class features, split and limit."""
    known = f"folder:PATH with a sub-folder per class, or one of {', '.join(dataset_names())}{note}"
    parser.add_argument("dataset", metavar=metavar, help=known)
    parser.add_argument("--data", type=Path, help="root folder of the data sets ($REACT_CLIP_DATA, else the cache)")
    parser.add_argument("--heads", type=Path, help="ready class features: NAME.npz, or a folder of such files")
    parser.add_argument("--split", default="train", help="split of the data set (%(default)s)")
    parser.add_argument(
        "--limit", type=int, help="largest number of photos; all are kept in memory, 150 KB each at 224 pixels"
    )


def add_cluster_options(parser: argparse.ArgumentParser, *, workers: str) -> None:
    """Add --engine, --address and --workers; ``workers`` is the help text of the last one."""
    group = parser.add_argument_group("many machines")
    group.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="this process, or a Ray cluster (%(default)s)"
    )
    group.add_argument("--address", help="host:port of the cluster, or auto (by default one on this machine)")
    group.add_argument("--workers", type=int, help=workers)


# ---------------------------------------------------------------------- checks, made before slow imports


def check_counts(args: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Refuse numbers below ``least``."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            raise ReactClipError(f"{_flag(name)} is {value}; it must be at least {least}")


def check_eps(args: argparse.Namespace) -> None:
    """Refuse an --eps that is no length in pixel values."""
    from react_clip.config import check_length, read_length

    try:
        check_length(read_length(args.eps))
    except ValueError as error:
        raise ReactClipError(f"--eps is {args.eps!r}; {error}") from None


def check_exists(path: Path, way_out: str = "check the path") -> None:
    """Refuse a path that does not exist."""
    if not path.exists():
        raise MissingFileError(f"{path} does not exist; {way_out}")


def check_paths(args: argparse.Namespace, *names: str) -> None:
    """Refuse options that are paths of nothing."""
    for name in names:
        if (path := getattr(args, name, None)) is not None:
            check_exists(Path(path), f"check {_flag(name)}")


def check_label_options(args: argparse.Namespace) -> None:
    """Refuse options for classes and defence that are empty, exclude each other or name missing files."""
    given = [_flag(name) for name in ("labels", "labels_file", "photos") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ReactClipError(f"{' and '.join(given)} are both given; choose one of them")
    if args.labels is not None and not args.labels.replace(",", "").strip():
        raise ReactClipError("--labels is empty; give names such as --labels 'cat, dog, teapot'")
    defense, photos = getattr(args, "defense", None), getattr(args, "calibrate_on", None)
    config = getattr(args, "config", None)
    if config is not None and defense is not None:
        raise ReactClipError(f"--config {config} and --defense {defense} are both given; choose one of them")
    if photos is not None and (config is not None or defense == "react"):
        raise ReactClipError("--calibrate-on measures the threshold of SecondLook; leave out --config and react")
    check_paths(args, "labels_file", "photos", "calibrate_on", *(["config"] if config != "paper" else []))


def check_dataset_options(args: argparse.Namespace) -> None:
    """Refuse a limit below 1 and folders that do not exist; names of data sets are checked when they are loaded."""
    check_counts(args, "limit")
    check_paths(args, "data", "heads")
    if args.dataset.startswith("folder:") or "/" in args.dataset:
        check_exists(Path(args.dataset.removeprefix("folder:")).expanduser())


def check_cluster_options(args: argparse.Namespace) -> None:
    """Refuse options of a cluster without one."""
    for name in ("address", "workers"):
        if args.engine != "ray" and getattr(args, name) is not None:
            raise ReactClipError(f"--{name} is {getattr(args, name)!r}, but the engine is local; add --engine ray")
    check_counts(args, "workers")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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


def try_to_plot(args: argparse.Namespace, draw: Callable[[], object]) -> None:
    """Draw a figure; without matplotlib print a notice instead."""
    try:
        draw()
    except ImportError:
        notice(args, "no plot: it needs matplotlib (`pip install 'react-clip[eval]'`)")


def command_line() -> str:
    """The command as it was typed, for the records in result files."""
    return shlex.join(["react-clip", *sys.argv[1:]])


def diagnostics(out: Defended, row: int) -> dict[str, Any]:
    """The values that decided whether one image was corrected, for JSON; None where one was not measured."""
    values = {name: float(getattr(out, name)[row]) for name in ("drift", "instability", "score", "sigma")}
    measured = {name: None if math.isnan(value) else value for name, value in values.items()}
    return {"gated": bool(out.gated[row]), **measured, "passes": round(out.passes[row].item(), 4)}


# ---------------------------------------------------------------------- model, classes, defence


def secret_seed(args: argparse.Namespace) -> Seed:
    """--seed, or a new secret and a notice about it."""
    from react_clip.noise import process_secret

    if args.seed is not None:
        return int(args.seed)
    notice(args, "the noise is keyed by a new random secret: answers may differ from run to run; --seed 0 repeats them")
    return process_secret()


def load_encoder(args: argparse.Namespace) -> Encoder:
    """Load --model on --device in --dtype, after a notice."""
    notice(args, f"loading {args.model}")  # before the imports, which take seconds
    from react_clip import encoders

    return encoders.load(args.model, device=args.device, dtype=args.dtype)


def batch_size(encoder: Encoder, largest: int) -> int:
    """Images at a time: few on a CPU, which gains nothing from more, so that answers and progress come sooner."""
    return 4 if encoder.device.type == "cpu" else largest


def build_classifier(args: argparse.Namespace, encoder: Encoder) -> ZeroShotClassifier:
    """The classifier that --labels, --labels-file or --photos describe; the label bank's vocabulary without them."""
    from react_clip.zeroshot import ZeroShotClassifier

    if args.photos is not None:
        return ZeroShotClassifier.from_folder(encoder, args.photos, progress=not args.quiet)
    return ZeroShotClassifier(encoder, _class_names(args, encoder), templates=args.template)


def _class_names(args: argparse.Namespace, encoder: Encoder) -> list[str]:
    from react_clip.bank import LabelBank

    if args.labels is not None:
        # A trailing comma is common and does not mean a blank label.
        return str(args.labels).rstrip().removesuffix(",").split(",")
    if args.labels_file is not None:
        try:
            lines = args.labels_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise missing_or_wrong(args.labels_file, f"{args.labels_file} cannot be read: {reason}") from None
        if not (names := [line for line in lines if line.strip()]):
            raise ReactClipError(f"{args.labels_file} holds no names; write one a line")
        return names
    bank = LabelBank.load()
    if encoder.base != bank.encoder:
        raise ReactClipError(f"{encoder.name!r} needs names; give --labels 'cat, dog', --labels-file or --photos")
    return list(bank.vocabulary())


def build_guard(args: argparse.Namespace, encoder: Encoder, *, features: bool = False) -> ReACT | SecondLook:
    """The defence: --config or --defense where given, else the default for the encoder.

    With ``features`` ReACT makes its anchors of all views, because features are stored and not only classified.
    """
    from react_clip.defenses import Defense, ReACT, SecondLook, default_for

    if (photos := getattr(args, "calibrate_on", None)) is not None:
        return _calibrated(args, encoder, photos)
    if args.config == "paper":
        return ReACT()
    if args.config is not None:
        guard = Defense.load(args.config)
        if not isinstance(guard, ReACT | SecondLook):
            raise ReactClipError(f"--config {args.config} describes {guard.name!r}; give one of ReACT or SecondLook")
        guard.check(encoder)
        return guard
    if args.defense == "second_look":
        return SecondLook.for_encoder(encoder)
    if args.defense == "react":
        return ReACT.constants_for(encoder) if features else ReACT.for_encoder(encoder)
    return default_for(encoder, features=features)


def _calibrated(args: argparse.Namespace, encoder: Encoder, photos: Path) -> SecondLook:
    """SecondLook with a threshold measured on clean photos."""
    from react_clip.cli.photos import PhotoReader
    from react_clip.defenses import SecondLook

    reader = PhotoReader(argparse.Namespace(photos_in=[photos], quiet=args.quiet))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes are printed below
        result = SecondLook.calibrate(encoder, reader.sample(MOST_PHOTOS, encoder.preprocessing))
    notice(args, f"SecondLook's threshold is {result.config.threshold:g}, from {result.photos} photos of {photos}")
    for note in result.notes:
        notice(args, f"note: {note}")
    return result.config


def defense_line(guard: ReACT | SecondLook) -> str:
    """One line for people: which defence is on, and how to get the other."""
    if guard.kind == "second_look":
        return "the defence is SecondLook; --defense react gives the paper's"
    return "the defence is ReACT, the paper's; --defense second_look gives ours, for models with a threshold"


# ---------------------------------------------------------------------- labelled photos


def load_photos(
    args: argparse.Namespace, encoder: Encoder, *, classes: bool = True, average_train: bool = True
) -> tuple[ImageDataset, ZeroShotClassifier | None, str]:
    """The photos that the data set options describe, their classifier, and where its class features come from.

    Photos of classes that --heads lacks are dropped. Without ``classes`` there is no classifier, without
    ``average_train`` none that is made of photos of the train split.
    """
    from react_clip import data
    from react_clip.evaluation.sets import class_source

    root = args.data or data.default_root()
    photos = data.load(args.dataset, root=root, split=args.split, seed=args.seed)
    classifier, description = None, "none needed"
    if classes:
        source = class_source(encoder, photos, args.heads, root, average_train=average_train)
        classifier, photos = source.classifier(encoder, progress=not args.quiet)
        description = source.description
    return photos if args.limit is None else photos.take(args.limit, args.seed), classifier, description


def describe_photos(args: argparse.Namespace, photos: ImageDataset) -> dict[str, Any]:
    """Name, split, number and digest of the photos of :func:`load_photos`, as result files record them."""
    return {
        "name": args.dataset,
        "split": args.split,
        "photos": len(photos),
        "sha256": photos.fingerprint(),
        "notes": list(photos.notes),
    }
