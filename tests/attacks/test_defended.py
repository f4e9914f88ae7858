"""Attacks that know the defence maximise what they claim and are judged on draws that they never saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import react_clip as rc
from react_clip import attacks, noise
from react_clip.attacks import PGD, Adaptive, Joint, Queries, Rand, Suite, Transfer
from react_clip.attacks.adaptive import Aim
from react_clip.attacks.defended import JUDGE_DRAWS, Draws
from react_clip.attacks.losses import target_margin
from react_clip.defenses.base import derived_seed, forced_answers
from react_clip.defenses.view import View

EPS = 8 / 255
SMALL: dict[str, Any] = {"eps": EPS, "steps": 6, "eot": 2}
GUARD = rc.ReACT(tau=1.5, views=3)
OBJECTIVES = [
    Adaptive(**SMALL, objective="through"),
    Adaptive(**SMALL, objective="both"),
    Adaptive(**SMALL, objective="evade", lambdas=(0.1,)),
    Adaptive(**SMALL, objective="bpda", checkpoint=False),
    Adaptive(**SMALL, objective="feature"),
    Adaptive(**SMALL, objective="joint"),
]


def attacked(attack: Any, clf: Any, guard: Any, x: Tensor, y: Tensor, seed: int = 0) -> Any:
    return attack(rc.as_module(clf, guard), x, y, seed=seed)


def objective(attack: Adaptive, clf: Any, guard: Any, clean: Tensor, y: Tensor, images: Tensor) -> Tensor:
    """The attack's objective on draws that it does not know."""
    draws, aim = Draws(rc.as_module(clf, guard, seed=77), "test"), Aim(y, clf.encoder(clean))
    with torch.no_grad():
        return torch.stack([attack.value(draws.forced(images), aim, 0.1) for _ in range(8)]).mean(0)


@pytest.mark.parametrize("attack", OBJECTIVES, ids=lambda attack: attack.name)
@pytest.mark.parametrize("guard", [GUARD, rc.defenses.AOM(views=3), rc.defenses.TTC()], ids=lambda guard: guard.name)
def test_the_objective_goes_up(attack: Adaptive, guard: Any, toy: Any) -> None:
    clf, x, y = toy
    if attack.why_not(rc.as_module(clf, guard)):
        pytest.skip("it has no gate")
    images = attacked(attack, clf, guard, x, y, seed=1).images
    before, after = (objective(attack, clf, guard, x, y, at) for at in (x, images))
    assert after.mean() > before.mean()


# ---------------------------------------------------------------------- a gate that can be evaded


class Brightness(nn.Module):
    """Features of two classes: darker or brighter than 0.512 on average."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(20.0))

    def forward(self, pixels: Tensor) -> Tensor:
        above = self.scale * (pixels.mean((1, 2, 3)) - 0.512)
        return torch.stack([1 - above, 1 + above], 1)


class RightHalf(rc.Undefended):
    """A gate that opens where the right half is bright; the correction knows the answer. It has no kind of its own."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        score = x.pixels[..., x.pixels.shape[-1] // 2 :].mean((1, 2, 3)) - 0.5
        open_gate = x.gate(score, 0.004)
        right = torch.eye(2)[0] + 0.0 * x.plain
        return torch.where(open_gate[:, None], right, x.plain), {"score": score}


