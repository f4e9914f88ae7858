"""``react-clip embed``: defended features of photos, for search and clustering."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from react_clip import ReactClipError
from react_clip.cli.common import (
    PhotoReader,
    add_label_options,
    add_model_options,
    build_classifier,
    build_guard,
    load_encoder,
    notice,
)
from react_clip.scale import defend_dataset
from react_clip.storage import atomic_path, write_tensors, write_text

_FILES = (".npy", ".safetensors")
_OF_PARTS = ("parcel", "top", "column", "resume")
_OF_RAY = ("address", "workers")


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
    add_model_options(parser)
    add_label_options(parser)
    parser.add_argument("--batch", type=int, help="views in one encoder call (what the defence's constants say)")
    group = parser.add_argument_group("collections")
    group.add_argument("--engine", choices=("local", "ray"), default="local", help="this process, or a Ray cluster")
    group.add_argument("--address", help="of the Ray cluster, as host:port or auto (one is started here without it)")
    group.add_argument("--workers", type=int, help="copies of the model in the cluster (two a GPU, or one a CPU core)")
    group.add_argument("--parcel", type=int, help="images that are read, defended and written as one (256)")
    group.add_argument("--top", type=int, help="answers listed in a row (5)")
    group.add_argument("--column", help="of Parquet files: where the images are (image)")
    group.add_argument("--resume", action="store_true", default=None, help="continue in a folder with finished parts")


def run(args: argparse.Namespace) -> int:
    """Embed into one file, or into a folder of parts."""
    suffix = PurePosixPath(args.out).suffix
    if suffix not in _FILES:
        if suffix and "://" not in args.out and not args.out.endswith("/") and not Path(args.out).is_dir():
            raise ReactClipError(
                f"--out is {args.out}; its name must end in .npy or .safetensors, or have no ending: then it is a "
                "folder for Parquet parts"
            )
        return _embed_collection(args)
    for name in (*_OF_PARTS, *_OF_RAY):
        if getattr(args, name) is not None:
            raise ReactClipError(f"--{name} is for collections; give --out a folder, not {args.out}")
    if args.engine != "local":
        raise ReactClipError(f"--engine {args.engine} writes Parquet parts; give --out a folder, not {args.out}")
    return _embed_files(args)


def _embed_collection(args: argparse.Namespace) -> int:
    """A collection into a folder of parts; what cannot be read costs a line, and exit code 2."""
    if args.engine == "local":
        for name in _OF_RAY:
            if getattr(args, name) is not None:
                raise ReactClipError(f"--{name} is for --engine ray; add that, or leave it out")
    # In a cluster the model runs elsewhere; here it only says what its classes are.
    encoder = load_encoder(args if args.engine == "local" else argparse.Namespace(**{**vars(args), "device": "cpu"}))
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder, features=True)
    chosen = {name: getattr(args, name) for name in (*_OF_PARTS, *_OF_RAY) if getattr(args, name) is not None}
    summary = defend_dataset(
        args.photos_in,
        args.out,
        clf,
        guard if args.batch is None else guard.replace(max_batch=args.batch),
        seed=args.seed,
        engine=args.engine,
        device=args.device,
        progress=not args.quiet,
        **chosen,
    )
    for line in summary.missing:
        print(f"react-clip: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps(summary.to_dict()))
    else:
        failed = f", {summary.errors} of them with an error" if summary.errors else ""
        notice(args, f"{summary.images} images in {summary.parts} parts in {summary.out}{failed}")
        if summary.missing:
            notice(args, f"{len(summary.missing)} pieces are missing; --resume tries them again")
    return 2 if summary.missing else 0


def _embed_files(args: argparse.Namespace) -> int:
    """Embed in batches; a file that cannot be read costs one line and its row, not the job."""
    out = Path(args.out)
    args.photos_in = [Path(source) for source in args.photos_in]
    reader = PhotoReader(args)
    encoder = load_encoder(args)
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder, features=True)
    guard = guard if args.batch is None else guard.replace(max_batch=args.batch)
    done: list[str] = []
    features: list[Tensor] = []
    for paths, pixels in reader.batches(encoder.image_size):
        features.append(guard(clf, pixels, seed=args.seed).features.cpu())
        done += [str(path) for path in paths]
    if not done:
        raise ReactClipError(f"none of the {len(reader.files)} files could be read; nothing was written")
    write_features(out, torch.cat(features), done, encoder.name)
    failed = [failure["file"] for failure in reader.failed]
    summary = {"out": str(out), "photos": len(done), "failed": failed, "dim": encoder.dim}
    if args.json:
        print(json.dumps(summary))
    else:
        notice(args, f"{len(done)} x {encoder.dim} features in {out}" + (f", {len(failed)} failed" if failed else ""))
    return reader.exit_code


def write_features(path: Path, features: Tensor, files: list[str], model: str) -> None:
    """Features and the file each row belongs to, whole or not at all."""
    if path.suffix == ".safetensors":
        write_tensors(path, {"features": features}, {"files": json.dumps(files), "model": model})
        return
    write_text(path.with_suffix(".files.json"), json.dumps({"model": model, "files": files}, indent=1) + "\n")
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, features.numpy())
