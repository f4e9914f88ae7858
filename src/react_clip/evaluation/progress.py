"""A progress bar in encoder passes, the unit in which attacks and defences take the same time."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Tally:
    """Counts finished passes and planned passes that were not needed."""

    def __init__(self) -> None:
        self.finished = 0
        self.skipped = 0

    def stage(self, text: str) -> None:
        """Describe the current work; shown by a bar only."""

    def done(self, passes: int) -> None:
        """Count finished passes."""
        self.finished += passes

    def skip(self, passes: int) -> None:
        """Count planned passes that are not needed."""
        self.skipped += passes


class Progress(Tally):
    """One bar for one set; passes that are not needed shorten it."""

    def __init__(self, name: str, total: int, *, enabled: bool) -> None:
        super().__init__()
        # In a log file a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=total, desc=name, unit=" passes", unit_scale=True, disable=not enabled, mininterval=interval
        )
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def stage(self, text: str) -> None:
        """Show the text in front of the bar."""
        self._bar.set_description(f"{self._name}: {text}", refresh=False)

    def done(self, passes: int) -> None:
        """Move the bar."""
        super().done(passes)
        self._bar.update(passes)

    def skip(self, passes: int) -> None:
        """Shorten the bar; a negative number makes it longer."""
        super().skip(passes)
        if self._bar.total is not None:
            self._bar.total -= passes
