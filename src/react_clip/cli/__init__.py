"""The ``react-clip`` command line.

Each command is a module ``react_clip.cli.NAME`` with ``add_arguments(parser)`` and ``run(args)``. Only the chosen one
is imported, so that ``react-clip --help`` is immediate. Bad input prints one line to stderr and exits with code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from react_clip.environment import __version__
from react_clip.errors import ReactClipError


class Command(NamedTuple):
    """What ``--help`` says about a command."""

    summary: str
    example: str


COMMANDS = {
    "demo": Command(
        "Attack a few photos; show what CLIP and defended CLIP say, in the terminal and on a page.",
        "react-clip demo my.jpg --labels 'cat, dog, teapot'",
    ),
    "classify": Command(
        "Name what is on photos, defended against adversarial perturbations.",
        "react-clip classify holiday/ --labels 'beach, mountain, city'",
    ),
    "embed": Command(
        "Write defended unit features of photos to .npy or .safetensors (labels only serve the gate), or of whole "
        "collections, with answers and diagnostics, to a folder of Parquet parts.",
        "react-clip embed s3://bucket/shards --out s3://bucket/features --engine ray --resume",
    ),
    "pull": Command(
        "Fetch a model, so that everything else works without a network.",
        "react-clip pull clip-vit-b-16",
    ),
    "attack": Command(
        "Write adversarial versions of photos that fool undefended CLIP.",
        "react-clip attack cat.jpg --eps 4/255 --out attacked/",
    ),
    "evaluate": Command(
        "Measure clean and robust accuracy of defences as a recipe says; continues a run that was interrupted.",
        "react-clip evaluate recipes/table1.yaml --model clip-vit-b-16 --data photos/ --heads heads/ --datasets all "
        "--limit 100 --out runs/table1 (add --validate to check it and see its cost first)",
    ),
    "calibrate": Command(
        "Fit sigma(r) and the threshold tau to an encoder, on labelled photos (Algorithm 1 of the paper).",
        "react-clip calibrate folder:photos --model my-clip/ --clean-pass 0.95 --out calibration.json",
    ),
    "report": Command(
        "Write a self-contained HTML page and the figures (SVG, PNG) of a run, or of several over the same photos; of "
        "an unfinished run too.",
        "react-clip report runs/table1 --out report/",
    ),
    "bench": Command(
        "Time the bare encoder, the 14-pass algorithm, ReACT and published Defend-CLIP on the same images.",
        "react-clip bench photos/ --batch 64 --attacked 0.1 --out bench.json",
    ),
    "finetune": Command(
        "Finetune CLIP's image tower against attacks; the same command continues an interrupted run.",
        "react-clip finetune tecoa folder:photos --model my-clip/ --steps 300 --dtype bf16 --out runs/tecoa",
    ),
    "export": Command(
        "Write the image tower for ONNX Runtime or OpenVINO and check it against the original.",
        "react-clip export clip-vit-b-16 --format onnx --out towers/b16  (then --model onnx:towers/b16)",
    ),
    "serve": Command(
        "Answer over HTTP: classify and embed photos, defended, with dynamic batching and metrics.",
        "react-clip serve --model openai/clip-vit-base-patch32 --labels 'cat, dog, teapot' --port 8000",
    ),
}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ``run`` of the result is the command's function."""
    parser = argparse.ArgumentParser(
        prog="react-clip",
        description="Defend CLIP against adversarial images at test time, and measure how well that works.",
        epilog="example: react-clip demo my.jpg --labels 'cat, dog, teapot'",
    )
    parser.add_argument("--version", action="version", version=f"react-clip {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary)
        if name == chosen:
            configure(subparser, name)
    return parser.parse_args(argv)


def configure(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a parser the options, the help and the function of one command."""
    module = import_module(f"react_clip.cli.{name}")
    parser.description = COMMANDS[name].summary
    parser.epilog = f"example: {COMMANDS[name].example}"
    parser.set_defaults(run=module.run)
    parser.add_argument("--json", action="store_true", help="print one JSON document for machines")
    parser.add_argument("--quiet", action="store_true", help="no progress, no notices")
    module.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        return int(args.run(args))
    except ReactClipError as error:
        print(f"react-clip: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("react-clip: stopped; finished work is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; without this Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
