"""The ``react-clip`` command line.

Each command is a module ``react_clip.cli.NAME`` with an ``EXAMPLE``, ``add_arguments(parser)`` and ``run(args)``. Only
the chosen one is imported, so that ``react-clip --help`` is immediate. Bad input prints one line to stderr and exits
with code 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from react_clip.environment import __version__
from react_clip.errors import ReactClipError

COMMANDS = {
    "demo": "Attack a few photos; show what CLIP and defended CLIP say, in the terminal and on a page.",
    "classify": "Name what is on photos, defended against adversarial perturbations.",
    "embed": "Write defended unit features of photos to a file, or of whole collections to a folder of Parquet files.",
    "pull": "Fetch a model, so that everything else works without a network.",
    "attack": "Write adversarial versions of photos that fool undefended CLIP.",
    "evaluate": "Measure accuracy of defences as a recipe says; continues a run that was interrupted.",
    "calibrate": "Fit a defence to an encoder: SecondLook to clean photos without labels, ReACT to labelled ones.",
    "check": "Calibrate SecondLook on your own photos, attack your own tower, and say on a page whether it helps.",
    "report": "Write a self-contained HTML page and the figures (SVG, PNG) of one or several runs, finished or not.",
    "rank": "Rank defences over clean, damaged and attacked photos, from runs, or measure one of your own.",
    "compare": "Compare two runs photo by photo, with paired tests, and say what does not match.",
    "bench": "Time the bare encoder, the default defence and others on the same images.",
    "finetune": "Finetune CLIP's image tower against attacks; the same command continues an interrupted run.",
    "export": "Write the image tower for ONNX Runtime and check it against the original.",
    "serve": "Answer over HTTP: classify and embed photos, defended, with dynamic batching and metrics.",
}
"""Commands and their summaries in ``--help``."""

_CONTINUES = ("check", "evaluate", "rank", "finetune")
"""Commands that continue an interrupted run when they are started again."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`ReactClipError` instead of printing the usage and exiting."""
        way_out = "" if ";" in message else f"; see {self.prog} --help"
        raise ReactClipError(message.removeprefix("argument ") + way_out)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ``run`` of the result is the command's function."""
    parser = Parser(
        prog="react-clip",
        description="Defend CLIP against adversarial images at test time, and measure how well that works.",
        epilog="example: react-clip demo my.jpg --labels 'cat, dog, teapot'",
    )
    parser.add_argument("--version", action="version", version=f"react-clip {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == _command(argv):
            configure(subparser, name)
    return parser.parse_args(argv)


def _command(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if not word.startswith("-")), None)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a parser the options, the help and the function of one command."""
    module = import_module(f"react_clip.cli.{name}")
    parser.epilog = f"example: {module.EXAMPLE}"
    parser.set_defaults(run=module.run)
    parser.add_argument("--json", action="store_true", help="print one JSON document for machines")
    parser.add_argument("--quiet", action="store_true", help="no progress, no notices")
    module.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            args = parse_args(words)
            return int(args.run(args))
        finally:
            sys.stdout.flush()
    except ReactClipError as error:
        return _fail(str(error))
    except KeyboardInterrupt as stopped:
        # A command that has written something says so in the exception.
        kept = ["the same command continues"] if _command(words) in _CONTINUES else [*map(str, stopped.args)]
        print("; ".join(["react-clip: stopped", *kept]), file=sys.stderr)
        return 130
    except BrokenPipeError:
        _forget_stdout()  # the reader (head, less) has closed the pipe
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _forget_stdout()
        return _fail("the output cannot be written: no space left on the device")


def _fail(line: str) -> int:
    print(f"react-clip: {line}", file=sys.stderr)
    return 2


def _forget_stdout() -> None:
    """Without this Python complains again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
