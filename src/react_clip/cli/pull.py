"""``react-clip pull``: fetch a model ahead of time."""

from __future__ import annotations

import argparse
import json

from react_clip import pull
from react_clip.cli.common import Subparsers, new_command, notice


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = new_command(
        subparsers,
        "pull",
        run,
        summary="Fetch a model, so that everything else works without a network.",
        example="react-clip pull clip-vit-b-16",
    )
    parser.add_argument("model", help="clip-vit-b-16 (offline), a hub id, or open_clip:MODEL/PRETRAINED")
    parser.add_argument("--force", action="store_true", help="fetch and convert again, replacing the cached copy")


def run(args: argparse.Namespace) -> int:
    """Fetch and say where it is."""
    place = pull(args.model, force=args.force, say=lambda line: notice(args, line))
    print(json.dumps({"model": args.model, "path": place}) if args.json else f"{args.model} is ready in {place}")
    return 0
