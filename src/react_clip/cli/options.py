"""Options that several commands share, and the types that check their values before anything slow is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from react_clip.choices import dataset_names
from react_clip.config import Count, Fraction, PixelLength, Positive, Whole
from react_clip.errors import ReactClipError

DEFAULT_MODEL = "clip-vit-b-16"
DEFENSES = ("second_look", "react")
MODEL_HELP = "hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT, or onnx:DIR"
DTYPE_HELP = "fp32, bf16, fp16, or auto: fp16 on a GPU where that is safe (%(default)s)"
DEVICE_HELP = "cpu, cuda, cuda:1, mps, ... (CUDA if there is one)"


# ---------------------------------------------------------------------- types of values


class BadValueError(ReactClipError, argparse.ArgumentTypeError):
    """A value that a type refuses; the parser adds the option's name."""


def typed(kind: Any, *rules: Any) -> Callable[[str], Any]:
    """The type of an option whose values are those of a configuration's field: a type with pydantic's rules."""
    adapter = TypeAdapter[Any](Annotated[(kind, *rules)] if rules else kind)

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(text.split(",") if "," in text else text)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise BadValueError(f"{text!r}: {message}") from None

    return read


def comma_separated(text: str | Iterable[str]) -> tuple[str, ...]:
    """The names in a list such as ``"cifar10, dtd10"``."""
    words = text.split(",") if isinstance(text, str) else text
    return tuple(name for name in map(str.strip, words) if name)


count, whole, positive, fraction, length = map(typed, (Count, Whole, Positive, Fraction, PixelLength))
seeds = typed(tuple[Whole, ...], BeforeValidator(comma_separated))
budgets = typed(tuple[PixelLength, ...], BeforeValidator(comma_separated))


def existing(text: str) -> Path:
    """A file or folder that exists."""
    if not (path := Path(text).expanduser()).exists():
        raise BadValueError(f"{text} does not exist; check the path")
    return path


def config_file(text: str) -> str:
    """A file that exists, or ``paper``."""
    return text if text == "paper" else str(existing(text))


def dataset(text: str) -> str:
    """Name of a data set, or ``folder:PATH`` of a folder that exists; names are checked when the photos are loaded."""
    if text.startswith("folder:") or "/" in text:
        existing(text.removeprefix("folder:"))
    return text


# ---------------------------------------------------------------------- groups of options


def add_model_options(parser: argparse.ArgumentParser, *, dtype: str = "fp32") -> None:
    """Add --model, --device and --dtype; ``dtype`` is the default of the last one."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (%(default)s)")
    group.add_argument("--device", help=DEVICE_HELP)
    group.add_argument("--dtype", default=dtype, help=DTYPE_HELP)


def add_label_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for classes."""
    group = parser.add_argument_group("labels")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--labels", help="comma-separated names, such as 'cat, dog, teapot'")
    one.add_argument("--labels-file", type=existing, help="a text file with one name a line")
    one.add_argument("--photos", type=existing, help="a folder with one sub-folder of photos per class")
    group.add_argument("--template", action="append", help="prompt with {} for the name; repeat for an ensemble")


def add_defense_options(parser: argparse.ArgumentParser, *, choose: bool = True) -> None:
    """Add the options for the defence; --defense and a secret only with ``choose``."""
    group = parser.add_argument_group("defence")
    one = group.add_mutually_exclusive_group()
    if choose:
        one.add_argument("--defense", choices=DEFENSES, help="the paper's is react (second_look if the model has it)")
    one.add_argument("--config", type=config_file, help="file of `react-clip calibrate`, or `paper` (its constants)")
    # The noise of commands that defend people's photos cannot be predicted; demo and bench repeat.
    key = group.add_mutually_exclusive_group()
    if choose:
        key.add_argument("--secret-file", type=existing, help="keys the noise ($REACT_CLIP_SECRET_FILE)")
    seed = "seed of the noise instead of a secret, so that anybody can repeat it" if choose else "seed of the noise (0)"
    key.add_argument("--seed", type=int, default=None if choose else 0, help=seed)


def add_dataset_options(parser: argparse.ArgumentParser, *, metavar: str = "DATASET", note: str = "") -> None:
    """Add the options that choose labelled photos: the data set, its root, class features, split and limit."""
    known = f"folder:PATH with a sub-folder per class, or one of {', '.join(dataset_names())}{note}"
    parser.add_argument("dataset", type=dataset, metavar=metavar, help=known)
    add_data_folders(parser)
    parser.add_argument("--split", default="train", help="split of the data set (%(default)s)")
    parser.add_argument("--limit", type=count, help="most photos; all are kept in memory, 150 KB each at 224 pixels")


def add_data_folders(parser: argparse._ActionsContainer) -> None:
    """Add --data and --heads."""
    parser.add_argument("--data", type=existing, help="root of the photos ($REACT_CLIP_DATA, else the cache)")
    parser.add_argument("--heads", type=existing, help="ready class features: NAME.npz, or a folder of such files")


def add_seeds_and_budgets(parser: argparse._ActionsContainer) -> None:
    """Add --seed, --seeds and --eps, which replace those of a recipe."""
    parser.add_argument("--seed", type=whole, help="seed of the attacks, and of the defences unless --seeds says more")
    parser.add_argument("--seeds", type=seeds, help="0,1,2: each defence answers once with each of these seeds")
    parser.add_argument("--eps", type=budgets, help="1/255,4/255: every attack with a budget runs at each of these")


def add_cluster_options(parser: argparse.ArgumentParser, *, workers: str) -> None:
    """Add --engine, --address and --workers; ``workers`` is the help text of the last one."""
    group = parser.add_argument_group("many machines")
    group.add_argument("--engine", choices=("local", "ray"), default="local", help="where to work (%(default)s)")
    group.add_argument("--address", help="host:port of the cluster, or auto (by default one on this machine)")
    group.add_argument("--workers", type=count, help=workers)


def check_cluster_options(args: argparse.Namespace) -> None:
    """Refuse options of a cluster without one."""
    for name in ("address", "workers"):
        if args.engine != "ray" and getattr(args, name) is not None:
            raise ReactClipError(f"--{name} is {getattr(args, name)!r}, but the engine is local; add --engine ray")
