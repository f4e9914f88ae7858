"""``react-clip pull``: fetch a model ahead of time."""

from __future__ import annotations

import argparse

import react_clip as rc
from react_clip.cli import common

EXAMPLE = "react-clip pull clip-vit-b-16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", help="clip-vit-b-16 (offline), a hub id, or open_clip:MODEL/PRETRAINED")
    parser.add_argument("--force", action="store_true", help="fetch and convert again, replacing the cached copy")


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print where it is."""
    with common.progress(args, "step", stage=f"looking for {args.model}") as bar:
        path = rc.pull(args.model, force=args.force, say=bar.set_description)
    common.print_result(args, {"model": args.model, "path": path}, [f"{args.model} is ready in {path}"])
    return 0
