"""The six rival defences once more, for one image, in plain float64 loops with gradients written out by hand.

Nothing here comes from ``react_clip``: the encoder and its transposed Jacobian are handed in, and so is every draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reference import Vector, add, distance, dot, softmax, unit

Objective = Callable[[Vector], Vector]
"""The gradient of some objective in the raw feature, at a raw feature."""


@dataclass
class Tower:
    """F and the product of its transposed Jacobian at an image with a vector."""

    encode: Callable[[Vector], Vector]
    pull_back: Callable[[Vector, Vector], Vector]

    def slope(self, image: Vector, objective: Objective) -> Vector:
        return self.pull_back(image, objective(self.encode(image)))


def sign(value: float) -> float:
    return float((value > 0) - (value < 0))


def project(image: Vector, centre: Vector, eps: float) -> Vector:
    return [min(max(v, c - eps, 0.0), c + eps, 1.0) for v, c in zip(image, centre, strict=True)]


def uniform_start(image: Vector, draw: Vector, eps: float) -> Vector:
    return project([x + eps * (2 * u - 1) for x, u in zip(image, draw, strict=True)], image, eps)


def step(image: Vector, direction: Vector, centre: Vector, eps: float, size: float) -> Vector:
    return project([x + size * sign(d) for x, d in zip(image, direction, strict=True)], centre, eps)


def away_from(anchor: Vector) -> Objective:
    """|F - F0|^2"""
    return lambda feature: [2 * (f - a) for f, a in zip(feature, anchor, strict=True)]


def through_logits(class_features: Sequence[Vector], on_logits: Callable[[Vector], Vector]) -> Objective:
    """An objective of the logits 100 cos(F, c), by the chain rule through the division by |F|."""

    def slope(feature: Vector) -> Vector:
        direction, length = unit(feature), math.sqrt(dot(feature, feature))
        weights = on_logits(softmax([100.0 * dot(direction, c) for c in class_features]))
        on_unit = [
            100.0 * sum(w * c[d] for w, c in zip(weights, class_features, strict=True)) for d in range(len(feature))
        ]
        along = dot(on_unit, direction)
        return [(g - along * u) / length for g, u in zip(on_unit, direction, strict=True)]

    return slope


def blend(one: Vector, other: Vector, weight: float) -> Vector:
    return [(1 - weight) * a + weight * b for a, b in zip(one, other, strict=True)]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > 0 else math.exp(value) / (1 + math.exp(value))


def relative(feature: Vector, anchor: Vector) -> float:
    return distance(feature, anchor) / math.sqrt(dot(anchor, anchor))


def ttc(
    tower: Tower, image: Vector, draw: Vector, *, eps: float, steps: int, size: float, tau: float, beta: float
) -> tuple[Vector, float]:
    anchor = tower.encode(image)
    iterates = [uniform_start(image, draw, eps)]
    rho = relative(tower.encode(iterates[0]), anchor)
    if not rho < tau:
        return unit(tower.encode(iterates[0])), rho
    for _ in range(steps):
        slope = tower.slope(iterates[-1], away_from(anchor))
        iterates.append(step(iterates[-1], slope, image, eps, size))
    total = sum(math.exp(beta * i) for i in range(steps + 1))
    delta = [
        sum(math.exp(beta * i) / total * (iterate[p] - image[p]) for i, iterate in enumerate(iterates))
        for p in range(len(image))
    ]
    return unit(tower.encode(add(image, delta, 1.0))), rho


def doc(
    tower: Tower,
    image: Vector,
    draw: Vector,
    probes: Sequence[Vector],
    detours: Sequence[Vector],
    *,
    eps: float,
    size: float,
    diversity: float,
    momentum: float,
    tau: float,
    gamma: float,
) -> tuple[Vector, float]:
    anchor = tower.encode(image)
    cosines = [
        dot(
            unit(anchor),
            unit(tower.encode(project([x + eps * sign(n) for x, n in zip(image, noise, strict=True)], image, eps))),
        )
        for noise in probes
    ]
    shift = 1 - sum(cosines) / len(cosines)
    start = moved = uniform_start(image, draw, eps)
    velocity = [0.0] * len(image)
    for noise in detours:
        feature = tower.encode(moved)
        # The gradient of the distance itself, not of its square.
        towards = [(f - a) / distance(feature, anchor) for f, a in zip(feature, anchor, strict=True)]
        slope = unit(tower.pull_back(moved, towards))
        along = dot(noise, slope)
        orthogonal = unit([n - along * s for n, s in zip(noise, slope, strict=True)])
        velocity = [momentum * v + s + diversity * o for v, s, o in zip(velocity, slope, orthogonal, strict=True)]
        moved = step(moved, velocity, image, eps, size)
    return unit(tower.encode(blend(start, moved, sigmoid(gamma * (tau - shift))))), shift


def mac_view(
    tower: Tower,
    view: Vector,
    augmented: Vector,
    draw: Vector,
    *,
    eps: float,
    steps: int,
    size: float,
    tau: float,
    temperature: float,
) -> tuple[Vector, float]:
    anchor = tower.encode(view)
    ratio = relative(tower.encode(augmented), anchor)
    moved = uniform_start(view, draw, eps)
    for _ in range(steps):
        moved = step(moved, tower.slope(moved, away_from(anchor)), view, eps, size)
    return unit(tower.encode(blend(view, moved, sigmoid((ratio - tau) / temperature)))), ratio


def anti_adv(tower: Tower, class_features: Sequence[Vector], image: Vector, *, steps: int, size: float) -> Vector:
    scores = [dot(tower.encode(image), c) for c in class_features]
    label = scores.index(max(scores))
    # CE = -log p_y, so dCE/dz = p - e_y.
    loss = through_logits(class_features, lambda p: [p_c - (c == label) for c, p_c in enumerate(p)])
    moved = image
    for _ in range(steps):
        slope = tower.slope(moved, loss)
        moved = [min(max(x - size * sign(s), 0.0), 1.0) for x, s in zip(moved, slope, strict=True)]
    return unit(tower.encode(moved))


def hd(
    tower: Tower, class_features: Sequence[Vector], image: Vector, draw: Vector, *, eps: float, steps: int, size: float
) -> Vector:
    # d/dz of -sum_c log p_c is K p - 1.
    loss = through_logits(class_features, lambda p: [len(p) * p_c - 1 for p_c in p])
    moved = uniform_start(image, draw, eps)
    for _ in range(steps):
        moved = step(moved, tower.slope(moved, loss), image, eps, size)
    return unit(tower.encode(moved))


def tte(
    tower: Tower,
    class_features: Sequence[Vector],
    image: Vector,
    corners: Sequence[tuple[int, int]],
    *,
    size: int,
    margin: int,
) -> tuple[Vector, Vector]:
    """Logits and feature; ``image`` is 3 x size x size, flat, and corners are those of the random crops."""

    def pixel(channel: int, row: int, column: int) -> float:
        inside = 0 <= row < size and 0 <= column < size
        return image[(channel * size + row) * size + column] if inside else 0.0

    views = []
    for top, left in [(margin, margin), *corners]:
        for mirrored in (False, True):
            view = []
            for channel in range(3):
                for row in range(size):
                    for column in range(size):
                        across = size - 1 - column if mirrored else column
                        view.append(pixel(channel, row + top - margin, across + left - margin))
            views.append(unit(tower.encode(view)))
    mean = [sum(view[d] for view in views) / len(views) for d in range(len(views[0]))]
    logits = [sum(100.0 * dot(view, c) for view in views) / len(views) for c in class_features]
    return logits, unit(mean)
