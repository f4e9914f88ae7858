"""``react-clip embed``: defended features of photos, for search and clustering."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from react_clip import ReactClipError
from react_clip.cli.common import (
    PhotoReader,
    Subparsers,
    add_label_options,
    add_model_options,
    add_photo_argument,
    build_classifier,
    build_guard,
    load_encoder,
    new_command,
    notice,
)
from react_clip.storage import atomic_path, write_tensors, write_text


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = new_command(
        subparsers,
        "embed",
        run,
        summary="Write defended unit features of photos to .npy or .safetensors (labels only serve the gate).",
        example="react-clip embed photos/ --out features.safetensors",
    )
    add_photo_argument(parser)
    parser.add_argument(
        "--out", type=Path, required=True, help="features.npy (+ .files.json beside it) or .safetensors"
    )
    add_model_options(parser)
    add_label_options(parser)


def run(args: argparse.Namespace) -> int:
    """Embed in batches; a file that cannot be read costs one line and its row, not the job."""
    if args.out.suffix not in (".npy", ".safetensors"):
        raise ReactClipError(f"--out is {args.out}; its name must end in .npy or .safetensors")
    reader = PhotoReader(args)
    encoder = load_encoder(args)
    clf = build_classifier(args, encoder)
    guard = build_guard(args, encoder)
    done: list[str] = []
    features: list[Tensor] = []
    for paths, pixels in reader.batches(encoder.image_size):
        features.append(guard(clf, pixels, seed=args.seed).features.cpu())
        done += [str(path) for path in paths]
    if not done:
        raise ReactClipError(f"none of the {len(reader.files)} files could be read; nothing was written")
    write_features(args.out, torch.cat(features), done, encoder.name)
    failed = [failure["file"] for failure in reader.failed]
    summary = {"out": str(args.out), "photos": len(done), "failed": failed, "dim": encoder.dim}
    if args.json:
        print(json.dumps(summary))
    else:
        notice(
            args, f"{len(done)} x {encoder.dim} features in {args.out}" + (f", {len(failed)} failed" if failed else "")
        )
    return reader.exit_code


def write_features(path: Path, features: Tensor, files: list[str], model: str) -> None:
    """Features and the file each row belongs to, whole or not at all."""
    if path.suffix == ".safetensors":
        write_tensors(path, {"features": features}, {"files": json.dumps(files), "model": model})
        return
    write_text(path.with_suffix(".files.json"), json.dumps({"model": model, "files": files}, indent=1) + "\n")
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.save(stream, features.numpy())
