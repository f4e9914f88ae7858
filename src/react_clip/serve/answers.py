"""Inputs and outputs of the engine: a photo with its random key, and the answer for it, read from a row of numbers.

A row has everything about one image: a GPU copies all rows of a batch at once, and processes exchange them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from react_clip.defenses.base import MEASUREMENTS, diagnostics
from react_clip.defenses.second_look import BRANCHES, CORRECT

NUMBERS = ("branch", *MEASUREMENTS, "passes")
"""Numbers of one image beside its feature and its probabilities."""


@dataclass(frozen=True, eq=False)
class Photo:
    """One image for the engine: pixels ``[3, S, S]``, uint8 or floats in [0, 1], and the key of its noise stream."""

    pixels: Tensor
    key: int


@dataclass(frozen=True, eq=False)
class Answer:
    """Result for one image, on the CPU."""

    feature: Tensor
    """Defended unit feature ``[D]``."""
    probs: Tensor
    """Defended probabilities ``[K]``."""
    numbers: Sequence[float]
    """Values of :data:`NUMBERS`."""
    row: Tensor
    """All of them, one after the other."""

    @property
    def branch(self) -> str:
        """One of :data:`react_clip.defenses.second_look.BRANCHES`; ReACT has no ``blend``."""
        return BRANCHES[int(self.numbers[NUMBERS.index("branch")])]

    @property
    def passes(self) -> float:
        """Encoder passes."""
        return self.numbers[NUMBERS.index("passes")]

    @property
    def diagnostics(self) -> dict[str, Any]:
        """As :func:`react_clip.defenses.base.diagnostics` gives them."""
        columns = dict(zip(NUMBERS, torch.tensor(self.numbers)[:, None], strict=True))
        [values] = diagnostics(SimpleNamespace(**columns | {"gated": columns["gated"].bool()}))
        return values

    @property
    def suspicious(self) -> bool:
        """True if the image counts as attacked: its score reached the threshold."""
        return self.branch == BRANCHES[CORRECT]


def answers_of(rows: Tensor, dim: int, classes: Sequence[int]) -> list[Answer]:
    """Answers from rows as ``Engine._rows`` gives them; ``classes`` is the number of classes of each image."""
    numbers, most = rows[:, -len(NUMBERS) :].tolist(), rows.shape[1] - len(NUMBERS)
    answers = []
    for row, count, values in zip(rows.unbind(), classes, numbers, strict=True):
        end = dim + count
        # Other images of the batch may have more classes.
        own = row if end == most else torch.cat([row[:end], row[most:]])
        answers.append(Answer(own[:dim], own[dim:end], values, own))
    return answers
