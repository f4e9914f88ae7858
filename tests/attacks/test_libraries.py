"""Agreement with torchattacks, foolbox and ART; run by test_examples_others.py in an environment that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip.attacks import DIFGSM, L2PGD, PGD

from .conftest import Task
from .test_agreement import assert_agree

pytestmark = pytest.mark.others
torchattacks = pytest.importorskip("torchattacks")
foolbox = pytest.importorskip("foolbox")
evasion = pytest.importorskip("art.attacks.evasion")
estimators = pytest.importorskip("art.estimators.classification")

EPS, STEPS = 4 / 255, 10
THEIRS = {"eps": EPS, "alpha": EPS / 4, "steps": STEPS}
OURS: dict[str, Any] = {"eps": EPS, "step_size": EPS / 4, "steps": STEPS}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        np.random.seed(0)
        yield


def found_by_art(net: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss, shape = torch.nn.CrossEntropyLoss(), tuple(x.shape[1:])
    wrapped = estimators.PyTorchClassifier(net, loss, shape, 5, clip_values=(0, 1), device_type="cpu")
    options = {"eps": EPS, "eps_step": EPS / 4, "max_iter": STEPS, "num_random_init": 1, "verbose": False}
    attack = evasion.ProjectedGradientDescentPyTorch(wrapped, batch_size=len(x), **options)
    return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PGD(eps=EPS, steps=STEPS, step_size="eps/4"), lambda net, x, y: torchattacks.PGD(net, **THEIRS)(x, y)),
        (
            PGD(eps=EPS, steps=STEPS, step_size="eps/4"),
            lambda net, x, y: foolbox.attacks.LinfPGD(abs_stepsize=EPS / 4, steps=STEPS)(
                foolbox.PyTorchModel(net, bounds=(0, 1)), x, y, epsilons=EPS
            )[1],
        ),
        (PGD(eps=EPS, steps=STEPS, step_size="eps/4"), found_by_art),
        (
            DIFGSM(**OURS, smallest=0.7),
            lambda net, x, y: torchattacks.DIFGSM(net, decay=1.0, resize_rate=0.7, diversity_prob=1.0, **THEIRS)(x, y),
        ),
        (
            L2PGD(eps=0.3, steps=STEPS),
            lambda net, x, y: foolbox.attacks.L2PGD(abs_stepsize=0.075, steps=STEPS)(
                foolbox.PyTorchModel(net, bounds=(0, 1)), x, y, epsilons=0.3
            )[1],
        ),
    ],
    ids=["PGD torchattacks", "PGD foolbox", "PGD ART", "DI torchattacks", "L2PGD foolbox"],
)
def test_random_attacks_break_as_many_images(ours: Any, theirs: Callable[..., Tensor], task: Task) -> None:
    x, y = task.x[:150], task.y[:150]
    found = theirs(task.net, x, y)
    # Theirs draws one place for the whole batch, so more images may be decided otherwise.
    discordant = 0.15 if isinstance(ours, DIFGSM) else 0.06
    assert_agree(ours(task.net, x, y).crafted, task.net(found).argmax(1) != y, discordant)


@pytest.mark.parametrize(
    "guard", [rc.SecondLook(), rc.ReACT(tau=None, views=3), rc.defenses.AOM()], ids=lambda g: g.name
)
def test_a_defended_module_serves_any_library(guard: Any, toy: Any) -> None:
    """Gradients flow, an image has the same answer in any batch, and the seed decides about the noise."""
    clf, x, y = toy
    guard = guard.replace(copy_size=None) if isinstance(guard, rc.SecondLook) else guard
    net = rc.as_module(clf, guard, differentiable=True).eval()
    pixels = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(net(pixels), y).backward()
    assert pixels.grad is not None
    assert (pixels.grad.flatten(1).abs().amax(1) > 0).all()
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), atol=1e-4, rtol=1e-4)
    assert torch.equal(net(x), net(x))
    assert not torch.equal(net(x), rc.as_module(clf, guard, seed=1)(x))
    attack = torchattacks.MIFGSM(net, **THEIRS)
    whole, alone = attack(x, y), attack(x[1:2], y[1:2])
    assert ((whole[1:2] - alone).abs() > 1e-5).float().mean() < 0.02, "an attack does not depend on the batch either"
