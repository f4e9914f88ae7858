"""Run every script, one process each: ``python -m benchmarks.tried [options of the scripts]``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OUR_OWN = {"__init__", "__main__", "common"}


def main() -> int:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in OUR_OWN)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.tried.{name}", *sys.argv[1:]], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(names)} measured")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
