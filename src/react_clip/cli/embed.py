"""``react-clip embed``: defended features of photos, for search and clustering."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import react_clip as rc
from react_clip.cli import common, options
from react_clip.cli.photos import PhotoReader
from react_clip.errors import ReactClipError
from react_clip.storage import atomic_path, reserved_space

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip.secret import Seed

EXAMPLE = "react-clip embed s3://bucket/shards --out s3://bucket/features --engine ray --resume"
_FOLDER_OPTIONS = ("batch", "top", "column", "resume", "address", "workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("photos_in", nargs="+", metavar="SOURCE", help="photos, folders, .tar, .parquet or URLs")
    parser.add_argument("--out", required=True, help="features.npy, or a folder or URL for Parquet files")
    options.add_model_options(parser)
    options.add_label_options(parser)
    options.add_defense_options(parser)
    group = parser.add_argument_group("collections")
    group.add_argument("--batch", type=options.count, default=256, help="images defended together (%(default)s)")
    group.add_argument("--top", type=options.count, default=5, help="answers written for each image (%(default)s)")
    group.add_argument("--column", default="image", help="column of Parquet files with the images (%(default)s)")
    group.add_argument("--resume", action="store_true", help="continue in a folder with finished files")
    options.add_cluster_options(parser, workers="copies of the model in the cluster (two per GPU, else one per core)")


def run(args: argparse.Namespace) -> int:
    """Write features to one file, or to a folder of Parquet files; exit code 2 if something could not be read."""
    options.check_cluster_options(args)
    ending = PurePosixPath(args.out).suffix
    to_file = ending == ".npy"
    if to_file and (args.resume or args.engine == "ray"):
        raise ReactClipError(f"--resume and --engine ray are for Parquet files; give --out a folder, not {args.out}")
    if ending and not to_file and not ("://" in args.out or args.out.endswith("/") or Path(args.out).is_dir()):
        raise ReactClipError(f"--out is {args.out}; it must end in .npy, or be a folder without an ending")
    for source in args.photos_in:
        if not set(source) & set("*?[:"):  # neither a pattern nor a URL
            options.existing(source)
    reader = PhotoReader([Path(source) for source in args.photos_in], args) if to_file else None
    seed = common.secret_seed(args)
    # On a cluster the workers load the model; here it only encodes the labels.
    here = args if args.engine == "local" else argparse.Namespace(**{**vars(args), "device": "cpu"})
    clf, guard = common.load_defended(here)
    return _to_folder(args, clf, guard, seed) if reader is None else _to_file(args, reader, clf, guard, seed)


def _to_folder(args: argparse.Namespace, clf: rc.ZeroShotClassifier, guard: rc.defenses.Defense, seed: Seed) -> int:
    try:
        summary = rc.scale.defend_dataset(
            args.photos_in,
            args.out,
            clf,
            guard,
            seed=seed,
            engine=args.engine,
            device=args.device,
            progress=not args.quiet,
            **{name: getattr(args, name) for name in _FOLDER_OPTIONS},
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"finished parts are in {args.out}, --resume continues") from None
    for line in summary.missing:
        print(f"react-clip: {line}", file=sys.stderr)
    done = f"{summary.images} images in {summary.out}, {summary.errors} of them with an error"
    common.print_result(args, asdict(summary), notices=[done])
    return 2 if summary.missing else 0


def _to_file(
    args: argparse.Namespace, reader: PhotoReader, clf: rc.ZeroShotClassifier, guard: rc.defenses.Defense, seed: Seed
) -> int:
    """Write one row per photo, also when stopped; a photo that cannot be read is a line on stderr and has no row."""
    import torch

    from react_clip.secret import described

    out = Path(args.out)
    files: list[str] = []
    features: list[Tensor] = []
    stopped = None
    # Features, and about as much as the names take.
    size = sum(4 * clf.encoder.dim + len(str(path)) + 8 for path in reader.files)
    with reserved_space(out, size):
        try:
            for paths, pixels in reader.batches(clf.encoder, "defending"):
                features.append(guard(clf, pixels, seed=seed).features.cpu())
                files += [str(path) for path in paths]
        except KeyboardInterrupt as error:
            stopped = error
    if not files:
        raise stopped or ReactClipError(f"none of the {len(reader.files)} files could be read; nothing was written")
    about = {"model": clf.encoder.name, "seed": described(seed)}
    write_features(out, torch.cat(features), files, about)
    failed = [failure["file"] for failure in reader.failed]
    summary = f"{len(files)} x {clf.encoder.dim} features in {out}" + (f", {len(failed)} failed" if failed else "")
    if stopped is not None:
        raise KeyboardInterrupt(summary)
    document = {"out": str(out), "photos": len(files), "failed": failed, "dim": clf.encoder.dim, **about}
    common.print_result(args, document, notices=[summary])
    return reader.exit_code


def write_features(path: Path, features: Tensor, files: list[str], about: Mapping[str, int | str]) -> None:
    """Write features ``[N, dim]``, the file name of each row, and what made them; a failed write changes nothing."""
    import numpy as np

    # Both are complete on the disk before either takes its name.
    with atomic_path(path) as temporary, atomic_path(path.with_suffix(".files.json")) as names:
        names.write_text(json.dumps({**about, "files": files}, indent=1) + "\n", encoding="utf-8")
        with temporary.open("wb") as stream:
            np.save(stream, features.numpy())
            stream.flush()
            os.fsync(stream.fileno())
