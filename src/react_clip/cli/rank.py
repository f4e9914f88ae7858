"""``react-clip rank``: one table over all kinds of photos and attackers, from runs, or for a defence of your own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import react_clip as rc
from react_clip.cli import common, options
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require
from react_clip.storage import write_text

EXAMPLE = (
    "react-clip rank runs/standard runs/adaptive --out ranking.html (or: react-clip rank my_defense.py:MyDefense "
    "--data photos/ --heads heads/ --quick)"
)
_FORMATS = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
"""Endings of files that hold the table alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    group = parser.add_argument_group("proof")
    group.add_argument("--proof", type=Path, metavar="DIR", help="new folder with what others need to check the runs")
    group.add_argument("--check", type=options.existing, metavar="DIR", help="compute a proof's cells again")
    parser.add_argument("what", nargs="*", metavar="RUN_DIR or FILE.py:CLASS", help="runs, or a defence to measure")
    parser.add_argument(
        "--out", type=_output, default=Path("ranking.html"), help=".html, .csv, .md, .tex (%(default)s)"
    )
    parser.add_argument("--timings", type=options.existing, nargs="+", default=[], help="files of `react-clip bench`")
    group = parser.add_argument_group("for a defence of your own")
    group.add_argument("--quick", action="store_true", help="few photos and cheap attacks, for a first impression")
    group.add_argument("--recipe", type=options.existing, help="what to measure (the package's standard evaluation)")
    group.add_argument("--run-dir", type=Path, help="folder of the run (runs/CLASS-<hash of the recipe>)")
    options.add_seeds_and_budgets(group)
    options.add_data_folders(group)
    group.add_argument("--device", help=options.DEVICE_HELP)


def _output(text: str) -> Path:
    if Path(text).suffix not in (".html", *_FORMATS):
        raise options.BadValueError(f"{text!r} must end in one of .html, {', '.join(_FORMATS)}")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Measure the defence if one is given, then write the page or table and print the table."""
    own = [text for text in args.what if ":" in text and not Path(text).is_dir()]
    if own and len(args.what) > 1:
        raise ReactClipError(f"{own[0]} is a defence to measure; give it alone, and rank its run with others later")
    require("pandas", "the ranking", extra="eval")
    if args.check is not None:
        return _check(args)
    if not args.what:
        raise ReactClipError("there is nothing to rank; give folders of runs, or FILE.py:CLASS")
    from react_clip.evaluation.proof import write_proof
    from react_clip.report.ranking import rank

    runs = [_measure(own[0], args)] if own else [Path(text) for text in args.what]
    ranking = rank(runs, args.timings)
    for run in runs if args.proof else ():
        manifest = write_proof(run, args.proof if len(runs) == 1 else args.proof / run.name)
        common.notice(args, f"the proof of {run} is in {manifest.parent}")
    if args.out.suffix == ".html":
        ranking.write_page(args.out)
    else:
        write_text(args.out, getattr(ranking.table, _FORMATS[args.out.suffix])())
    document: dict[str, Any] = {
        "out": str(args.out),
        "columns": ranking.table.header[1:],
        "defenses": {entry.label: [cell.to_dict() for cell in entry.cells] for entry in ranking.entries},
    }
    tables = [ranking.table, *filter(None, [ranking.informed])]
    document["informed"] = None if ranking.informed is None else ranking.informed.to_dict()
    common.print_result(args, document, [table.markdown() for table in tables], [f"the ranking is in {args.out}"])
    return 0


def _check(args: argparse.Namespace) -> int:
    """Check the proofs in a folder; defences that these name as module:CLASS are found beside those given."""
    from react_clip.evaluation.proof import MANIFEST, check_proof

    for reference in args.what:
        load_defense(reference)
    if not (proofs := sorted(args.check.rglob(MANIFEST))):
        raise ReactClipError(f"{args.check} holds no {MANIFEST}; give a folder that `react-clip rank --proof` wrote")
    import pandas as pd

    tables = []
    for path in proofs:
        table, notes = check_proof(path.parent, device=args.device, progress=not args.quiet)
        tables.append(table)
        for note in notes:
            common.notice(args, f"note: {note}")
    cells = pd.concat(tables, ignore_index=True)
    line = (
        "{verdict}: {dataset}, {attack}, {defense}: {flips} of {answers} answers differ; accuracy {claimed:.2%} in the "
        "proof, {found:.2%} here"
    )
    shown = cells[(cells["flips"] > 0) | ~cells["passed"]]
    shown = shown.assign(verdict=shown["passed"].map({True: "within rounding", False: "differs"}))
    lines = [line.format(**cell) for cell in shown.to_dict("records")]
    failed = int((~cells["passed"]).sum())
    counts = f"{cells['flips'].sum()} of {cells['answers'].sum()} answers differ"
    lines.append(f"{len(cells)} cells checked, {failed} differ; {counts}")
    common.print_result(args, {"passed": not failed, "cells": json.loads(cells.to_json(orient="records"))}, lines)
    return 1 if failed else 0


# ---------------------------------------------------------------------- a defence of the user's


def _measure(reference: str, args: argparse.Namespace) -> Path:
    """Run the standard evaluation with a defence of the user's beside ours; returns the folder of the run."""
    import torch

    from react_clip.evaluation import Recipe, run_folder, run_recipe, validate
    from react_clip.evaluation.recipe import LabelledDefense

    defense = load_defense(reference)
    shipped = f"{'standard-quick' if args.quick else 'standard'}.yaml"
    path = args.recipe or Path(str(files("react_clip") / "assets" / "recipes" / shipped))
    recipe = Recipe.load(path)
    mine = LabelledDefense(label=type(defense).label, defense=defense)
    recipe = recipe.with_seeds_and_budgets(args.seed, args.seeds, args.eps)
    recipe = recipe.replace(defenses=(*recipe.defenses, mine))
    folder: Path = args.run_dir or run_folder(type(defense).__name__, recipe)
    location = {"root": args.data, "heads": args.heads, "device": args.device}
    validation = validate(recipe, **location)
    if not validation.ok:
        raise ReactClipError(validation.problems[0])
    for line in validation.lines():
        common.notice(args, line)
    encoder = rc.load(recipe.model, device=args.device)
    features = torch.eye(3, encoder.dim, device=encoder.device)
    check_defense(defense, rc.ZeroShotClassifier.from_features(encoder, ["one", "two", "three"], features))
    run_recipe(recipe, folder, progress=not args.quiet, **location)
    return folder


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Any error of the user's code as one line."""
    try:
        yield
    except ReactClipError:
        raise
    except Exception as error:
        raise ReactClipError(f"{what} ({type(error).__name__}: {first_line(error)})") from error


def load_defense(reference: str) -> rc.defenses.Defense:
    """A defence with its default values from ``FILE.py:CLASS`` or ``module:CLASS``."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(options.existing(place).resolve().parent))
        place = Path(place).stem
    with _errors_of(f"{reference} cannot be loaded"):
        return rc.defenses.from_dict(f"{place}:{name}")


def check_defense(defense: rc.defenses.Defense, clf: rc.ZeroShotClassifier) -> None:
    """Raise unless a defence answers two images with finite logits over all classes."""
    import torch

    size, label, shape = clf.encoder.image_size, type(defense).label, (2, len(clf.names))
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(clf.device)
    with _errors_of(f"{label} fails on two images"):
        logits = defense(clf, images, seed=0).logits
    if tuple(logits.shape) != shape or not bool(torch.isfinite(logits).all()):
        raise ReactClipError(f"{label} answers with logits {tuple(logits.shape)}; they must be {shape} and finite")
