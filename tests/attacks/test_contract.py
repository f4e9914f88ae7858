"""What every attack promises: the ball, the range, repeatability, honest counts, and clean manners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from react_clip.attacks import APGD, CW, FAB, PGD, Attack, AttackResult, AutoAttack, Square, autoattack
from react_clip.attacks.problem import Problem, Steps, budgets

from .conftest import CountCalls, Task, in_double, one_by_one

EVERY: list[Attack] = [
    PGD(steps=5),
    PGD(steps=5, step_size="eps/4", random_start=False),
    CW(steps=5),
    APGD(loss="ce", steps=10, restarts=2),
    APGD(loss="dlr", steps=10),
    APGD(loss="dlr-targeted", steps=10, targets=3),
    APGD(loss="ce", steps=5, eot=2),
    FAB(steps=10, targets=2),
    Square(queries=40),
    AutoAttack(version="standard"),
]
every_attack = pytest.mark.parametrize("attack", EVERY, ids=repr)


@pytest.fixture(autouse=True)
def _short_autoattack(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoAttack's logic does not depend on how long its members run; longer ones run in test_agreement."""
    members = (
        APGD(steps=8),
        APGD(loss="dlr-targeted", steps=5, targets=2),
        FAB(steps=5, targets=2),
        Square(queries=15),
    )
    monkeypatch.setitem(autoattack._VERSIONS, "standard", members)


def fields(result: AttackResult) -> list[Tensor]:
    return [getattr(result, field.name) for field in dataclasses.fields(result)]


def same(one: AttackResult, other: AttackResult) -> bool:
    return all(torch.equal(a, b) for a, b in zip(fields(one), fields(other), strict=True))


def ulp(values: Tensor) -> Tensor:
    """Distance to the next fp32 number, in fp64."""
    return torch.nextafter(values, torch.tensor(torch.inf)).double() - values.double()


def assert_inside(images: Tensor, x: Tensor, eps: Tensor | float) -> None:
    """In exact (fp64) arithmetic, to 1 ulp of the larger of the two pixels."""
    assert images.dtype == torch.float32
    assert bool(((images >= 0) & (images <= 1)).all())
    eps = eps.double().reshape(-1, 1, 1, 1) if isinstance(eps, Tensor) else eps
    assert bool(((images.double() - x.double()).abs() <= eps + ulp(torch.maximum(x, images))).all())


# --- the ball ---------------------------------------------------------------------------------------------------------

pixel = st.one_of(st.sampled_from([0.0, 1.0, 1e-45, 1e-8, 0.5, 1 - 2**-24]), st.floats(0, 1, width=32))
radius = st.one_of(st.sampled_from([0.0, 1e-45, 1e-6, 1 / 255, 4 / 255, 1.0]), st.floats(0, 1))


@given(st.lists(st.tuples(pixel, st.floats(-4, 4, width=32)), min_size=1, max_size=32), radius)
def test_projection_holds_to_one_ulp(pairs: list[tuple[float, float]], eps: float) -> None:
    x = torch.tensor([p for p, _ in pairs]).reshape(1, 1, 1, -1)
    wild = torch.tensor([w for _, w in pairs]).reshape(1, 1, 1, -1)
    index = torch.zeros(1, dtype=torch.long)
    problem = Problem(lambda x: x, x, index, budgets(eps, x), index, index, index, Steps(1))
    images = problem.project(wild)
    assert_inside(images, x, eps)
    assert torch.equal(problem.project(images), images)
    if eps == 0:
        assert torch.equal(images, x)
    inside = ((wild.double() - x.double()).abs() <= eps) & (wild >= 0) & (wild <= 1)
    # Points that were inside may move by the rounding of the bound, no more.
    assert bool(((images - wild).abs().double()[inside] <= ulp(torch.maximum(x, wild))[inside]).all())


@every_attack
@settings(max_examples=10)
@given(data=st.data())
def test_ball_and_range_hold(attack: Attack, data: st.DataObject) -> None:
    """On random models with large gradients, random shapes, one budget per image, pixels at and near the edges."""
    batch, height, width = (data.draw(st.integers(1, 4)) for _ in range(3))
    classes, seed = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = (1.6 * torch.rand(batch, 3, height, width, generator=generator) - 0.3).clamp(0, 1)
    weight = 10 * torch.randn(classes, 3 * height * width, generator=generator)
    y = (x.flatten(1) @ weight.T).argmax(1)
    eps = torch.tensor(data.draw(st.lists(radius, min_size=batch, max_size=batch)))
    result = attack(lambda x: (x.flatten(1) @ weight.T).sin() * 9, x, y, seed=seed, eps=eps)
    assert_inside(result.images, x, eps)


@every_attack
def test_zero_budget_is_the_identity(attack: Attack, task: Task) -> None:
    x, y = task.x[:12], task.y[:12]
    result = attack(task.net, x, y, eps=0.0)
    assert torch.equal(result.images, x)
    assert torch.equal(result.success, task.net(x).argmax(1) != y)


@every_attack
def test_one_budget_per_image(attack: Attack, task: Task) -> None:
    x, y = task.head(4)
    eps = torch.tensor([0.0, 2 / 255, 6 / 255, 16 / 255])
    model = one_by_one(task.net)
    together = attack(model, x, y, eps=eps)
    for row in range(4):
        alone = attack(model, x[row : row + 1], y[row : row + 1], eps=float(eps[row]))
        assert torch.equal(alone.images[0], together.images[row])
    moved = (together.images - x).abs().amax((1, 2, 3))
    assert bool((moved <= eps + 1e-6).all())


