"""The command line: one thin file a command. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from react_clip.errors import ReactClipError

COMMANDS = (
    *("demo", "classify", "embed", "pull", "attack", "evaluate", "calibrate", "report", "bench", "finetune", "export"),
    "serve",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``react-clip`` with all its commands."""
    from react_clip.environment import __version__

    parser = argparse.ArgumentParser(
        prog="react-clip",
        description="Defend CLIP against adversarial images at test time, and measure how well that works.",
        epilog="example: react-clip demo my.jpg --labels 'cat, dog, teapot'",
    )
    parser.add_argument("--version", action="version", version=f"react-clip {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"react_clip.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ReactClipError as error:
        print(f"react-clip: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("react-clip: stopped; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
