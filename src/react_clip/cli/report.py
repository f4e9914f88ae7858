"""``react-clip report``: a page and figures from a run, finished or not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from react_clip.cli.common import notice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="--out folder of `react-clip evaluate`")
    parser.add_argument("--out", type=Path, help="folder of the report (RUN_DIR/report; for several runs report/)")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="JSON of `react-clip calibrate` to show as well"
    )
    parser.add_argument(
        "--rows", type=int, default=20_000, help="per-image rows in the page, 0 for none (%(default)s; whole images)"
    )
    parser.add_argument(
        "--photos", type=int, default=40, help="images with pictures in the page, 0 for none (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report; what is missing is no failure, the page and stderr say it."""
    from react_clip.report.page import write_report

    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    with _Bar(args.quiet) as bar:
        report = write_report(
            args.runs,
            out,
            rows=args.rows,
            photos=args.photos,
            calibration=args.calibration,
            progress=bar.advance,
        )
    if args.json:
        figures = [str(path) for path in report.figures]
        missing = [*report.missing, *report.not_drawn]
        print(json.dumps({"page": str(report.page), "figures": figures, "missing": missing}, indent=2))
    else:
        for line in report.missing:
            notice(args, f"missing: {line}")
        if report.not_drawn:
            notice(args, f"{len(report.not_drawn)} figures need other data than this; the page says which")
        print(report.page)
    return 0


class _Bar:
    """One step per figure."""

    def __init__(self, quiet: bool) -> None:
        self._bar: tqdm[Any] = tqdm(unit="figure", disable=quiet or None)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def advance(self, title: str, done: int, total: int) -> None:
        """After each figure."""
        self._bar.total = total
        self._bar.set_description(title)
        self._bar.update(done - self._bar.n)
