"""ReACT and its rivals once more, for one image, in float64 numpy with gradients written out by hand.

Nothing here comes from ``react_clip``: the encoder, its transposed Jacobian and every random number are handed in, and
of a configuration ``c`` only the constants are read. Each function returns fields of ``Defended``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Objective = Callable[[Array], Array]
"""The gradient of some objective in the raw feature, at a raw feature."""


@dataclass
class Tower:
    """F, the product of its transposed Jacobian at an image with a vector, and unit class features ``[K, D]``."""

    encode: Callable[[Array], Array]
    pull_back: Callable[[Array, Array], Array]
    classes: Array

    def slope(self, image: Array, objective: Objective) -> Array:
        return self.pull_back(image, objective(self.encode(image)))

    def unit_feature(self, image: Array) -> Array:
        return unit(self.encode(image))


def unit(vector: Array) -> Array:
    return vector / np.linalg.norm(vector)


def project(image: Array, centre: Array, eps: float) -> Array:
    return np.clip(np.clip(image, centre - eps, centre + eps), 0.0, 1.0)


def uniform_start(image: Array, draw: Array, eps: float) -> Array:
    return project(image + eps * (2 * draw - 1), image, eps)


def step(image: Array, direction: Array, centre: Array, c: Any) -> Array:
    return project(image + c.step_size * np.sign(direction), centre, c.eps)


def away_from(anchor: Array) -> Objective:
    """|F - F0|^2"""
    return lambda feature: 2 * (feature - anchor)


def through_norm(on_unit: Array, feature: Array) -> Array:
    """The gradient in the feature from that in the unit feature."""
    direction = unit(feature)
    return (on_unit - (on_unit @ direction) * direction) / np.linalg.norm(feature)


def through_logits(classes: Array, on_logits: Callable[[Array], Array]) -> Objective:
    """An objective of the logits 100 cos(F, c), by the chain rule through the division by |F|."""

    def slope(feature: Array) -> Array:
        on_unit = 100 * on_logits(softmax(100 * classes @ unit(feature))) @ classes
        return through_norm(on_unit, feature)

    return slope


def softmax(logits: Any) -> Array:
    weights = np.exp(np.asarray(logits) - np.max(logits))
    return weights / weights.sum()


def jensen_shannon(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return float(sum(0.5 * x * np.log(x / m) for one in (p, q) for x, m in zip(one, middle, strict=True) if x > 0))


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def relative(feature: Array, anchor: Array) -> float:
    return float(np.linalg.norm(feature - anchor) / np.linalg.norm(anchor))


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


def ttc(tower: Tower, c: Any, image: Array, draw: Array) -> dict[str, Any]:
    anchor = tower.encode(image)
    iterates = [uniform_start(image, draw, c.eps)]
    rho = relative(tower.encode(iterates[0]), anchor)
    weights = np.exp(c.beta * np.arange(c.steps + 1))
    if rho < c.tau:
        for _ in range(c.steps):
            iterates.append(step(iterates[-1], tower.slope(iterates[-1], away_from(anchor)), image, c))
    mixture = weights[: len(iterates)] @ np.stack(iterates) / weights[: len(iterates)].sum()
    return {"features": tower.unit_feature(mixture), "score": rho, "gate_open": rho < c.tau}


def doc(tower: Tower, c: Any, image: Array, draw: Array, detours: Sequence[Array]) -> dict[str, Any]:
    """The public port, in its order of operations and with its 1e-8."""
    anchor = tower.encode(image)
    delta = uniform_start(image, draw, c.eps) - image
    deltas, momentum = [delta], np.zeros_like(image)
    for k in range(c.steps):
        feature = tower.encode(image + delta)
        if k == 0:
            diff_ratio = np.sqrt(((feature - anchor) ** 2).sum()) / np.sqrt((anchor**2).sum())
        grad = tower.slope(image + delta, away_from(anchor))
        grad = grad / (np.sqrt((grad**2).sum()) + 1e-8)
        orthogonal = detours[k] - (grad * detours[k]).sum() * grad
        orthogonal = orthogonal / (np.sqrt((orthogonal**2).sum()) + 1e-8)
        grad = grad + c.diversity * orthogonal
        momentum = grad if k == 0 else c.momentum * momentum + (1 - c.momentum) * grad
        delta = np.clip(delta + c.step_size * np.sign(momentum), -c.eps, c.eps)
        delta = np.clip(delta, 0 - image, 1 - image)
        deltas.append(delta)
    soft = np.exp(c.beta * np.arange(c.steps + 1))
    only_first = np.eye(c.steps + 1)[0]
    scheme = sigmoid((c.tau - diff_ratio) * c.gamma)
    weights = scheme * soft / soft.sum() + (1 - scheme) * only_first
    output = image + sum(weight * delta for weight, delta in zip(weights, deltas, strict=True))
    return {"features": tower.unit_feature(output), "score": diff_ratio}


def mac(tower: Tower, c: Any, views: Sequence[tuple[Array, Array, Array]]) -> dict[str, Any]:
    """``views`` are the image and its augmentations, each with its own augmentation and the draw of its start."""
    features, ratios = [], []
    for view, augmented, draw in views:
        anchor = tower.encode(view)
        ratios.append(float(np.linalg.norm(tower.encode(augmented) - anchor) / (np.linalg.norm(anchor) + 1e-10)))
        moved = uniform_start(view, draw, c.eps)
        for _ in range(c.steps):
            moved = step(moved, tower.slope(moved, away_from(anchor)), view, c)
        weight = sigmoid((ratios[-1] - c.tau) / c.temperature)
        features.append(tower.unit_feature(view + weight * (moved - view)))
    mean, score = np.mean(features, 0), max(ratios)
    return {"features": unit(mean), "logits": 100 * tower.classes @ mean, "score": score}


def anti_adv(tower: Tower, c: Any, image: Array) -> dict[str, Any]:
    label = np.argmax(tower.classes @ tower.encode(image))
    # CE = -log p_y, so dCE/dz = p - e_y.
    loss = through_logits(tower.classes, lambda p: p - np.eye(len(p))[label])
    moved = image
    for _ in range(c.steps):
        moved = moved - c.step_size * np.sign(tower.slope(moved, loss))
    return {"features": tower.unit_feature(moved)}


def hd(tower: Tower, c: Any, image: Array, draw: Array) -> dict[str, Any]:
    # d/dz of -sum_c log p_c is K p - 1.
    loss = through_logits(tower.classes, lambda p: len(p) * p - 1)
    moved = uniform_start(image, draw, c.eps)
    for _ in range(c.steps):
        moved = step(moved, tower.slope(moved, loss), image, c)
    return {"features": tower.unit_feature(moved)}


def tte(tower: Tower, c: Any, image: Array, origin: tuple[int, int]) -> dict[str, Any]:
    """The released code with its list of transforms, which all find the last crop; ``image`` is ``[3, S, S]``."""
    size = image.shape[-1]

    def crop(x: Array) -> Array:
        x = np.pad(x, ((0, 0), (c.padding, c.padding), (c.padding, c.padding)))
        return x[:, origin[0] : origin[0] + size, origin[1] : origin[1] + size]

    mirrored = image[:, :, ::-1]
    views = [image, mirrored, *[crop(image)] * c.crops, *[crop(mirrored)] * c.crops]
    features = [tower.unit_feature(view.ravel()) for view in views]
    logits = np.mean([100 * tower.classes @ feature for feature in features], 0)
    return {"features": unit(np.mean(features, 0)), "logits": logits, "passes": 4}


def low_pass(image: Array, radius: float) -> Array:
    """Channels of ``[3, S, S]`` times a centred Gaussian mask in the shifted spectrum."""
    frequency = np.arange(image.shape[-1]) - image.shape[-1] // 2
    mask = np.exp(-(frequency[:, None] ** 2 + frequency**2) / (2 * radius**2))
    spectra = [np.fft.fftshift(np.fft.fft2(channel)) * mask for channel in image]
    return np.clip([np.fft.ifft2(np.fft.ifftshift(spectrum)).real for spectrum in spectra], 0.0, 1.0)


def csr(tower: Tower, c: Any, image: Array) -> dict[str, Any]:
    """csr_fast.py for one flat image: detection, then PGD that skips the last backward pass and keeps the best."""
    plain = tower.unit_feature(image)
    smooth = tower.unit_feature(low_pass(image.reshape(3, 16, 16), c.radius).ravel())
    similarity = float(plain @ smooth)
    if similarity >= c.threshold:
        return {"features": plain, "score": similarity, "gate_open": False, "passes": 2, "backward_passes": 0}

    current, best, best_value = image.copy(), image.copy(), -np.inf
    for number in range(c.steps):
        feature = tower.unit_feature(current)
        value = float(feature @ smooth - feature @ plain)
        if value > best_value:
            best_value, best = value, current.copy()
        if number == c.steps - 1:
            break
        # The loss is <f, plain> - <f, smooth>.
        slope = tower.slope(current, lambda raw: through_norm(plain - smooth, raw))
        stepped = current - c.step_size * np.sign(slope)
        current = np.clip(image + np.clip(stepped - image, -c.eps, c.eps), 0.0, 1.0)
    counts = {"passes": 2 + c.steps, "backward_passes": c.steps - 1}
    return {"features": tower.unit_feature(best), "score": similarity, "gate_open": True, **counts}


def et3(tower: Tower, c: Any, image: Array) -> dict[str, Any]:
    # dE/dz of E = -logsumexp(z) is -softmax(z).
    energy = through_logits(tower.classes, lambda p: -p)
    moved = image.copy()
    for _ in range(c.steps):
        slope = tower.slope(moved, energy)
        moved = np.clip(moved - c.step_size * slope / max(np.linalg.norm(slope), 1e-8), 0.0, 1.0)
        moved = np.clip(image + np.clip(moved - image, -c.eps, c.eps), 0.0, 1.0)
    return {"features": tower.unit_feature(moved)}
