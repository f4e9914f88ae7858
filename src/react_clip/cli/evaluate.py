"""``react-clip evaluate``: run a recipe, or check what it needs and costs."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from react_clip.cli import common, options
from react_clip.errors import ReactClipError
from react_clip.optional import require

if TYPE_CHECKING:
    from react_clip.evaluation import Recipe
    from react_clip.evaluation.recipe import LabelledDefense

EXAMPLE = (
    "react-clip evaluate recipes/rivals.yaml --model clip-vit-b-16 --data photos/ --heads heads/ "
    "--datasets all --limit 100 --out runs/rivals (add --validate to check it and see its cost first)"
)
_REPLACED = ("model", "transfer_model", "datasets", "limit", "dtype", "attack_dtype", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("recipe", type=options.existing, help="a YAML file such as recipes/table1.yaml")
    parser.add_argument("--out", type=Path, help="folder of the run (runs/<name of the recipe>)")
    parser.add_argument("--validate", action="store_true", help="check what the run needs and costs, and stop")
    group = parser.add_argument_group("instead of what the recipe says")
    group.add_argument("--model", help=options.MODEL_HELP)
    group.add_argument("--datasets", type=options.comma_separated, help="names, or all below the data root")
    group.add_argument("--defenses", help="comma-separated labels: only these of the recipe's defences")
    group.add_argument("--transfer-model", help="model on which images are crafted where the threat is transfer")
    group.add_argument("--limit", type=options.count, help="images per set")
    group.add_argument("--dtype", help="precision of the defended encoder: fp32, bf16 or fp16")
    group.add_argument("--attack-dtype", help="precision of the attacked encoder")
    options.add_seeds_and_budgets(group)
    group.add_argument("--batch", type=options.count, help="images per shard and per encoder call")
    group = parser.add_argument_group("this machine")
    options.add_data_folders(group)
    group.add_argument("--device", help=options.DEVICE_HELP)
    options.add_cluster_options(parser, workers="processes of the cluster (one per GPU, else one per node)")


def run(args: argparse.Namespace) -> int:
    """Validate or run; the table of accuracies is printed."""
    options.check_cluster_options(args)
    require("pandas", "evaluating", extra="eval")
    from tqdm.contrib.logging import logging_redirect_tqdm

    from react_clip.evaluation import Recipe, run_recipe, validate
    from react_clip.report.tables import all_tables

    recipe = _with_overrides(Recipe.load(args.recipe, model=args.model), args)
    folder = args.out or Path("runs") / args.recipe.stem
    common.notice(args, f"loading {recipe.model}")
    location = {"root": args.data, "heads": args.heads, "device": args.device}
    if args.validate:
        validation = validate(recipe, **location)
        common.print_result(args, validation.to_dict(), validation.lines())
        for problem in validation.problems:
            print(f"react-clip: {problem}", file=sys.stderr)
        return 0 if validation.ok else 2
    # Warnings, such as damaged shards that are computed again, go above the progress bar.
    log = logging.getLogger("react_clip.evaluation")
    with logging_redirect_tqdm([log]):
        log.handlers[-1].setLevel(logging.CRITICAL if args.quiet else logging.WARNING)
        if args.engine == "ray":
            from react_clip.scale import evaluation as cluster

            result = cluster.run_recipe(
                recipe, folder, address=args.address, workers=args.workers, progress=not args.quiet, **location
            )
        else:
            result = run_recipe(recipe, folder, progress=not args.quiet, **location)
    notices = [f"note: {note}" for note in result.notes]
    notices.append(f"result and per-image values are in {folder}; `react-clip report` makes tables and figures")
    common.print_result(args, result.to_dict(), [all_tables(result)[0].markdown()], notices)
    return 0


def _with_overrides(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """The recipe with the values that the command line replaces."""
    recipe = recipe.with_seeds_and_budgets(args.seed, args.seeds, args.eps)
    given = {name: getattr(args, name) for name in _REPLACED if getattr(args, name) is not None}
    if args.defenses is not None:
        given["defenses"] = _chosen_defenses(recipe, args.defenses)
    return recipe.replace(**given)


def _chosen_defenses(recipe: Recipe, labels: str) -> tuple[LabelledDefense, ...]:
    by_label = {item.label: item for item in recipe.defenses}
    # A label may hold commas of its own, so the whole is tried first.
    chosen = (labels,) if labels in by_label else options.comma_separated(labels)
    if unknown := [label for label in chosen if label not in by_label]:
        raise ReactClipError(f"--defenses names {unknown[0]!r}; choose among {', '.join(by_label)}")
    return tuple(by_label[label] for label in chosen)
