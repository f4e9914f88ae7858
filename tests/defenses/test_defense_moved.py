"""CSR and ET3, which move pixels: equal to plain loops after their released code, and gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from react_clip.defenses import CSR, ET3
from react_clip.defenses.counterattack import Counterattack
from react_clip.defenses.csr import low_pass
from toys import toy_classifier, toy_images

from . import literal, watching
from .literal import Array, Tower, unit
from .watching import F64, inside, literal_tower

GUARDS: list[Counterattack] = [CSR(threshold=1.0), ET3()]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


def literal_low_pass(image: Array, radius: float) -> Array:
    """Channels of ``[3, S, S]`` times a centred Gaussian mask in the shifted spectrum."""
    side = image.shape[-1]
    mask = np.empty((side, side))
    for row in range(side):
        for column in range(side):
            square = (row - side // 2) ** 2 + (column - side // 2) ** 2
            mask[row, column] = np.exp(-square / (2 * radius**2))
    channels = []
    for channel in image:
        spectrum = np.fft.fftshift(np.fft.fft2(channel)) * mask
        channels.append(np.fft.ifft2(np.fft.ifftshift(spectrum)).real)
    return np.clip(np.stack(channels), 0.0, 1.0)


def literal_csr(tower: Tower, c: CSR, image: Array) -> dict[str, Any]:
    """csr_fast.py for one flat image: detection, then PGD that skips the last backward pass and keeps the best."""
    plain = tower.unit_feature(image)
    smooth = tower.unit_feature(literal_low_pass(image.reshape(3, 16, 16), c.radius).ravel())
    similarity = float(plain @ smooth)
    if similarity >= c.threshold:
        return {"features": plain, "score": similarity, "gated": False, "passes": 2, "backward_passes": 0}

    def loss_slope(raw: Array) -> Array:
        towards = plain - smooth  # of the loss <f, plain> - <f, smooth>
        direction = unit(raw)
        return (towards - (towards @ direction) * direction) / np.linalg.norm(raw)

    current, best, best_value = image.copy(), image.copy(), -np.inf
    for number in range(c.steps):
        feature = tower.unit_feature(current)
        value = float(feature @ smooth - feature @ plain)
        if value > best_value:
            best_value, best = value, current.copy()
        if number == c.steps - 1:
            break
        stepped = current - c.step_size * np.sign(tower.slope(current, loss_slope))
        current = np.clip(image + np.clip(stepped - image, -c.eps, c.eps), 0.0, 1.0)
    counts = {"passes": 2 + c.steps, "backward_passes": c.steps - 1}
    return {"features": tower.unit_feature(best), "score": similarity, "gated": True, **counts}


def literal_et3(tower: Tower, c: ET3, image: Array) -> dict[str, Any]:
    # dE/dz of E = -logsumexp(z) is -softmax(z).
    energy = literal.through_logits(tower.classes, lambda p: -p)
    moved = image.copy()
    for _ in range(c.steps):
        slope = tower.slope(moved, energy)
        moved = np.clip(moved - c.step_size * slope / max(np.linalg.norm(slope), 1e-8), 0.0, 1.0)
        moved = np.clip(image + np.clip(moved - image, -c.eps, c.eps), 0.0, 1.0)
    return {"features": tower.unit_feature(moved)}


@pytest.mark.parametrize(
    "guard",
    [
        *[CSR(radius=3.0, steps=steps) for steps in (1, 2, 3, 4)],
        CSR(radius=3.0, eps=0.1, step_size=0.15, steps=5),
        ET3(),
        ET3(steps=5, eps=0.2, step_size=1.0),
        ET3(steps=1, eps=1.0, step_size=0.5),
    ],
    ids=str,
)
def test_it_equals_plain_loops(guard: Any) -> None:
    clf, images = toy_classifier(F64), toy_images(6, dtype=F64)
    tower = literal_tower(clf)
    if isinstance(guard, CSR):
        # Between the images, so that both sides of the gate are tried.
        guard = guard.replace(threshold=float(guard(clf, images).score.median()) + 1e-6)
    out = guard(clf, images)
    assert not isinstance(guard, CSR) or 0 < out.gated.sum() < 6
    for i, image in enumerate(images):
        loops = literal_csr if isinstance(guard, CSR) else literal_et3
        for name, expected in loops(tower, guard, image.flatten().numpy()).items():
            assert getattr(out, name)[i].tolist() == pytest.approx(expected, abs=1e-8), name


def test_csr_keeps_an_earlier_iterate_where_a_later_one_is_worse() -> None:
    """With steps far too long some last iterates are worse; the answers of more steps are never worse."""
    clf, images = toy_classifier(F64), toy_images(40, dtype=F64)
    guard = CSR(radius=3.0, threshold=1.0, eps=1.0, step_size=0.7)
    plain, smooth = clf.encoder(images), clf.encoder(low_pass(images, 3.0))
    values = [(guard.replace(steps=n)(clf, images).features * (smooth - plain)).sum(1) for n in (1, 2, 3)]
    assert (values[1] >= values[0] - 1e-12).all()
    assert (values[2] >= values[1] - 1e-12).all()
    assert ((values[2] - values[1]).abs() < 1e-12).any(), "some image must keep its second iterate"


@pytest.mark.parametrize("side", [15, 16])
def test_the_low_pass_filter_equals_the_centred_mask_at_even_and_odd_sizes(side: int) -> None:
    image = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=F64)
    for filtered, original in zip(low_pass(image, 2.5), image, strict=True):
        assert np.allclose(filtered.numpy(), literal_low_pass(original.numpy(), 2.5), atol=1e-12)


def test_the_gate_of_csr_is_open_below_the_threshold_and_closed_at_it() -> None:
    clf, images = toy_classifier(F64), toy_images(5, dtype=F64)
    score = CSR(radius=3.0)(clf, images).score
    for value in score:
        assert torch.equal(CSR(radius=3.0, threshold=float(value))(clf, images).gated, score < value)


# ---------------------------------------------------------------------- both


@every_guard
def test_encoded_pixels_stay_in_range_and_the_moved_ones_in_the_ball(guard: Any) -> None:
    clf, encoder = watching.watched_classifier()
    x = toy_images(4).round(decimals=1)
    guard(clf, x)
    assert all(pixels.min() >= 0 and pixels.max() <= 1 for pixels in encoder.seen)
    # The second batch of CSR is the low-pass copy.
    moved = encoder.seen[2:] if isinstance(guard, CSR) else encoder.seen
    assert all(inside(pixels, x, guard.eps) for pixels in moved)
