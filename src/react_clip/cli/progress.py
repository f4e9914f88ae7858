"""Progress of a command on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

_SECONDS = 4.0
"""Time between two plain lines."""


class Progress:
    """A context manager; within it the latest state is shown, also while one step takes long.

    Without a terminal a line is printed whenever the stage changes, and every four seconds in between. With ``quiet``
    nothing is printed.
    """

    def __init__(self, *, quiet: bool, unit: str, total: int | None = None) -> None:
        self._quiet, self._unit, self._total = quiet, unit, total
        self._stage, self._note, self._done = "", "", 0
        self._bar: tqdm[Any] | None = None
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Progress:
        if self._quiet:
            return self
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit=self._unit, total=self._total)
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def show(
        self, stage: str | None = None, *, done: int | None = None, total: int | None = None, note: str = ""
    ) -> None:
        """Set the stage, the steps done and the steps in all; values that are not given stay as they are."""
        changed = stage is not None and stage != self._stage
        self._stage = self._stage if stage is None else stage
        self._done = self._done if done is None else done
        self._total = self._total if total is None else total
        self._note = note
        if self._bar is not None:
            self._bar.total, self._bar.n = self._total, self._done
            self._bar.set_description(self._stage, refresh=False)
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(0)
        elif changed and not self._quiet:
            self._print_line()

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """Count steps as done."""
        self.show(done=self._done + steps, note=note)

    def write(self, text: str, *, error: bool = False) -> None:
        """Print text to stdout (or stderr) above the bar, at once."""
        stream = sys.stderr if error else sys.stdout
        if self._bar is not None:
            self._bar.write(text, file=stream)
        else:
            print(text, file=stream, flush=True)

    def _repeat(self) -> None:
        while not self._stopped.wait(1.0 if self._bar is not None else _SECONDS):
            if self._bar is not None:
                self._bar.refresh()
            else:
                self._print_line()

    def _print_line(self) -> None:
        total = "" if self._total is None else f" of {self._total}"
        counted = f"{self._done}{total} {self._unit}s" if self._done else ""
        state = ", ".join(filter(None, (self._stage, counted, self._note)))
        print(f"[{time.monotonic() - self._began:3.0f} s] {state or 'working'}", file=sys.stderr, flush=True)
