"""``react-clip report``: a page and figures from finished runs, or one of their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from react_clip.cli import common, options
from react_clip.errors import ReactClipError
from react_clip.optional import require

EXAMPLE = (
    "react-clip report runs/table1 --out report/ (or: react-clip report runs/table1 --table accuracy --format latex)"
)
FORMATS = ("markdown", "latex", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("runs", nargs="+", type=options.existing, metavar="RUN_DIR", help="folder of an evaluation")
    parser.add_argument("--out", type=Path, help="folder of the report (RUN_DIR/report; for several runs report/)")
    group = parser.add_argument_group("a table instead of the page")
    group.add_argument("--table", metavar="NAME", help="print this table: accuracy, per_dataset, passes, attacks, ...")
    group.add_argument("--format", choices=FORMATS, help="of the table (markdown)")


def run(args: argparse.Namespace) -> int:
    """Write the report; missing data is no failure, the page and stderr list it."""
    require("pandas", "the report", extra="eval")
    if args.table is not None:
        return _print_table(args)
    if args.format is not None:
        raise ReactClipError(f"--format is {args.format!r}, but no table is asked for; add --table NAME")
    from react_clip.report.page import write_report

    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    report = write_report(args.runs, out, progress=not args.quiet)
    figures = [str(path) for path in report.figures]
    document = {"page": str(report.page), "figures": figures, "missing": report.missing}
    notices = [f"missing: {line}" for line in report.missing]
    common.print_result(args, document, [str(report.page)], notices)
    return 0


def _print_table(args: argparse.Namespace) -> int:
    from react_clip.evaluation import EvaluationResult
    from react_clip.evaluation.results import join
    from react_clip.report.tables import all_tables

    tables = {table.name: table for table in all_tables(join([EvaluationResult.load(path) for path in args.runs]))}
    if args.table not in tables:
        raise ReactClipError(f"--table is {args.table!r}; the run has the tables {', '.join(tables)}")
    table = tables[args.table]
    common.print_result(args, table.to_dict(), [getattr(table, args.format or "markdown")()])
    return 0