# --- randomness -------------------------------------------------------------------------------------------------------


@every_attack
def test_seeds_repeat_and_leave_the_global_state_alone(attack: Attack, task: Task) -> None:
    x, y = task.head(6)
    state = torch.get_rng_state()
    asked: list[list[Tensor]] = []

    def run(seed: int) -> AttackResult:
        asked.append([])
        return attack(lambda images: (asked[-1].append(images.detach().clone()), task.net(images))[1], x, y, seed=seed)

    first = run(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same(first, run(1))
    run(2)
    # The best image may well be the same corner of the ball from any start; the way to it may not.
    ways = [torch.cat(way) for way in asked]
    random = not isinstance(attack, FAB) and getattr(attack, "random_start", True)
    assert torch.equal(ways[0], ways[1])
    assert (ways[0].shape != ways[2].shape or not torch.equal(ways[0], ways[2])) == random


@every_attack
def test_results_do_not_depend_on_the_batch(attack: Attack, task: Task) -> None:
    """Bit for bit, where the model itself answers bit for bit the same in any batch."""
    x, y = task.x[:10], task.y[:10]
    model = one_by_one(task.net)
    whole = attack(model, x, y, eps=8 / 255)
    assert 0 < int(whole.success.sum()) < 10, "images must drop out for this test to say anything"
    order = torch.randperm(10, generator=torch.Generator().manual_seed(5))
    for rows in (torch.tensor([0]), torch.tensor([7]), torch.arange(3, 6), order):
        part = attack(model, x[rows], y[rows], eps=8 / 255)
        for some, all_of_them in zip(fields(part), fields(whole), strict=True):
            assert torch.equal(some, all_of_them[rows])


@every_attack
def test_batched_arithmetic_changes_next_to_nothing(attack: Attack, task: Task) -> None:
    """A batched model rounds differently in each batch size; fp64 keeps that at 1e-16, far below any step's decision.

    What is left is the attack's own fp32 arithmetic on sums over pixels (FAB), hence 1e-5.
    """
    x, y = task.x[:10], task.y[:10]
    model = in_double(task.net)
    whole = attack(model, x, y, eps=5 / 255)
    for rows in (torch.tensor([2]), torch.arange(4, 9)):
        part = attack(model, x[rows], y[rows], eps=5 / 255)
        torch.testing.assert_close(part.images, whole.images[rows], rtol=0, atol=1e-5)
        assert torch.equal(part.success, whole.success[rows])
        assert torch.equal(part.queries, whole.queries[rows])


# --- what comes back --------------------------------------------------------------------------------------------------


@every_attack
def test_success_loss_and_queries_are_honest(attack: Attack, task: Task) -> None:
    x, y = task.x[:16], task.y[:16]
    counter = CountCalls(task.net)
    result = attack(counter, x, y, eps=6 / 255)
    assert int(result.queries.sum()) == counter.images
    logits = task.net(result.images)
    assert torch.equal(result.success, logits.argmax(1) != y)
    torch.testing.assert_close(result.loss, attack.own_loss(logits, y))
    assert [t.dtype for t in fields(result)] == [torch.float32, torch.bool, torch.float32, torch.int64]
    alone = CountCalls(task.net)
    assert attack(alone, x[:1], y[:1], eps=6 / 255).queries.tolist() == [alone.images]


@every_attack
def test_the_final_pass_judges_a_randomised_model(attack: Attack, task: Task) -> None:
    """A model that answers wrongly on every call but the last: nothing it said before counts."""
    x, y = task.head(3)
    total = CountCalls(task.net)
    wrong = torch.nn.functional.one_hot((y + 1) % 5, 5).float()
    right = torch.nn.functional.one_hot(y, 5).float()

    def moody(images: Tensor, last: int) -> Tensor:
        answer = right if total.images == last else wrong
        return answer[: len(images)] + 0 * total(images)

    attack(lambda images: moody(images, -1), x, y)
    calls, total.images = total.images, 0
    result = attack(lambda images: moody(images, calls - 3), x, y)
    assert result.success.tolist() == [False, False, False]


@every_attack
@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_model_and_input_stay_untouched(attack: Attack, task: Task, outer: Callable[[], torch.no_grad]) -> None:
    net = in_double(task.net)
    conv = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    x, y = task.x[:4].clone().requires_grad_(), torch.tensor([0, 1, 2, 0])
    before = x.detach().clone()
    with outer():
        result = attack(conv, x, y)
        inner = attack(net, x + 0.0, y)  # an inference tensor, where the outer mode makes them
    assert all(p.requires_grad and p.grad is None for p in conv.parameters())
    assert x.requires_grad
    assert x.grad is None
    assert torch.equal(x, before)
    assert not result.images.requires_grad
    assert result.images.data_ptr() != x.data_ptr()
    assert inner.images.shape == x.shape


@every_attack
def test_progress_counts_up_to_the_end(attack: Attack, task: Task) -> None:
    x, y = task.head(3)
    calls: list[tuple[int, int]] = []
    attack(task.net, x, y, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1] == (attack.total_steps, attack.total_steps)
    assert {t for _, t in calls} == {attack.total_steps}


@every_attack
def test_empty_batch(attack: Attack) -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("there is nothing to ask")

    result = attack(never, torch.zeros(0, 3, 4, 4), torch.zeros(0, dtype=torch.long))
    assert [len(t) for t in fields(result)] == [0, 0, 0, 0]
