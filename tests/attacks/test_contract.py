"""Properties of every attack: the ball, 8 bits, repeatability, exact counts, and an unchanged model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import react_clip as rc
from react_clip import attacks
from react_clip.attacks import Adaptive, Attack, Problem, autoattack

from .conftest import Record, Task, one_by_one, train

PLAIN: list[Attack] = [
    attacks.PGD(steps=5),
    attacks.PGD(steps=5, step_size="eps/4", random_start=False),
    attacks.APGD(loss="ce", steps=10, restarts=2),
    attacks.APGD(loss="dlr-targeted", steps=10, targets=3),
    attacks.APGD(loss="ce", steps=5, eot=2),
    attacks.FAB(steps=10, targets=2),
    attacks.Square(queries=40),
    attacks.DIFGSM(steps=3),
    attacks.AutoAttack(version="standard"),
]
OTHERS: list[Attack] = [
    attacks.Targeted(by=attacks.APGD(steps=5), target_class=1),
    attacks.L2PGD(eps=1.0, steps=4),
    attacks.Patch(area=0.2, steps=4),
]
every_attack = pytest.mark.parametrize("attack", PLAIN, ids=repr)
every_attack_and_ball = pytest.mark.parametrize("attack", [*PLAIN, *OTHERS], ids=repr)

EPS = 8 / 255
SMALL: dict[str, Any] = {"eps": EPS, "steps": 3, "eot": 2, "checkpoint": False}
GUARD = rc.ReACT(tau=1.5, views=3)
DEFENDED: list[Attack] = [
    Adaptive(**SMALL | {"checkpoint": True}, objective="through"),
    Adaptive(**SMALL, objective="both"),
    Adaptive(**SMALL, objective="evade", lambdas=(0.1, 10.0)),
    Adaptive(**SMALL, objective="bpda", views=1),
    Adaptive(**SMALL, objective="feature"),
    attacks.Joint(**SMALL, oblivious=(attacks.PGD(steps=2),), rivals=(rc.defenses.AOM(views=2),)),
    attacks.Queries(eps=EPS, queries=10, eot=2),
    attacks.Rand(**SMALL),
    attacks.Transfer(eps=EPS, steps=5),
    attacks.Suite(eps=EPS, members=(attacks.Transfer(steps=3), Adaptive(steps=2, eot=1, checkpoint=False))),
]


@pytest.fixture(autouse=True)
def _short_autoattack(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoAttack's logic does not depend on how long its members run; longer ones run in test_agreement."""
    members = (
        attacks.APGD(steps=8),
        attacks.APGD(loss="dlr-targeted", steps=5, targets=2),
        attacks.FAB(steps=5, targets=2),
        attacks.Square(queries=15),
    )
    monkeypatch.setitem(autoattack._VERSIONS, "standard", members)


def tensors(result: attacks.AttackResult) -> list[Tensor]:
    values = [getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "parts"]
    return [value.nan_to_num(-1.0) for value in values]  # NaN equals nothing


def same(one: attacks.AttackResult, other: attacks.AttackResult) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def assert_allowed(images: Tensor, x: Tensor, eps: Tensor | float) -> None:
    """In the ball and in [0, 1]; every pixel that moved is a whole number of 255ths."""
    eps = eps.double().reshape(-1, 1, 1, 1) if isinstance(eps, Tensor) else eps
    assert images.dtype == torch.float32
    assert bool(((images >= 0) & (images <= 1)).all())
    assert bool(((images.double() - x.double()).abs() <= eps + 1e-6).all())
    assert bool(((images == x) | ((255 * images - (255 * images).round()).abs() < 1e-4)).all())


# --- the ball ---------------------------------------------------------------------------------------------------------

pixel = st.one_of(st.sampled_from([0.0, 1.0, 1e-45, 1e-8, 0.5, 1 - 2**-24]), st.floats(0, 1, width=32))
radius = st.one_of(st.sampled_from([0.0, 1e-45, 1e-6, 1 / 255, 4 / 255, 1.0]), st.floats(0, 1))


