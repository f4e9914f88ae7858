"""``react-clip embed``: defended features of photos, for search and clustering."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from react_clip.cli import common
from react_clip.cli.photos import PhotoReader
from react_clip.errors import ReactClipError

if TYPE_CHECKING:
    from torch import Tensor

    from react_clip.defenses import Defense
    from react_clip.zeroshot import ZeroShotClassifier

EXAMPLE = "react-clip embed s3://bucket/shards --out s3://bucket/features --engine ray --resume"
_FOLDER_OPTIONS = ("chunk", "top", "column", "resume", "address", "workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "photos_in",
        nargs="+",
        metavar="SOURCE",
        help="image files or folders of them; for Parquet parts also .tar shards, .parquet files and fsspec URLs",
    )
    parser.add_argument(
        "--out",
        required=True,
        help="features.npy (+ .files.json beside it), .safetensors, or a folder or URL for Parquet parts",
    )
    common.add_model_options(parser)
    common.add_label_options(parser)
    common.add_defense_options(parser, seed="a new secret; 0 for Parquet parts")
    parser.add_argument("--batch", type=int, help="views in one encoder call (the defence's own number)")
    group = parser.add_argument_group("collections")
    group.add_argument("--chunk", type=int, help="images that are read, defended and written together (256)")
    group.add_argument("--top", type=int, help="answers written for each image (5)")
    group.add_argument("--column", help="column of Parquet files that holds the images (image)")
    group.add_argument("--resume", action="store_true", default=None, help="continue in a folder with finished parts")
    common.add_cluster_options(parser, workers="copies of the model in the cluster (two per GPU, else one per core)")


def run(args: argparse.Namespace) -> int:
    """Write features to one file, or to a folder of Parquet parts; exit code 2 if something could not be read."""
    common.check_counts(args, "batch", "chunk", "top")
    common.check_label_options(args)
    options = {name: value for name in _FOLDER_OPTIONS if (value := getattr(args, name)) is not None}
    reader = None
    if PurePosixPath(args.out).suffix in (".npy", ".safetensors"):
        _refuse_folder_options(args, list(options))
        args.photos_in = [Path(source) for source in args.photos_in]
        reader = PhotoReader(args)
    else:
        _check_folder(args.out)
        for source in args.photos_in:
            if not set(source) & set("*?[:"):  # neither a pattern nor a URL
                common.check_exists(Path(source))
        common.check_cluster_options(args)
    # On a cluster the workers load the model; here it only encodes the labels.
    here = args if args.engine == "local" else argparse.Namespace(**{**vars(args), "device": "cpu"})
    encoder = common.load_encoder(here)
    clf = common.build_classifier(args, encoder)
    guard = common.build_guard(args, encoder, features=True)
    common.notice(args, common.defense_line(guard))
    guard = guard if args.batch is None else guard.replace(max_batch=args.batch)
    return _to_folder(args, options, clf, guard) if reader is None else _to_file(args, reader, clf, guard)


def _refuse_folder_options(args: argparse.Namespace, given: list[str]) -> None:
    if given:
        raise ReactClipError(f"--{given[0]} is for collections; give --out a folder, not {args.out}")
    if args.engine != "local":
        raise ReactClipError(f"--engine {args.engine} writes Parquet parts; give --out a folder, not {args.out}")


def _check_folder(out: str) -> None:
    is_folder = "://" in out or out.endswith("/") or Path(out).is_dir()
    if PurePosixPath(out).suffix and not is_folder:
        raise ReactClipError(
            f"--out is {out}; its name must end in .npy or .safetensors, or have no ending: then it is a "
            "folder for Parquet parts"
        )


def _to_folder(args: argparse.Namespace, options: dict[str, Any], clf: ZeroShotClassifier, guard: Defense) -> int:
    from react_clip.scale import defend_dataset

    summary = defend_dataset(
        args.photos_in,
        args.out,
        clf,
        guard,
        seed=args.seed or 0,  # not a secret: an interrupted run can be continued
        engine=args.engine,
        device=args.device,
        progress=not args.quiet,
        **options,
    )
    for line in summary.missing:
        print(f"react-clip: {line}", file=sys.stderr)
    failed = f", {summary.errors} of them with an error" if summary.errors else ""
    parts = f"{summary.parts} part{'s' if summary.parts != 1 else ''}"
    notices = [f"{summary.images} images in {parts} in {summary.out}{failed}"]
    if summary.missing:
        notices.append(f"{len(summary.missing)} pieces are missing; --resume tries them again")
    common.print_result(args, asdict(summary), notices=notices)
    return 2 if summary.missing else 0


def _to_file(args: argparse.Namespace, reader: PhotoReader, clf: ZeroShotClassifier, guard: Defense) -> int:
    """Write one row per photo; a photo that cannot be read is a line on stderr and has no row."""
    import torch

    out, dim = Path(args.out), clf.encoder.dim
    files: list[str] = []
    features: list[Tensor] = []
    seed = common.secret_seed(args)
    try:
        for paths, pixels in reader.batches(clf.encoder, "defending"):
            features.append(guard(clf, pixels, seed=seed).features.cpu())
            files += [str(path) for path in paths]
    except KeyboardInterrupt:
        if files:
            write_features(out, torch.cat(features), files, clf.encoder.name)
        raise
    if not files:
        raise ReactClipError(f"none of the {len(reader.files)} files could be read; nothing was written")
    write_features(out, torch.cat(features), files, clf.encoder.name)
    failed = [failure["file"] for failure in reader.failed]
    summary = f"{len(files)} x {dim} features in {out}" + (f", {len(failed)} failed" if failed else "")
    document = {"out": str(out), "photos": len(files), "failed": failed, "dim": dim}
    common.print_result(args, document, notices=[summary])
    return reader.exit_code


def write_features(path: Path, features: Tensor, files: list[str], model: str) -> None:
    """Write features ``[N, dim]`` and the file name of each row; a failed write leaves no partial file."""
    import numpy as np

    from react_clip.storage import atomic_path, write_tensors, write_text

    if path.suffix == ".safetensors":
        write_tensors(path, {"features": features}, {"files": json.dumps(files), "model": model})
        return
    write_text(path.with_suffix(".files.json"), json.dumps({"model": model, "files": files}, indent=1) + "\n")
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, features.numpy())
