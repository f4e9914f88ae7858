"""``react-clip classify``: defended answers for photos."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import react_clip as rc
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader, add_photo_argument, load_defended

EXAMPLE = "react-clip classify holiday/ --labels 'beach, mountain, city'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    lines = ', or - for JSON lines on standard input: {"file": PATH} or {"image": BASE64, "file": NAME}'
    add_photo_argument(parser, note=lines, stdin=True)
    parser.add_argument("--top", type=options.count, default=1, help="answers per photo (%(default)s)")
    options.add_model_options(parser)
    options.add_label_options(parser)
    options.add_defense_options(parser)


def run(args: argparse.Namespace) -> int:
    """Classify in batches and print one line per photo as soon as it is known."""
    from react_clip.secret import described

    reader = PhotoReader(args.photos_in, args)
    seed = common.secret_seed(args)
    clf, guard = load_defended(args)
    rows: list[dict[str, Any]] = []
    try:
        for paths, pixels in reader.batches(clf.encoder, "defending"):
            rows += (batch := describe(paths, guard(clf, pixels, seed=seed), clf.names, args.top))
            for row in batch if not args.json else ():
                common.say(_line(row))
    finally:
        # Also when stopped: what is finished is printed.
        common.print_result(args, {"seed": described(seed), "results": rows, "errors": reader.failed})
    return reader.exit_code


def describe(paths: Sequence[Path], out: rc.Defended, names: Sequence[str], top: int) -> list[dict[str, Any]]:
    """One row of JSON values per photo: its best answers and the diagnostics."""
    best = out.probs.topk(min(top, len(names)))
    rows = zip(paths, best.values.tolist(), best.indices.tolist(), common.diagnostics(out), strict=True)
    return [
        {
            "file": str(path),
            "answers": [{"label": names[k], "probability": p} for p, k in zip(probs, classes, strict=True)],
            **diagnostics,
        }
        for path, probs, classes, diagnostics in rows
    ]


def _line(row: dict[str, Any]) -> str:
    answers = ", ".join(f"{answer['label']} {answer['probability']:.0%}" for answer in row["answers"])
    return f"{row['file']}: {answers}{'  [corrected]' if row['gated'] else ''}"
