"""Algorithm 2 of the paper once more, in plain float64 loops: the second implementation that the first must match.

Nothing here comes from ``react_clip``; noise and the augmented view are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Vector = list[float]


@dataclass
class Answer:
    feature: Vector
    label: int
    drift: float
    instability: float
    score: float
    gated: bool
    sigma: float


def react(
    encode: Callable[[Vector], Vector],
    class_features: Sequence[Vector],
    image: Vector,
    low_noise: Vector,
    high_noise: Vector,
    augmented: Vector,
    anchor_noise: Sequence[Vector],
    *,
    sigma_low: float,
    sigma_high: float,
    scale: Callable[[float], float],
    alpha: float,
    tau: float,
) -> Answer:
    feature = unit(encode(image))
    drift_low = distance(unit(encode(add(image, low_noise, sigma_low))), feature)
    drift_high = distance(unit(encode(add(image, high_noise, sigma_high))), feature)
    drift = (drift_high - drift_low) / drift_low
    sigma = max(0.0, scale(drift))
    views = [unit(encode(add(image, noise, sigma))) for noise in anchor_noise]
    anchor = [sum(view[d] for view in views) / len(views) for d in range(len(feature))]
    plain = softmax([100.0 * dot(feature, c) for c in class_features])
    moved = softmax([100.0 * dot(unit(encode(augmented)), c) for c in class_features])
    instability = jensen_shannon(plain, moved)
    score = drift + instability
    gated = score >= tau
    output = [f + (alpha * (a - f) if gated else 0.0) for f, a in zip(feature, anchor, strict=True)]
    output = unit(output)
    cosines = [dot(output, c) for c in class_features]
    return Answer(output, cosines.index(max(cosines)), drift, instability, score, gated, sigma)


def add(image: Vector, noise: Vector, sigma: float) -> Vector:
    return [x + sigma * n for x, n in zip(image, noise, strict=True)]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(vector: Vector) -> Vector:
    length = math.sqrt(dot(vector, vector))
    return [x / length for x in vector]


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def softmax(logits: Vector) -> Vector:
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def jensen_shannon(p: Vector, q: Vector) -> float:
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return 0.5 * _kl(p, middle) + 0.5 * _kl(q, middle)


def _kl(p: Vector, q: Vector) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