@pytest.fixture(scope="module")
def bright() -> tuple[Any, Tensor, Tensor]:
    encoder = rc.Encoder(Brightness(), name="bright", image_size=8, dim=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    clf = rc.ZeroShotClassifier.from_features(encoder, ["dark", "bright"], torch.eye(2))
    return clf, torch.full((3, 3, 8, 8), 128 / 255), torch.zeros(3, dtype=torch.int64)


SURE = Adaptive(objective="evade", steps=60, eot=1, lambdas=(5000.0,), margin=0.002)


def test_evading_keeps_any_gate_shut_where_that_is_possible(bright: Any) -> None:
    clf, x, y = bright
    result = attacked(SURE.replace(eps=EPS, lambdas=(0.001, 5000.0)), clf, RightHalf(), x, y)
    assert bool((RightHalf()(clf, result.images).score < 0.004).all())
    assert bool(result.success.all())
    for blunt in (Transfer(eps=EPS, steps=20), Adaptive(eps=EPS, steps=20, eot=1)):
        images = attacked(blunt, clf, RightHalf(), x, y).images
        assert not bool(RightHalf()(clf, images).labels.any()), "it opens the gate and is corrected"
    only_weak = attacked(SURE.replace(eps=EPS, lambdas=(0.001,)), clf, RightHalf(), x, y)
    assert not bool(only_weak.success.any()), "the search over lambdas finds the weight"


def test_the_soft_gate_is_hard_forward_and_soft_backward(bright: Any) -> None:
    clf, x, y = bright
    pixels = (x + 0.001).requires_grad_()
    draw = forced_answers(RightHalf(), clf, pixels, 0)
    aim = Aim(y, clf.encoder(x))
    value = Adaptive(objective="bpda", temperature=0.01).value(draw, aim, 0.0)
    logits = torch.where(draw.gate.open[:, None], draw.opened.logits, draw.closed.logits)
    assert torch.allclose(value, nn.functional.cross_entropy(logits, y, reduction="none"))
    (slope,) = torch.autograd.grad(value.sum(), pixels)
    left, right = slope[..., :4].mean(), slope[..., 4:].mean()
    assert left > 0, "brightening fools the plain answer"
    assert right < left, "but on the right it opens the gate"


# ---------------------------------------------------------------------- the joint attack


def test_the_joint_attack_is_never_milder_than_its_starts(toy: Any) -> None:
    clf, x, y = toy
    options: dict[str, Any] = {"eps": EPS, "steps": 2, "eot": 2, "checkpoint": False}
    joint = Joint(**options, oblivious=(PGD(steps=8),), rivals=(rc.defenses.TTC(), rc.defenses.AOM(views=2)))
    result = attacked(joint, clf, GUARD, x, y, seed=1)
    assert attacks.from_dict(joint.to_dict()) == joint
    alone = attacked(Joint(**options, oblivious=()), clf, GUARD, x, y, seed=1)
    oblivious = attacked(Joint(**options, oblivious=(PGD(steps=8),)), clf, GUARD, x, y, seed=1)
    assert result.broken.mean() >= max(alone.broken.mean(), oblivious.broken.mean()) - 0.1
    assert result.queries.sum() > oblivious.queries.sum()


def test_an_attack_on_a_rival_is_a_start(bright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where climbing finds nothing, the images made for the rival are the result."""
    clf, x, y = bright
    monkeypatch.setattr(Joint, "_climb", lambda self, problem, *rest, **more: problem.x)
    joint = Joint(eps=EPS, steps=8, oblivious=(), checkpoint=False)
    assert torch.equal(attacked(joint, clf, rc.Undefended(), x, y).images, x)
    result = attacked(joint.replace(rivals=(rc.Undefended(),)), clf, rc.Undefended(), x, y)
    assert bool(result.success.all())
    assert not torch.equal(result.images, x)


def test_a_defence_that_draws_nothing_is_differentiated_once_per_step(bright: Any) -> None:
    clf, x, y = bright
    dark = x - 0.2
    joint = Joint(eps=EPS, steps=5, oblivious=(), checkpoint=False)
    assert attacked(joint, clf, rc.Undefended(), dark, y).backward.tolist() == [5.0] * 3
    noisy = attacked(joint, clf, Noisy(), dark, y)
    assert noisy.backward.tolist() == [5.0 * joint.eot * 2] * 3, "of the plain image and of the noisy one"


class Noisy(rc.Undefended):
    """Adds a little noise that differs from draw to draw."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        return x.encode(x.noisy(0.001, 7, 1)).mean(1), {}


# ---------------------------------------------------------------------- suites


def test_a_suite_returns_the_worst_of_its_members(bright: Any, toy: Any) -> None:
    suite = Suite(eps=EPS, members=(Transfer(steps=5), Adaptive(steps=5, eot=1), SURE, Queries(queries=5, eot=1)))
    for (clf, x, y), guard in ((bright, RightHalf()), (toy, GUARD)):
        result = attacked(suite, clf, guard, x, y, seed=1)
        assert list(result.parts) == [member.name for member in suite.members]
        assert torch.equal(result.broken, torch.stack(list(result.parts.values())).amax(0))
    assert bool((attacked(suite, bright[0], RightHalf(), *bright[1:]).broken == 1).all())


def test_members_in_turn_spare_broken_images_and_give_the_same_worst_case(bright: Any) -> None:
    clf, x, y = bright
    thorough = Suite(eps=EPS, members=(Transfer(steps=5), SURE, Queries(queries=5, eot=1)))
    everything, needed = (
        attacked(suite, clf, RightHalf(), x, y, seed=1) for suite in (thorough, thorough.replace(in_turn=True))
    )
    assert torch.equal(everything.broken, needed.broken)
    for name, fractions in needed.parts.items():
        tried = ~fractions.isnan()
        assert torch.equal(fractions[tried], everything.parts[name][tried]), "images do not depend on those left out"
    assert bool(needed.parts["adaptive-square-5"].isnan().all()), "evasion has broken them all"
    assert needed.queries.max() < everything.queries.min()


def test_members_that_make_no_sense_are_left_out(toy: Any) -> None:
    clf, x, y = toy
    evade = Adaptive(objective="evade", steps=2, eot=2)
    suite = Suite(eps=EPS, members=(evade, Transfer(steps=2)))
    assert list(attacked(suite, clf, rc.defenses.AOM(views=2), x, y).parts) == ["adaptive-transfer-2"]
    with pytest.raises(rc.ReactClipError, match=r"cannot be used here: aom has no gate to keep shut; choose another"):
        attacked(evade, clf, rc.defenses.AOM(), x, y)


def test_judging_draws_are_disjoint_from_those_optimised_on(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clf, x, y = toy
    drawn: list[Any] = []
    draw = noise.stream_keys

    def recorded(images: Tensor, seed: Any) -> Tensor:
        drawn.append(seed)
        return draw(images, seed)

    monkeypatch.setattr(noise, "stream_keys", recorded)
    judge_seed = derived_seed(derived_seed(0, "attack"), "judge")
    judging = {derived_seed(judge_seed, f"draw {number}") for number in range(1, JUDGE_DRAWS + 1)}
    members = (Transfer(steps=2), Adaptive(steps=2, eot=2), Rand(steps=2, eot=2), Queries(queries=3, eot=2))
    attacked(Suite(eps=EPS, members=members), clf, GUARD, x, y)
    judged = [seed for seed in drawn if isinstance(seed, int) and seed in judging]
    assert set(judged) == judging
    assert len(judged) == len(members) * JUDGE_DRAWS, "each draw once per member: nobody optimises on them"
    assert all(seed >= 2**62 for seed in drawn if isinstance(seed, int)), "an evaluation draws from small seeds"


class Coin(rc.Undefended):
    """Wrong in one of twenty calls, whatever the image."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        calls.append(0)
        return torch.eye(2)[int(len(calls) % 20 == 0)].expand(len(x.pixels), 2) + 0.0 * x.plain.detach(), {}


calls: list[Any] = []


def test_one_lucky_draw_is_not_a_success(bright: Any) -> None:
    clf, x, y = bright
    for attack in (Adaptive(eps=EPS, objective="bpda", steps=3, eot=2), Queries(eps=EPS, queries=4, eot=4)):
        calls.clear()
        result = attacked(attack, clf, Coin(), x, y)
        assert not bool(result.success.any())
        assert float(result.broken.max()) < 0.15, "one of ten judging draws"


# ---------------------------------------------------------------------- searches


@pytest.mark.parametrize("options", [{"steps": 30}, {"targets": 3, "steps": 4}], ids=str)
def test_broken_images_rest(options: Any, bright: Any) -> None:
    """Two of three images cannot be broken; steps, restarts and targets attack only what is left."""
    clf, x, y = bright
    whole = x.clone()
    whole[1:] -= 0.2
    attack = Adaptive(eps=EPS, eot=2, checkpoint=False, **options)
    result = attacked(attack, clf, rc.Undefended(), whole, y)
    assert result.broken.tolist() == [1, 0, 0]
    searches = max(1, attack.targets)
    assert result.backward[1:].tolist() == [2 * attack.steps * searches] * 2
    assert result.backward[0] < result.backward[1]


def test_a_targeted_search_climbs_the_margin_of_its_class(toy: Any) -> None:
    clf, x, y = toy
    second = attacks.losses.ranked_targets(clf(x), y, 1)[:, 0]
    images = attacked(Adaptive(**SMALL, targets=1), clf, rc.Undefended(), x, y).images
    before, after = (target_margin(clf(at), y, second) for at in (x, images))
    assert bool((after > before).all())
