"""Collect the reports of ``react-clip bench`` in one file, and join runs of ``react-clip evaluate``.

    python benchmarks/collect.py bench benchmarks/results/bench/gpu.json OUT/gpu-*.json
    python benchmarks/collect.py join benchmarks/results/standard OUT/standard OUT/standard-TeCoA ...

The file of the benchmark has ``reports`` (command, device, versions, ... by name) and ``rows``, one for each contender;
``ratio`` is its time over that of the bare encoder, the median over rounds, in which they take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from react_clip.evaluation.results import IMAGES, EvaluationResult, join, write_images

PER_ROW = ("label", "milliseconds", "images_per_second", "passes", "backward_passes", "overhead")


def rows_of(name: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each contender of a report."""
    contenders = {row["label"]: row for row in report["contenders"]}
    bare = contenders["bare encoder"]["round_milliseconds"]
    rows = []
    for row in contenders.values():
        ratios = [mine / plain for mine, plain in zip(row["round_milliseconds"], bare, strict=True)]
        about = {"report": name, **{key: report[key] for key in ("attacked", "batch", "classes", "images")}}
        rows.append(about | {key: row[key] for key in PER_ROW} | {"ratio": statistics.median(ratios)})
    return rows


def collect(out: Path, files: list[Path]) -> None:
    """Write ``out``; the contenders of every report become rows."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    heads = {
        name: {key: value for key, value in report.items() if key not in ("contenders", "defenses")}
        for name, report in reports.items()
    }
    rows = [row for name, report in reports.items() for row in rows_of(name, report)]
    out.write_text(json.dumps({"reports": heads, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def join_runs(out: Path, folders: list[Path]) -> None:
    """Write the runs, over the same photos, as one run."""
    result = join([EvaluationResult.load(folder) for folder in folders])
    out.mkdir(parents=True)
    write_images(out / IMAGES, [result.images])
    result.save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bench", "join"))
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=Path, nargs="+")
    args = parser.parse_args()
    {"bench": collect, "join": join_runs}[args.what](args.out, args.parts)


if __name__ == "__main__":
    main()
