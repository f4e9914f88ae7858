"""Admission: a request is taken if it can be answered in time, by the rate that the model measured."""

from __future__ import annotations

import math

from react_clip.serve.errors import busy
from react_clip.serve.settings import Settings

WAIT_FRACTION = 0.5
"""Most of the deadline that a request may be expected to take; the rest is for what the estimate does not know."""
BATCH_FRACTION = 0.25
"""Most of the deadline that one batch may take."""


def admit(new: int, waiting: int, seconds: float, settings: Settings, passed: float = 0.0, what: str = "work") -> None:
    """Raise 503 for a request that cannot be answered in time or finds no place.

    Its Retry-After is the time until it would be admitted, if nobody else came, and that of the longest batch.

    Args:
        new: places of the queue that the request takes: one an image, or 16 prompts.
        waiting: places that are taken. With none every request is admitted: nobody could be answered sooner.
        seconds: measured time of one place.
        settings: deadline and length of the queue.
        passed: time for which the model has worked on the places that are taken.
        what: what waits, for the error.

    >>> admit(1, 90, 0.1, Settings(deadline=20))
    >>> admit(8, 109, 0.1, Settings(deadline=20))
    Traceback (most recent call last):
    react_clip.serve.errors.RequestError: 503: the queue is full: about 11 s of work wait; try again in 7 s
    """
    ahead = max(0.0, waiting * seconds - passed)
    late = ahead + new * seconds - WAIT_FRACTION * settings.deadline
    excess = max(late, (waiting + new - settings.queue) * seconds)
    if waiting > 0 and excess > 0:
        # A batch more, because places become free by batches, and no rate is exact.
        batch = min(BATCH_FRACTION * settings.deadline, 64 * seconds)
        retry = max(1, math.ceil(min(excess + batch, ahead)))
        raise busy(f"the queue is full: about {ahead:.0f} s of {what} wait; try again in {retry} s", retry=retry)
