"""Put the table of flags into docs/serve.md, made from the parser of ``react-clip serve``.

python tools/serve_flags.py          # rewrite the table
python tools/serve_flags.py --check  # fail if the document says something else
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from react_clip.cli import configure
from react_clip.serve.settings import ENVIRONMENT, variable

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "serve.md"
MARK = re.compile(r"(<!-- serve flags -->\n).*?(<!-- end -->)", re.DOTALL)


def flags() -> list[argparse.Action]:
    """The flags of the command with their own defaults, whatever the environment holds."""
    given = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(ENVIRONMENT)}
    try:
        parser = argparse.ArgumentParser()
        configure(parser, "serve")
    finally:
        os.environ.update(given)
    return [action for action in parser._actions if action.dest != "help"]


def table() -> str:
    """One line a flag: flag, variable, default, meaning."""
    lines = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for action in flags():
        meaning = str(action.help).replace("(%(default)s)", "").partition(" [$")[0].strip().replace(" ;", ";")
        default = (
            "off" if action.default is False else f"`{action.default}`" if action.default not in (None, "") else ""
        )
        lines.append(f"| `{action.option_strings[0]}` | `{variable(action.dest)}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A document with the table in its place."""
    return MARK.sub(lambda mark: mark[1] + table() + mark[2], text)


def main() -> int:
    """Rewrite or check the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    args = parser.parse_args()
    old = DOCUMENT.read_text(encoding="utf-8")
    new = filled(old)
    if old == new:
        return 0
    if args.check:
        print(f"{DOCUMENT.name} does not list the flags as they are; run python tools/serve_flags.py", file=sys.stderr)
        return 1
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
