"""``react-clip export``: the image tower for ONNX Runtime or OpenVINO, checked before it is written."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from react_clip import ReactClipError
from react_clip.cli.common import PhotoReader, bundled_photos, load_encoder, notice
from react_clip.encoders.exported import FORMATS, TOLERANCE, export

_MOST_PHOTOS = 64
"""Enough to see a difference; all of them go through the tower at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", help="hub id, open_clip:MODEL/PRETRAINED, folder, BASE+CHECKPOINT")
    parser.add_argument("--format", choices=sorted(FORMATS), required=True, help="which runtime it is for")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--photos",
        type=Path,
        nargs="+",
        dest="photos_in",
        metavar="PHOTO",
        help="image files or folders to compare on (bundled ones by default)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="most that a feature may differ (%(default)s)"
    )
    parser.set_defaults(device="cpu", dtype="fp32")


def run(args: argparse.Namespace) -> int:
    """Export and compare; the folder is created only if the features agree."""
    if not args.tolerance > 0:
        raise ReactClipError(f"--tolerance is {args.tolerance}; it must be above 0, such as {TOLERANCE}")
    args.photos_in = args.photos_in or bundled_photos()
    reader = PhotoReader(args)
    reader.files = reader.files[:_MOST_PHOTOS]
    encoder = load_encoder(args)
    batches = [pixels for _, pixels in reader.batches(encoder.image_size)]
    if not batches:
        raise ReactClipError(f"none of the {len(reader.files)} photos could be read; give others with --photos")
    parity = export(encoder, args.format, args.out, torch.cat(batches), tolerance=args.tolerance)
    name = f"{args.format}:{args.out}"
    if args.json:
        print(json.dumps({"model": name, "exported_from": args.model, **dataclasses.asdict(parity)}))
        return reader.exit_code
    print(
        f"{name} is ready: largest difference {parity.max_difference:.2g}, smallest cosine {parity.min_cosine:.7f} "
        f"over {parity.images} images"
    )
    notice(args, f"use it as --model {name}")
    return reader.exit_code
