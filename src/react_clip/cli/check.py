"""``react-clip check``: what SecondLook changes and saves on a tower and photos of your own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import react_clip as rc
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader
from react_clip.optional import require
from react_clip.storage import class_folders, write_text

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE = "react-clip check openai/clip-vit-base-patch32 holiday/ --labels 'beach, mountain, city' --out checked/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", help=options.MODEL_HELP)
    parser.add_argument("photos_in", type=options.existing, metavar="PHOTOS", help="clean photos, or class folders")
    parser.add_argument("--out", type=Path, default=Path("react-clip-check"), help="folder of results (%(default)s)")
    parser.add_argument("--limit", type=options.count, default=300, help="most photos to measure (%(default)s)")
    parser.add_argument("--device", help=options.DEVICE_HELP)
    parser.add_argument("--dtype", default="fp32", help=options.DTYPE_HELP)
    options.add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Calibrate on every second photo, attack the others, write page, JSON and calibration."""
    reader = PhotoReader([args.photos_in], args)
    require("pandas", "checking", extra="eval")
    from react_clip.check import check_tower

    encoder = common.load_encoder(args)
    pixels = reader.sample(2 * args.limit, encoder)
    clip, labels = _classes(args, encoder, reader.files)
    what = "no classes, so photos are searched" if isinstance(clip, rc.Encoder) else clip.extra_repr()
    common.notice(args, f"{what}; the photos are {'un' * (labels is None)}labelled")
    about = common.provenance(args, encoder) | {"photos": str(args.photos_in)}
    calibration = common.calibrated(args, clip, reader.files[1::2], pixels[1::2], provenance=about)
    calibration.save(args.out / "calibration.json")
    measured = (reader.files[::2], pixels[::2], None if labels is None else labels[::2])
    check = check_tower(clip, calibration, *measured, args.out, progress=not args.quiet)
    page, config = str(args.out / "index.html"), str(args.out / "calibration.json")
    check |= {"page": page, "calibration": config, "unreadable": reader.failed}
    write_text(args.out / "check.json", json.dumps(check, indent=2) + "\n")
    common.print_result(args, check, _lines(check), [f"the page is {page}; the result is used by --config {config}"])
    return 0


def _classes(
    args: argparse.Namespace, encoder: rc.Encoder, files: Sequence[Path]
) -> tuple[rc.ZeroShotClassifier | rc.Encoder, Tensor | None]:
    """The classifier, or the encoder where it can name nothing; and labels if every photo is in a class's folder."""
    import torch

    from react_clip.data.registry import ClassIndex, readable_names
    from react_clip.zeroshot import can_name

    folders = [name for name, photos in class_folders(args.photos_in).items() if photos]
    named = args.labels or args.labels_file or args.photos
    if not named and len(folders) > 1 and can_name(encoder):
        clip: rc.ZeroShotClassifier | rc.Encoder = rc.ZeroShotClassifier(
            encoder, readable_names(folders), templates=args.template
        )
    else:
        clip = common.build_clip(args, encoder)
    if isinstance(clip, rc.Encoder):
        return clip, None
    index = ClassIndex(clip.names, clip.names)
    found = [index.find(*readable_names([file.parent.name])) for file in files if file.parent.parent == args.photos_in]
    return clip, torch.tensor(found) if len(found) == len(files) and None not in found else None


def _lines(check: dict[str, Any]) -> Iterator[str]:
    """Lines of the terminal: the verdict, the numbers, the photos whose answers change."""
    yield check["sentence"]
    yield f"\n{'':20}{'plain':>12}{'defended':>12}{'passes':>12}"
    for title, each in check["attacks"].items():
        plain, ours = each["plain"], each["defended"]
        yield f"{title:20}{plain['right']:>12.1%}{ours['right']:>12.1%}{ours['passes']:>12.2f}"
    plain, ours = check["milliseconds"].values()
    yield f"{'ms per clean image':20}{plain:>12.1f}{ours:>12.1f}\n"
    yield from (f"changed: {each['file']}: {each['plain']} -> {each['defended']}" for each in check["changed"])
    yield from (f"note: {note}" for note in check["notes"])
