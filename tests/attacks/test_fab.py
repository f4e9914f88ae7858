from __future__ import annotations

import numpy as np
import pytest
import torch

from react_clip.attacks import FAB
from react_clip.attacks.fab import onto_plane

from .conftest import Record

linprog = pytest.importorskip("scipy.optimize").linprog


@pytest.mark.parametrize("seed", range(40))
def test_onto_plane_is_the_optimum_of_the_linear_program(seed: int) -> None:
    """min s subject to |d_i| <= s, 0 <= x + d <= 1, w.d = -h, solved by a general solver."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    x, w = rng.random(size), rng.normal(size=size) * (rng.random(size) < 0.8)
    x[rng.random(size) < 0.2] = rng.integers(2)
    h = rng.normal() * rng.choice([0.01, 0.3, 3.0])
    shape = (1, 1, 1, size)
    d = onto_plane(*(torch.tensor(v, dtype=torch.float64).reshape(shape) for v in (x, w)), torch.tensor([h]))
    move = d.flatten().numpy()
    assert ((x + move >= -1e-9) & (x + move <= 1 + 1e-9)).all()

    ones = np.ones((size, 1))
    bounds = [(-a, 1 - a) for a in x] + [(0, None)]
    within = np.block([[np.eye(size), -ones], [-np.eye(size), -ones]])
    best = linprog(
        np.r_[np.zeros(size), 1], within, np.zeros(2 * size), np.r_[w, 0][None], [-h], bounds=bounds, method="highs"
    )
    if best.success:
        assert w @ move == pytest.approx(-h, abs=1e-6)
        assert np.abs(move).max() == pytest.approx(best.fun, abs=1e-6)
    else:  # the plane is out of reach: every pixel that counts goes to its end
        reach = np.where(-w * np.sign(h) > 0, 1 - x, -x) * (w != 0)
        assert move == pytest.approx(reach, abs=1e-9)


def test_finds_the_exact_distance_of_a_linear_model() -> None:
    """Dual norm: the L-inf distance to the plane is |z_y - z_t| / sum |w_y - w_t|, away from the image's limits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 48, generator=generator)
    x = 0.4 + 0.2 * torch.rand(20, 3, 4, 4, generator=generator)
    logits = x.flatten(1) @ weight.T
    y = logits.argmax(1)
    result = FAB(eps=0.3, steps=20)(lambda x: x.flatten(1) @ weight.T, x, y)
    distance = (logits[:, 0] - logits[:, 1]).abs() / (weight[0] - weight[1]).abs().sum()
    assert result.success.all()
    torch.testing.assert_close((result.images - x).abs().amax((1, 2, 3)), distance, rtol=0.06, atol=0)


def test_steps_follow_the_formula() -> None:
    """On a curved boundary, so that the pull towards the original is sometimes capped and sometimes not."""
    generator = torch.Generator().manual_seed(2)
    weight = 3 * torch.randn(3, 12, generator=generator, dtype=torch.float64)
    pulls, breaks = [], []

    def wavy(x: torch.Tensor) -> torch.Tensor:
        return (x.double().flatten(1) @ weight.T).sin()

    for x in torch.rand(8, 1, 3, 2, 2, generator=generator):
        y, target = wavy(x).topk(2).indices.T
        record = Record(wavy)
        FAB(eps=1.0, steps=8, targets=1)(record, x, y)
        # Between the clean pass and the two last ones: the point of the gradient and the point reached, in turn.
        points, reached = record.seen[1:-2:2], record.seen[2:-2:2]
        assert torch.equal(points[0], x)
        for point, after in zip(points, reached, strict=True):
            pixels = point.clone().requires_grad_()
            gap = (wavy(pixels)[0, target] - wavy(pixels)[0, y]).float()
            normal = torch.autograd.grad(gap.sum(), pixels)[0]
            d_k = onto_plane(point, normal, gap.detach())
            d_0 = onto_plane(x, normal, gap.detach() + (normal * (x - point)).sum())
            pull = min((d_k.abs().max() / (d_k.abs().max() + d_0.abs().max())).item(), 0.1)
            expected = (1 - pull) * (point + 1.05 * d_k) + pull * (x + 1.05 * d_0)
            torch.testing.assert_close(after, expected.clamp(0, 1), rtol=0, atol=1e-5)
            # At the first step both moves are one, whatever the pull.
            pulls += [pull] if point is not points[0] else []
        for after, following in zip(reached, points[1:], strict=False):
            breaks.append(bool(wavy(after).argmax(1) != y))
            torch.testing.assert_close(following, x + 0.9 * (after - x) if breaks[-1] else after, rtol=0, atol=1e-6)
    assert min(pulls) < 0.1
    assert pulls.count(0.1) >= 2
    assert {True, False} == set(breaks)
