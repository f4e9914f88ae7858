"""``react-clip attack``: adversarial versions of photos, to test a system of your own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from PIL import Image
from torch import Tensor
from tqdm import tqdm

from react_clip import ReactClipError, attacks
from react_clip.cli.common import (
    Subparsers,
    add_label_options,
    add_model_options,
    build_classifier,
    expand_inputs,
    load_encoder,
    new_command,
    notice,
    read_batches,
)
from react_clip.storage import atomic_path

_BATCH = 16


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = new_command(
        subparsers,
        "attack",
        run,
        summary="Write adversarial versions of photos that fool undefended CLIP.",
        example="react-clip attack cat.jpg --eps 4/255 --out attacked/",
    )
    parser.add_argument("photos_in", nargs="+", type=Path, metavar="PHOTO", help="image files or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder for the attacked photos (PNG)")
    parser.add_argument("--attack", default="pgd", help=f"one of {', '.join(attacks.names())} (%(default)s)")
    parser.add_argument("--eps", default="4/255", help="largest change of a pixel in [0, 1] (%(default)s)")
    parser.add_argument("--steps", type=int, help="iterations (the attack's own default)")
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Attack the answer that undefended CLIP gives; images are written at the encoder's size."""
    config = {"kind": args.attack, "eps": args.eps} | ({"steps": args.steps} if args.steps is not None else {})
    attack = attacks.from_dict(config)
    files = expand_inputs(args.photos_in)
    stems = [path.stem for path in files]
    if len(set(stems)) < len(stems):
        twice = next(stem for stem in stems if stems.count(stem) > 1)
        raise ReactClipError(f"two photos are called {twice!r} and would overwrite each other; attack them separately")
    encoder = load_encoder(args)
    clf = build_classifier(args, encoder)
    rows = []
    failed = []

    def on_error(path: Path, reason: str) -> None:
        failed.append(str(path))
        tqdm.write(f"react-clip: {reason}", file=sys.stderr)

    with tqdm(total=len(files), unit="photo", disable=args.quiet or None) as bar:
        for paths, pixels in read_batches(files, encoder.image_size, _BATCH, on_error):
            answers = clf(pixels.to(clf.device)).argmax(-1)
            result = attack(clf, pixels.to(clf.device), answers, seed=args.seed)
            fooled = clf(result.images).argmax(-1)
            for i, path in enumerate(paths):
                place = args.out / f"{path.stem}.png"
                save_png(place, result.images[i])
                before, after = clf.names[int(answers[i])], clf.names[int(fooled[i])]
                rows.append({"file": str(path), "attacked": str(place), "before": before, "after": after})
            bar.update(len(paths))
    if args.json:
        print(json.dumps({"attack": repr(attack), "results": rows, "failed": failed}, indent=2))
    else:
        for row in rows:
            print(f"{row['attacked']}: {row['before']} -> {row['after']}")
        notice(args, "PNG holds 8 bits a pixel; rounding weakens attacks of about 1/255 and below")
    return 2 if failed else 0


def save_png(path: Path, pixels: Tensor) -> None:
    """One image as PNG, whole or not at all."""
    array = pixels.mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    with atomic_path(path) as temporary:
        Image.fromarray(array).save(temporary, format="PNG")