@every_attack
@settings(max_examples=10)
@given(data=st.data())
def test_images_are_allowed(attack: Attack, data: st.DataObject) -> None:
    """On random models with large gradients, random shapes, one budget per image, pixels at and near the edges."""
    batch, height, width = (data.draw(st.integers(1, 4)) for _ in range(3))
    classes, seed = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = (1.6 * torch.rand(batch, 3, height, width, generator=generator) - 0.3).clamp(0, 1)
    weight = 10 * torch.randn(classes, 3 * height * width, generator=generator)
    y = (x.flatten(1) @ weight.T).argmax(1)
    eps = torch.tensor(data.draw(st.lists(radius, min_size=batch, max_size=batch)))
    result = attack(lambda x: (x.flatten(1) @ weight.T).sin() * 9, x, y, seed=seed, eps=eps)
    assert_allowed(result.images, x, eps)


# --- randomness -------------------------------------------------------------------------------------------------------


@every_attack_and_ball
def test_seeds_repeat_and_leave_the_global_state_alone(attack: Attack, task: Task) -> None:
    x, y = task.head(6)
    state = torch.get_rng_state()
    models = [Record(task.net) for _ in range(3)]
    first = attack(models[0], x, y, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same(first, attack(models[1], x, y, seed=1))
    attack(models[2], x, y, seed=2)
    # The best image may be the same corner of the ball from any start, but not the images tried on the way.
    tried = [torch.cat(model.seen) for model in models]
    random = not isinstance(attack, attacks.FAB) and getattr(attack, "random_start", True)
    assert torch.equal(tried[0], tried[1])
    assert (tried[0].shape != tried[2].shape or not torch.equal(tried[0], tried[2])) == random


@every_attack
def test_results_do_not_depend_on_the_batch(attack: Attack, task: Task) -> None:
    """Bit for bit, with one budget per image, where the model itself answers the same bits in any batch."""
    x, y = task.clear_cut(5)
    eps = torch.tensor([8, 8, 10, 12, 12, 8, 8, 4, 4, 0]) / 255
    model = one_by_one(task.net)
    whole = attack(model, x, y, eps=eps)
    assert whole.crafted.tolist() == [True] * 5 + [False] * 5, "some images drop out early, the others stay"
    assert torch.equal(whole.images[9], x[9]), "without a budget nothing moves"
    order = torch.randperm(10, generator=torch.Generator().manual_seed(5))
    for rows in (torch.tensor([0]), torch.tensor([7]), torch.arange(3, 6), order):
        part = attack(model, x[rows], y[rows], eps=eps[rows])
        for some, all_of_them in zip(tensors(part), tensors(whole), strict=True):
            assert torch.equal(some, all_of_them[rows])


# --- what is returned -------------------------------------------------------------------------------------------------


@every_attack_and_ball
def test_success_loss_and_queries_are_those_of_the_model(attack: Attack, task: Task) -> None:
    x, y = task.x[:16], task.y[:16]
    model, steps = Record(task.net), list[int]()
    result = attack(model, x, y, eps=6 / 255, progress=steps.append)
    assert int(result.queries.sum()) == model.images
    logits = task.net(result.images)
    assert torch.equal(result.success, logits.argmax(1) != y)
    assert torch.equal(result.broken, result.success.float())
    torch.testing.assert_close(result.loss, attacks.losses.margin(logits, y))
    assert steps == list(range(1, len(steps) + 1))
    alone = Record(task.net)
    assert attack(alone, x[:1], y[:1], eps=6 / 255).queries.tolist() == [alone.images]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "attack",
    [
        attacks.APGD(loss="dlr", steps=20),
        attacks.APGD(loss="dlr-targeted", steps=20),
        attacks.FAB(steps=20),
        attacks.AutoAttack(),
    ],
    ids=lambda attack: attack.name,
)
def test_few_classes(attack: Attack, classes: int) -> None:
    """There are fewer wrong classes than targets, and DLR's denominator needs three or four."""
    task = train(classes)
    x, y = task.clear_cut(5)
    assert attack(task.net, x, y, eps=EPS).crafted.tolist() == [True] * 5 + [False] * 5


@every_attack_and_ball
def test_the_final_pass_judges_a_randomised_model(attack: Attack, task: Task) -> None:
    """A model that answers wrongly on every call but the last: nothing it said before counts."""
    x, y = task.head(3)
    wrong, right = (torch.nn.functional.one_hot((y + shift) % 5, 5).float() for shift in (1, 0))
    model = Record(task.net)

    def moody(images: Tensor, last: int) -> Tensor:
        answer = right if model.images == last else wrong
        return answer[: len(images)] + 0 * model(images)

    attack(lambda images: moody(images, -1), x, y)
    calls = model.images
    model.seen.clear()
    result = attack(lambda images: moody(images, calls - 3), x, y)
    assert result.success.tolist() == [False, False, False]


