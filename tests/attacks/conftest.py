"""Small trained classifiers that the attack tests share; their robust accuracy falls from 0.99 to 0.02 by 12/255."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from react_clip import linf
from react_clip.attacks.losses import margin
from react_clip.attacks.problem import Problem, budgets
from toys import toy_classifier, toy_images

SIZE = 8


@dataclass(frozen=True)
class Task:
    net: nn.Module
    x: Tensor
    y: Tensor

    def head(self, count: int) -> tuple[Tensor, Tensor]:
        """The first images that the net gets right."""
        right = (self.net(self.x).argmax(1) == self.y).nonzero().squeeze(1)[:count]
        return self.x[right], self.y[right]

    def clear_cut(self, count: int) -> tuple[Tensor, Tensor]:
        """Images of which every attack at 8/255 breaks the first half and none the second, whatever the CPU rounds.

        The first lie between images of two classes, 0.3 logits from the boundary; PGD gains 4 and more. The others
        have the largest margins of 200 images, 12 logits and more, of which the strongest attack leaves 3.
        """
        x, y = self.head(len(self.x))
        x, y = (values[margin(self.net(x), y).argsort()] for values in (x, y))
        other = torch.stack([x[y != label][0] for label in y[:count]])
        share, step = torch.zeros(count, 1, 1, 1), 0.5
        for _ in range(20):
            further = (1 - share - step) * x[:count] + (share + step) * other
            share = share + step * (margin(self.net(further), y[:count]) < -0.3)[:, None, None, None]
            step /= 2
        return torch.cat([(1 - share) * x[:count] + share * other, x[:count]]), torch.cat([y[:count], y[:count]])


class Record:
    """A model that remembers every image it is shown."""

    def __init__(self, net: Callable[[Tensor], Tensor]) -> None:
        self.net, self.seen = net, list[Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.net(x)

    @property
    def images(self) -> int:
        return sum(map(len, self.seen))


def one_by_one(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same model without batched arithmetic: bit for bit the same answer on an image in any batch."""
    return lambda x: torch.cat([net(image[None]) for image in x])


def problem_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, eps: float) -> Problem:
    rows = torch.arange(len(x))
    return Problem(
        model,
        linf.Ball(x, budgets(eps, x)),
        y,
        rows,
        rows,
        None,
        torch.zeros(2, len(x)),
        torch.full((len(x),), torch.nan),
    )


def sign_steps(
    objective: Callable[[Tensor], Tensor], x: Tensor, start: Tensor, eps: float, step: float, steps: int
) -> Tensor:
    """Sign ascent inside an L-infinity ball, written once more without any of the room's parts."""
    for _ in range(steps):
        pixels = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(objective(pixels).sum(), pixels)
        start = (x + (start + step * slope.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    return start


def build(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * (SIZE // 2) ** 2, classes),
    )


def _images(classes: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two smooth prototypes per class, under noise as strong as they are."""
    coarse = torch.randn(2 * classes, 3, 4, 4, generator=generator)
    prototypes = F.interpolate(coarse, size=SIZE, mode="bilinear")
    y = torch.randint(classes, (count,), generator=generator)
    which = y + classes * torch.randint(2, (count,), generator=generator)
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return (0.5 + 0.12 * prototypes[which] + 0.12 * noise).clamp(0, 1), y


@functools.cache
def train(classes: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    x, y = _images(classes, 2000, generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build(classes)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(300):
        rows = torch.randint(1800, (128,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
    optimiser.zero_grad()
    task = Task(net.eval().requires_grad_(False), x[1800:], y[1800:])
    assert (task.net(task.x).argmax(1) == task.y).float().mean() > 0.95, "the test classifier did not learn"
    return task


@pytest.fixture(scope="session")
def task() -> Task:
    return train(5)


@pytest.fixture(scope="session")
def toy() -> tuple[Any, Tensor, Tensor]:
    """A tiny zero-shot classifier, images, and its answers on them as labels."""
    clf, x = toy_classifier(), toy_images(5)
    return clf, x, clf(x).argmax(1)
