"""``react-clip classify``: defended answers for photos."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.cli.common import (
    PhotoReader,
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    diagnostics,
    load_encoder,
)

if TYPE_CHECKING:
    from react_clip import Defended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser)
    parser.add_argument("--top", type=int, default=1, help="answers per photo (%(default)s)")
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Classify in batches and print one line per photo."""
    reader = PhotoReader(args)
    encoder = load_encoder(args)
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    rows: list[dict[str, Any]] = []
    for paths, pixels in reader.batches(encoder.image_size):
        rows += describe(paths, guard(clf, pixels, seed=args.seed), max(1, args.top))
    if args.json:
        print(json.dumps({"results": rows, "errors": reader.failed}, indent=2))
    else:
        for row in rows:
            answers = ", ".join(f"{answer['label']} {answer['probability']:.0%}" for answer in row["answers"])
            print(f"{row['file']}: {answers}{'  [corrected]' if row['gated'] else ''}")
    return reader.exit_code


def describe(paths: list[Path], out: Defended, top: int) -> list[dict[str, Any]]:
    """One row of JSON values per photo: its best answers and the diagnostics."""
    probabilities, classes = (values.tolist() for values in out.probs.topk(min(top, len(out.class_names))))
    return [
        {
            "file": str(path),
            "answers": [
                {"label": out.class_names[k], "probability": p}
                for p, k in zip(probabilities[row], classes[row], strict=True)
            ],
            **diagnostics(out, row),
        }
        for row, path in enumerate(paths)
    ]
