"""``python -m react_clip`` is ``react-clip``."""

import sys

from react_clip.cli import main

if __name__ == "__main__":
    sys.exit(main())
