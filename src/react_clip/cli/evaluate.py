"""``react-clip evaluate``: run a recipe, or check what it needs and costs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip import ReactClipError
from react_clip.cli.common import notice

if TYPE_CHECKING:
    from react_clip.evaluation import Recipe
    from react_clip.evaluation.recipe import LabelledDefense


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("recipe", type=Path, help="a YAML file: model, data sets, attacks, defences")
    parser.add_argument("--out", type=Path, help="folder of the run (runs/<name of the recipe>)")
    parser.add_argument(
        "--validate", action="store_true", help="check recipe, data, weights and disk, print the cost, stop"
    )
    group = parser.add_argument_group("instead of what the recipe says")
    group.add_argument("--model", help="hub id, open_clip:MODEL/PRETRAINED, folder, or clip-vit-b-16")
    group.add_argument("--datasets", help="comma-separated names, or all (every folder below the data root)")
    group.add_argument("--defenses", help="comma-separated labels: only these of the recipe's defences")
    group.add_argument("--transfer-model", help="what attacks are crafted on where the threat is transfer")
    group.add_argument("--limit", type=int, help="images per set")
    group.add_argument("--dtype", help="precision of the defended encoder: fp32, bf16 or fp16")
    group.add_argument("--attack-dtype", help="precision of the attacked encoder")
    group.add_argument("--draws", type=int, help="draws of the defences' noise")
    group.add_argument("--batch", type=int, help="images per shard and per encoder call")
    group = parser.add_argument_group("this machine")
    group.add_argument("--data", type=Path, help="root of the photos ($REACT_CLIP_DATA, else the cache)")
    group.add_argument("--heads", type=Path, help="folder with ready class features, <set>.npz")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (CUDA if there is one)")
    group = parser.add_argument_group("many machines")
    group.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="this process, or a Ray cluster (%(default)s)"
    )
    group.add_argument("--address", help="host:port of the cluster, or auto (by default one on this machine)")
    group.add_argument("--workers", type=int, help="processes of the cluster (one per GPU, else one per node)")


def run(args: argparse.Namespace) -> int:
    """Validate or run; tables are written beside the result."""
    from react_clip.evaluation import Recipe, run_recipe, validate
    from react_clip.evaluation.store import TABLES
    from react_clip.report.tables import accuracy_table, write_tables

    _check_cluster_options(args)
    recipe = _with_overrides(Recipe.load(args.recipe, model=args.model), args)
    folder = args.out or Path("runs") / args.recipe.stem
    location = {"root": args.data, "heads": args.heads, "device": args.device}
    if args.validate:
        return _report(args, validate(recipe, folder, **location))
    with _warnings_on_stderr(not args.quiet):
        if args.engine == "ray":
            from react_clip.scale import evaluation as cluster

            result = cluster.run_recipe(
                recipe, folder, address=args.address, workers=args.workers, progress=not args.quiet, **location
            )
        else:
            result = run_recipe(recipe, folder, progress=not args.quiet, **location)
    write_tables(result, folder / TABLES)
    if args.json:
        print(result.to_json(), end="")
    else:
        print(accuracy_table(result).markdown())
        for note in result.notes:
            notice(args, f"note: {note}")
        notice(args, f"result, per-image values and tables are in {folder}")
    return 0


def _report(args: argparse.Namespace, validation: Any) -> int:
    if args.json:
        print(json.dumps(validation.to_dict(), indent=2))
    else:
        print("\n".join(validation.lines()))
    for problem in validation.problems:
        print(f"react-clip: {problem}", file=sys.stderr)
    return 0 if validation.ok else 2


def _check_cluster_options(args: argparse.Namespace) -> None:
    for name in ("address", "workers"):
        if args.engine != "ray" and getattr(args, name) is not None:
            raise ReactClipError(f"--{name} is {getattr(args, name)!r}, but the engine is local; add --engine ray")
    if args.workers is not None and args.workers < 1:
        raise ReactClipError(f"--workers is {args.workers}; it must be >= 1")


def _with_overrides(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line says instead."""
    names = ("model", "transfer_model", "limit", "dtype", "attack_dtype", "draws", "batch")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.datasets is not None:
        given["datasets"] = tuple(name.strip() for name in args.datasets.split(",") if name.strip())
    if args.defenses is not None:
        given["defenses"] = _chosen_defenses(recipe, args.defenses)
    return recipe.replace(**given)


def _chosen_defenses(recipe: Recipe, labels: str) -> tuple[LabelledDefense, ...]:
    by_label = {item.label: item for item in recipe.defenses}
    # A label may hold commas of its own, so the whole is tried first.
    wanted = [labels] if labels in by_label else [label.strip() for label in labels.split(",") if label.strip()]
    if unknown := [label for label in wanted if label not in by_label]:
        raise ReactClipError(
            f"--defenses names {unknown[0]!r}, which the recipe has not; choose among {', '.join(by_label)}"
        )
    return tuple(by_label[label] for label in wanted)


@contextmanager
def _warnings_on_stderr(enabled: bool) -> Iterator[None]:
    """Print warnings of the run above its progress bar."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    logger, handler = logging.getLogger("react_clip.evaluation"), logging.StreamHandler()
    # A filter, because tqdm takes over filters and not levels.
    handler.addFilter(lambda record: enabled and record.levelno >= logging.WARNING)
    handler.setFormatter(logging.Formatter("react-clip: %(message)s"))
    logger.addHandler(handler)
    try:
        with logging_redirect_tqdm([logger]):
            yield
    finally:
        logger.removeHandler(handler)