@every_attack_and_ball
@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_model_and_input_stay_untouched(attack: Attack, task: Task, outer: Callable[[], torch.no_grad]) -> None:
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    x, y = task.x[:4].clone().requires_grad_(), torch.tensor([0, 1, 2, 0])
    before = x.detach().clone()
    with outer():
        result = attack(linear, x, y)
    assert all(parameter.grad is None for parameter in linear.parameters())
    assert x.grad is None
    assert torch.equal(x, before)
    assert not any(tensor.requires_grad for tensor in tensors(result))
    assert result.images.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("attack", [*PLAIN, *DEFENDED], ids=repr)
def test_empty_batch(attack: Attack) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("there is nothing to ask")

    result = attack(never, torch.zeros(0, 3, 4, 4), torch.zeros(0, dtype=torch.long))
    assert [len(t) for t in tensors(result)] == [0] * 8


# --- attacks that know the defence ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", DEFENDED, ids=lambda attack: attack.name)
def test_attacks_on_a_defence(attack: Attack, toy: Any) -> None:
    clf, x, y = toy
    target = attack.target(clf, GUARD)
    clf.encoder.encoded = 0
    result = attack(target, x, y, seed=2)
    if not getattr(attack, "checkpoint", False):  # which encodes again in the backward pass
        assert result.queries.sum().item() == pytest.approx(clf.encoder.encoded), "real passes are counted"
    assert_allowed(result.images, x, EPS)
    assert same(result, attack(target, x, y, seed=2))
    other = attack(target, x, y, seed=3, eps=torch.tensor([0.0, EPS, EPS, EPS, EPS]))
    assert torch.equal(other.images[0], x[0]), "without a budget nothing moves"
    assert not torch.equal(result.images[1:], other.images[1:])
    assert torch.equal(result.success, result.broken > 0.5)
    assert repr(attacks.from_dict(attack.to_dict())) == repr(attack)
    with pytest.raises(rc.ReactClipError, match=r"the target is a ZeroShotClassifier.*give rc\.as_module"):
        attack(clf, x, y)


# --- attacks of others ------------------------------------------------------------------------------------------------


class Foreign(attacks.PGD):
    """One sign step, written with autograd on ``problem.target`` as other libraries do. It has no kind of its own."""

    reach: float = 4 / 255

    def search(self, problem: Problem) -> Tensor:
        pixels = problem.x.clone().requires_grad_()
        torch.nn.functional.cross_entropy(problem.target(pixels), problem.y).backward()
        assert pixels.grad is not None
        return (problem.x + self.reach * pixels.grad.sign()).clamp(0, 1)


def test_an_attack_of_another_library_has_gradients_and_is_counted(toy: Any) -> None:
    clf, x, y = toy
    result = Foreign()(clf, x, y)
    assert_allowed(result.images, x, 4 / 255)
    assert (result.images != x).float().mean() > 0.9
    assert result.queries.tolist() == [3] * 5
    assert result.backward.tolist() == [1] * 5


def test_an_attack_that_leaves_its_ball_is_refused(toy: Any) -> None:
    clf, x, y = toy
    middle = x / 2 + 0.25
    with pytest.raises(rc.ReactClipError, match=r"photo \d of the batch exceeds the budget by 0.08"):
        Foreign(reach=0.1)(clf, middle, y)
    with pytest.raises(
        rc.ReactClipError, match=r"returned shape \(5, 3, 16\), but it must return shape \(5, 3, 16, 16\)"
    ):
        type("Flat", (Foreign,), {"search": lambda self, problem: problem.x[..., 0]})()(clf, x, y)


def test_success_is_that_of_the_rounded_image() -> None:
    """A model that is fooled between two levels only: the attack succeeds, its file does not."""
    x, y = torch.full((1, 3, 2, 2), 100 / 255), torch.tensor([0])

    def between(images: Tensor) -> Tensor:
        off = (255 * images - (255 * images).round()).abs().amax((1, 2, 3))
        return torch.stack([torch.full_like(off, 0.1), off], 1)

    half = type("Half", (Foreign,), {"search": lambda self, problem: problem.x + 1.4 / 255})
    result = half()(between, x, y)
    assert (result.crafted.item(), result.success.item()) == (True, False)
    torch.testing.assert_close(result.images, x + 1 / 255)
