"""Small trained classifiers that all attack tests share: their robust accuracy falls from 0.99 to 0.02 by 12/255."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threads import one_thread

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


class CountCalls:
    """A model that counts the images it is shown."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.images = net, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.images += len(x)
        return self.net(x)


class Record:
    """A model that remembers every image it is shown."""

    def __init__(self, net: Callable[[Tensor], Tensor]) -> None:
        self.net, self.seen = net, list[Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return self.net(x)


def one_by_one(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same model without batched arithmetic: its answer on an image is one and the same number in any batch."""
    return lambda x: torch.cat([net(image[None]) for image in x])


def in_double(net: nn.Module) -> Callable[[Tensor], Tensor]:
    copy = build(net[-1].out_features)
    copy.load_state_dict(net.state_dict())
    copy = copy.double().eval().requires_grad_(False)
    return lambda x: copy(x.double())


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
    """Two smooth prototypes a class, under noise as strong as they are."""
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
    with one_thread():
        for _ in range(300):
            rows = torch.randint(1800, (128,), generator=generator)
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    optimiser.zero_grad()
    task = Task(net.eval().requires_grad_(False), x[1800:], y[1800:])
    assert (task.net(task.x).argmax(1) == task.y).float().mean() > 0.95, "the test classifier did not learn"
    return task


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def task() -> Task:
    return train(5)


@pytest.fixture(scope="session")
def task_of() -> Callable[[int], Task]:
    return train
