"""``react-clip attack``: adversarial versions of photos, to test a system of your own."""

from __future__ import annotations

import argparse
from pathlib import Path

import react_clip as rc
from react_clip.choices import ATTACKS
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader, add_photo_argument
from react_clip.errors import ReactClipError
from react_clip.storage import atomic_path

EXAMPLE = "react-clip attack cat.jpg --eps 4/255 --out attacked/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_photo_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for the attacked photos (PNG)")
    parser.add_argument("--attack", default="pgd", help=f"one of {', '.join(ATTACKS)}, or module:Class (%(default)s)")
    parser.add_argument("--eps", type=options.length, default="4/255", help="largest change of a pixel (%(default)s)")
    parser.add_argument("--steps", type=options.count, help="iterations (the attack's own default)")
    options.add_model_options(parser)
    options.add_label_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Attack the answer that undefended CLIP gives; images are written at the encoder's size."""
    reader = PhotoReader(args.photos_in, args)
    stems = [path.stem for path in reader.files]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise ReactClipError(f"two photos are called {twice[0]!r}: one would overwrite the other; attack them apart")
    attack = _attack(args)
    encoder = common.load_encoder(args)
    from react_clip.preprocess import to_image

    clf = common.build_classifier(args, encoder)
    rows: list[dict[str, str]] = []
    try:
        for paths, pixels in reader.batches(encoder, "attacking"):
            answers = clf(pixels).argmax(-1)
            result = attack(
                clf,
                pixels,
                answers,
                seed=args.seed,
                progress=lambda done: reader.bar.set_postfix_str(f"step {done}"),
            )
            new_answers = clf(result.images).argmax(-1)
            for i, path in enumerate(paths):
                written = args.out / f"{path.stem}.png"
                with atomic_path(written) as temporary:
                    to_image(result.images[i]).save(temporary, format="PNG")
                before, after = clf.names[int(answers[i])], clf.names[int(new_answers[i])]
                rows.append({"file": str(path), "attacked": str(written), "before": before, "after": after})
                if not args.json:
                    common.say(f"{written}: {before} -> {after}")
    finally:
        # Also when stopped: what is finished is printed.
        common.print_result(args, {"attack": repr(attack), "results": rows, "errors": reader.failed})
    return reader.exit_code


def _attack(args: argparse.Namespace) -> rc.attacks.Attack:
    """The attack that --attack, --eps and --steps describe."""
    config = {"kind": args.attack, "eps": args.eps} | ({"steps": args.steps} if args.steps is not None else {})
    attack = rc.attacks.from_dict(config)
    if "oblivious" not in attack.threats:
        known = ", ".join(rc.attacks.names("oblivious"))
        raise ReactClipError(f"--attack is {args.attack!r}, which attacks a defence; choose one of {known}")
    return attack
