from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.attacks import CW, PGD, from_dict
from react_clip.attacks.losses import margin

from .conftest import Task


def plain_pgd(net: torch.nn.Module, x: Tensor, y: Tensor, eps: float, step: float, loss: str) -> Tensor:
    """The protocol, written once more without any of the room's parts; only the random start is shared."""
    draw = noise.uniform(noise.stream_keys(x, 7), x[0].numel()).reshape(x.shape)
    x_adv = (x + eps * (2 * draw - 1)).clamp(0, 1)
    for _ in range(10):
        x_adv = x_adv.detach().requires_grad_()
        logits = net(x_adv)
        if loss == "ce":
            total = F.cross_entropy(logits, y, reduction="sum")
        else:
            others = logits - 1e9 * F.one_hot(y, logits.shape[1])
            total = (others.max(1).values - logits[torch.arange(len(y)), y]).sum()
        total.backward()
        assert x_adv.grad is not None
        delta = (x_adv.detach() + step * x_adv.grad.sign() - x).clamp(-eps, eps)
        x_adv = (x + delta).clamp(0, 1)
    return x_adv


@pytest.mark.parametrize("loss", ["ce", "margin"])
@pytest.mark.parametrize(("step_size", "step"), [(1 / 255, 1 / 255), ("eps/4", 2 / 255)])
def test_matches_a_plain_loop(task: Task, loss: str, step_size: float, step: float) -> None:
    x, y = task.x[:50], task.y[:50]
    ours = PGD(eps=8 / 255, steps=10, step_size=step_size, loss=loss)(task.net, x, y, seed=7)  # type: ignore[arg-type]
    theirs = plain_pgd(task.net, x, y, 8 / 255, step, loss)
    # The bounds round differently by an ulp, which may flip the sign of a gradient that is nearly 0: a stray pixel.
    assert ((ours.images - theirs).abs() < 1e-6).float().mean() > 0.999


def test_cw_is_pgd_on_the_margin(task: Task) -> None:
    x, y = task.x[:8], task.y[:8]
    cw, pgd = CW(steps=10)(task.net, x, y), PGD(steps=10, loss="margin")(task.net, x, y)
    assert torch.equal(cw.images, pgd.images)
    torch.testing.assert_close(cw.loss, margin(task.net(cw.images), y))
    assert from_dict({"kind": "cw", "steps": 10}) == CW(steps=10)


def test_a_linear_model_ends_in_the_worst_corner() -> None:
    weight = torch.randn(2, 27, generator=torch.Generator().manual_seed(0))
    x, y = torch.full((1, 3, 3, 3), 0.5), torch.tensor([0])
    result = PGD(eps=4 / 255, steps=10)(lambda x: x.flatten(1) @ weight.T, x, y)
    corner = x + 4 / 255 * (weight[1] - weight[0]).sign().reshape(x.shape)
    torch.testing.assert_close(result.images, corner)


def test_random_start_is_uniform_in_the_ball() -> None:
    x, y = torch.full((1, 3, 64, 64), 0.5), torch.tensor([0])
    seen: list[Tensor] = []
    PGD(eps=0.25, steps=1)(lambda images: (seen.append(images.detach()), images.flatten(1)[:, :2])[1], x, y)
    unit = ((seen[0] - 0.25) / 0.5).flatten().sort().values
    # Kolmogorov-Smirnov: with n = 12288 the largest gap exceeds 1.95 / sqrt(n) once in a thousand fair draws.
    gap = (unit - (torch.arange(len(unit)) + 0.5) / len(unit)).abs().max()
    assert gap < 1.95 / len(unit) ** 0.5
    PGD(eps=0.25, steps=1, random_start=False)(lambda i: (seen.append(i.detach()), i.flatten(1)[:, :2])[1], x, y)
    assert torch.equal(seen[2], x)


def test_the_summed_loss_survives_half_precision_in_a_large_batch() -> None:
    """Gradients here are 5e-7: a number in fp16. Divided by 256 images they would be 0, and nothing would move."""
    x, y = torch.full((256, 3, 2, 2), 0.5), torch.zeros(256, dtype=torch.long)
    tiny = torch.tensor(1e-6, dtype=torch.float16)

    def model(x: Tensor) -> Tensor:
        first = (x.half() * tiny).flatten(1).sum(1)
        return torch.stack([first, torch.zeros_like(first)], 1)

    result = PGD(eps=4 / 255, steps=10)(model, x, y)
    torch.testing.assert_close(result.images, x - 4 / 255)
