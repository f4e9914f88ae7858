"""Admission: an admitted request is done in time, a refused one is told when it would be admitted."""

from __future__ import annotations

from itertools import product

import pytest

from react_clip.serve.client import BATCH_FRACTION, WAIT_FRACTION, admit
from react_clip.serve.errors import RequestError
from react_clip.serve.settings import Settings

SETTINGS = Settings(deadline=20.0, queue=256)


def wait_of(*numbers: float, passed: float = 0.0) -> int | None:
    """Retry-After of a refusal, or None."""
    try:
        admit(*numbers, SETTINGS, passed=passed)  # type: ignore[arg-type]
    except RequestError as error:
        return int((error.headers or {})["retry-after"])
    return None


@pytest.mark.parametrize("passed", [0.0, 2.5])
def test_admitted_is_in_time_and_refused_would_be_admitted_after_its_wait(passed: float) -> None:
    admitted = 0
    for new, waiting, seconds in product((1, 5, 16), (1, 10, 30, 100, 160, 240), (0.001, 0.03, 0.1, 0.43, 2.0)):
        done = max(0.0, waiting * seconds - passed) + new * seconds
        wait = wait_of(new, waiting, seconds, passed=passed)
        if wait is None:
            admitted += 1
            assert done <= WAIT_FRACTION * SETTINGS.deadline
            continue
        assert done > WAIT_FRACTION * SETTINGS.deadline
        left = max(0.0, waiting * seconds - passed - wait)
        assert left == 0 or wait_of(new, waiting, seconds, passed=passed + wait) is None
        batch = int(BATCH_FRACTION * SETTINGS.deadline)
        if wait > batch + 1:
            sooner = wait_of(new, waiting, seconds, passed=passed + wait - batch - 1)
            assert sooner is not None, "and not long before"
    assert 30 < admitted < 75


def test_places_are_bounded_where_the_model_is_fast() -> None:
    assert wait_of(16, 240, 0.001) is None
    assert wait_of(16, 241, 0.001) == 1
    assert wait_of(16, 256, 0.003) == 1
    assert wait_of(16, 256, 0.03) == 3


def test_nobody_waits_so_everybody_is_admitted() -> None:
    """Else a rate that was measured while another program had the cores would refuse all for ever."""
    assert wait_of(16, 0, 30.0) is None
    assert wait_of(1, 1, 30.0) == 30
