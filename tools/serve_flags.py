"""Write the table of flags in docs/serve.md, from the settings of ``react-clip serve``.

python tools/serve_flags.py          # rewrite the table
python tools/serve_flags.py --check  # fail if the document differs
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from react_clip.serve.settings import FLAGLESS, Settings, flag, variable

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "serve.md"
MARK = re.compile(r"(<!-- serve flags -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """One line a setting: flag, variable, default, meaning."""
    lines = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for name, setting in Settings.model_fields.items():
        option = "" if name in FLAGLESS else f"`{flag(name)}`"
        default = "" if setting.default is None else "off" if setting.default is False else f"`{setting.default}`"
        lines.append(
            f"| {option} | `{setting.validation_alias or variable(name)}` | {default} | {setting.description} |"
        )
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
