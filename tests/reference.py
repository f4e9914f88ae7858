"""Algorithm 2 of the paper once more, for one image in float64 numpy: the second implementation that ours must match.

Nothing here comes from ``react_clip``; noise and the augmented view are handed in, and of the configuration ``c`` only
the constants are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def react(
    c: Any,
    encode: Callable[[Array], Array],
    classes: Array,
    image: Array,
    augmented: Array,
    probe_noise: tuple[Array, Array],
    anchor_noise: Sequence[Array],
    scale: Callable[[float], float],
) -> dict[str, Any]:
    """Fields of ``Defended``; ``classes`` are unit class features ``[K, D]``, ``scale`` maps the drift to sigma."""
    feature = unit(encode(image))
    low, high = (
        np.linalg.norm(unit(encode(image + sigma * noise)) - feature)
        for sigma, noise in zip((c.sigma_low, c.sigma_high), probe_noise, strict=True)
    )
    drift = (high - low) / low
    sigma = max(0.0, scale(drift))
    anchor = np.mean([unit(encode(image + sigma * noise)) for noise in anchor_noise], 0)
    instability = jensen_shannon(*(softmax(100 * classes @ f) for f in (feature, unit(encode(augmented)))))
    gated = drift + instability >= c.tau
    output = unit(feature + gated * c.alpha * (anchor - feature))
    values = {"features": output, "labels": np.argmax(classes @ output), "gated": gated, "sigma": sigma}
    return values | {"drift": drift, "instability": instability, "score": drift + instability}


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)


def softmax(logits: Any) -> Array:
    weights = np.exp(np.asarray(logits) - np.max(logits))
    return weights / weights.sum()


def jensen_shannon(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return float(sum(0.5 * x * np.log(x / m) for one in (p, q) for x, m in zip(one, middle, strict=True) if x > 0))
