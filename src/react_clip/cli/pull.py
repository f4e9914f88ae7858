"""``react-clip pull``: fetch a model ahead of time."""

from __future__ import annotations

import argparse
import json

from react_clip import pull
from react_clip.cli.common import notice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", help="clip-vit-b-16 (offline), a hub id, or open_clip:MODEL/PRETRAINED")
    parser.add_argument("--force", action="store_true", help="fetch and convert again, replacing the cached copy")


def run(args: argparse.Namespace) -> int:
    """Fetch and say where it is."""
    place = pull(args.model, force=args.force, say=lambda line: notice(args, line))
    print(json.dumps({"model": args.model, "path": place}) if args.json else f"{args.model} is ready in {place}")
    return 0
