"""``react-clip export``: the image tower for ONNX Runtime, checked before it is written."""

from __future__ import annotations

import argparse
from pathlib import Path

from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader
from react_clip.storage import check_new_folder

EXAMPLE = "react-clip export clip-vit-b-16 --out towers/b16  (then --model onnx:towers/b16)"
_MOST_PHOTOS = 64
"""Enough to see a difference; all of them go through the tower at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", help="hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--photos", type=options.existing, nargs="+", default=[], help="to compare on (bundled ones)")
    parser.set_defaults(device="cpu", dtype="fp32")


def run(args: argparse.Namespace) -> int:
    """Export and compare; the folder is created only if the features agree."""
    check_new_folder(args.out)
    reader = PhotoReader(args.photos, args)
    from react_clip.encoders.exported import export

    encoder = common.load_encoder(args)
    difference = export(encoder, args.out, reader.sample(_MOST_PHOTOS, encoder))
    name = f"onnx:{args.out}"
    document = {"model": name, "exported_from": args.model, "largest_difference": difference}
    summary = f"{name} is ready: features differ by at most {difference:.2g} from those of {args.model}"
    common.print_result(args, document, [summary], [f"use it as --model {name}"])
    return reader.exit_code
