"""``react-clip compare``: two runs photo by photo, with paired tests."""

from __future__ import annotations

import argparse

from react_clip.cli import common, options
from react_clip.cli.report import FORMATS
from react_clip.optional import require

EXAMPLE = "react-clip compare runs/a runs/b --format latex"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    for name in ("first", "second"):
        parser.add_argument(name, type=options.existing, metavar="RUN_DIR", help="folder of an evaluation")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="of the table (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the table of what both runs have, and what does not match."""
    require("pandas", "comparing runs", extra="eval")
    from react_clip.evaluation import EvaluationResult
    from react_clip.report.compare import compare

    found = compare(EvaluationResult.load(args.first), EvaluationResult.load(args.second))
    document = {**found.table.to_dict(), "differences": found.differences}
    notices = [f"does not match: {line}" for line in found.differences]
    common.print_result(args, document, [getattr(found.table, args.format)()], notices)
    return 0
