"""``react-clip report``: a page and figures from a run, finished or not."""

from __future__ import annotations

import argparse
from pathlib import Path

from react_clip.cli import common
from react_clip.cli.progress import Progress
from react_clip.optional import require

EXAMPLE = "react-clip report runs/table1 --out report/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="--out folder of `react-clip evaluate`")
    parser.add_argument("--out", type=Path, help="folder of the report (RUN_DIR/report; for several runs report/)")
    parser.add_argument("--calibration", type=Path, help="JSON of `react-clip calibrate` to show as well")
    parser.add_argument(
        "--rows", type=int, default=20_000, help="most per-image rows in the page, 0 for none (%(default)s)"
    )
    parser.add_argument(
        "--photos", type=int, default=40, help="most images with pictures in the page, 0 for none (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; missing data is no failure, the page and stderr list it."""
    for path in args.runs:
        common.check_exists(path, "give the --out folder of `react-clip evaluate`")
    common.check_counts(args, "rows", "photos", least=0)
    common.check_paths(args, "calibration")
    require("pandas", "the report", extra="eval")
    from react_clip.report.page import write_report

    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    options = {"rows": args.rows, "photos": args.photos, "calibration": args.calibration}
    with Progress(quiet=args.quiet, unit="figure") as progress:
        report = write_report(
            args.runs,
            out,
            **options,
            progress=lambda title, done, total: progress.show("drawing", done=done, total=total, note=title),
        )
    document = {
        "page": str(report.page),
        "figures": [str(path) for path in report.figures],
        "missing": [*report.missing, *report.not_drawn],
    }
    notices = [f"missing: {line}" for line in report.missing]
    if report.not_drawn:
        notices.append(f"{len(report.not_drawn)} figures need other data than this; the page says which")
    common.print_result(args, document, [str(report.page)], notices)
    return 0
