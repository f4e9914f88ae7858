"""The engine's findings as JSON values: no NaN, no more than the caller may know."""

from __future__ import annotations

import base64
import math
from typing import Any, Literal

from torch import Tensor

from react_clip.serve.classes import ClassList
from react_clip.serve.engine import Answer


def top(classes: ClassList, probs: Tensor, count: int) -> list[dict[str, Any]]:
    """The best names with their probabilities, best first."""
    values, indices = probs.topk(min(count, len(classes.names)))
    return [
        {"label": classes.names[index], "probability": value}
        for value, index in zip(values.tolist(), indices.tolist(), strict=True)
    ]


def diagnostics(answer: Answer) -> dict[str, Any]:
    """Why the defence did what it did; null where it was not measured."""
    numbers = {
        "r": answer.drift,
        "J": answer.instability,
        "score": answer.score,
        "sigma": answer.sigma,
        "drift_low": answer.drift_low,
        "drift_high": answer.drift_high,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {**finite, "gated": answer.gated, "passes": answer.passes}


def written(feature: Tensor, encoding: Literal["float", "base64"]) -> list[float] | str:
    """A feature as numbers, or as OpenAI writes them in base64: little-endian 32-bit floats.

    >>> written(torch.tensor([1.0, -0.5]), "float"), written(torch.tensor([1.0, -0.5]), "base64")
    ([1.0, -0.5], 'AACAPwAAAL8=')
    """
    if encoding == "float":
        values: list[float] = feature.tolist()
        return values
    return base64.b64encode(feature.numpy().astype("<f4").tobytes()).decode("ascii")
