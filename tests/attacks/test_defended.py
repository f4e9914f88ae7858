"""Attacks that know the defence maximise what they claim and are judged on draws that they never saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import react_clip as rc
from react_clip import attacks, noise
from react_clip.attacks import BPDA, Both, Evade, Feature, GradientAttack, Queries, Rand, Suite, Through, Transfer
from react_clip.attacks.base import JUDGE_DRAWS
from react_clip.attacks.targets import take_draw
from react_clip.defenses.base import derived_seed
from react_clip.defenses.react import Correction, Decision

EPS = 8 / 255
SMALL: dict[str, Any] = {"eps": EPS, "steps": 6, "eot": 2}
GUARD = rc.ReACT(tau=1.5, views=3)
WHITE_BOX = [
    Through(**SMALL),
    Through(**SMALL, sigma="detached", loss="margin"),
    Both(**SMALL),
    Both(**SMALL, combine="min", loss="dlr"),
    Both(**SMALL, combine="max", checkpoint=False),
    Evade(**SMALL, lambdas=(0.1,)),
    Evade(**SMALL, lambdas=(0.1,), on="both", instability_temperature=1.0),
    BPDA(**SMALL),
    Feature(**SMALL),
    Both(**SMALL, targets=1),
]


def attacked(attack: Any, clf: Any, guard: Any, x: Tensor, y: Tensor, seed: int = 0) -> Any:
    return attack(rc.as_module(clf, guard), x, y, seed=seed)


def objective(attack: GradientAttack, clf: Any, guard: Any, clean: Tensor, y: Tensor, images: Tensor) -> Tensor:
    """The attack's objective on draws that it does not know."""
    target, features = rc.as_module(clf, guard, seed=77, fresh=True), clf.encoder(clean)
    with torch.no_grad():
        return torch.stack([attack.objective(take_draw(target, images, y, features)) for _ in range(8)]).mean(0)


PAIRS = [
    pytest.param(attack, guard, id=f"{attack.name}, {guard.name}")
    for attack in WHITE_BOX
    for guard in (GUARD, rc.defenses.AOM(views=3), rc.defenses.TTC())
    if not attack.obstacle(guard)
]


@pytest.mark.parametrize(("attack", "guard"), PAIRS)
def test_the_objective_goes_up(attack: GradientAttack, guard: Any, toy: Any) -> None:
    clf, x, y = toy
    images = attacked(attack, clf, guard, x, y, seed=1).images
    before, after = (objective(attack, clf, guard, x, y, at) for at in (x, images))
    assert after.mean() > before.mean()


def test_planned_passes_are_those_spent(toy: Any) -> None:
    clf, x, y = toy
    encoder: Any = clf.encoder
    spent, short = {}, SMALL | {"steps": 2, "checkpoint": False}
    for guard in (GUARD.replace(lazy=False), rc.defenses.AOM(views=3)):
        for options in ({"views": 1}, {"views": None}):
            for attack in (
                Both(**short, **options),
                Evade(**short, **options, lambdas=(1.0, 2.0)),
                Rand(**short, **options),
                Queries(eps=EPS, queries=1, eot=2),
                Transfer(eps=EPS, steps=3),
            ):
                if attack.obstacle(guard):
                    continue
                encoder.encoded = 0
                result = attacked(attack, clf, guard, x, y)
                assert encoder.encoded == int(result.queries.sum())
                assert encoder.encoded <= attack.cost(guard)[0] * len(x)
                spent[attack.kind, guard.name, options["views"]] = encoder.encoded
    fewer = spent["adaptive-both", "react", None] - spent["adaptive-both", "react", 1]
    assert fewer == 3 * 2 * 2 * len(x), "three iterates, two draws, two views less each"


def test_a_draw_contains_the_defence_s_own_answer(toy: Any) -> None:
    clf, x, y = toy
    hardened = GUARD.replace(jitter=0.5, alpha_closed=0.3)
    for guard in (GUARD, hardened, rc.defenses.AOM(views=3), rc.defenses.DefendCLIP(views=3), rc.defenses.TTC()):
        draw = take_draw(rc.as_module(clf, guard, seed=5, fresh=True), x, y, clf.encoder(x))
        expected = guard(clf, x, seed=derived_seed(5, "draw 1"))
        assert torch.allclose(draw.defended.logits, expected.logits, atol=1e-3)
        assert torch.allclose(draw.defended.features, expected.features, atol=1e-5)
        if guard.name == "react":
            assert (draw.score >= draw.threshold).tolist() == expected.gated.tolist()


# ---------------------------------------------------------------------- a gate that can be evaded


class Brightness(rc.Encoder):
    """Two classes: darker or brighter than 0.512 on average."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), name="bright", image_size=8, dim=2, mean=(0.0,) * 3, std=(1.0,) * 3)

    def _image_features(self, normalised: Tensor) -> Tensor:
        above = 20 * (normalised.mean((1, 2, 3)) - 0.512)
        return torch.stack([1 - above, 1 + above], 1)


class RightHalf(rc.ReACT):
    """A gate that opens where the right half is bright; the correction knows the answer."""

    def decide(self, encoder: Any, pixels: Tensor, keys: Any, logits: Any) -> Decision:
        plain, tau = encoder.encode_views(pixels), float(self.tau or 0.0)
        score = pixels[..., pixels.shape[-1] // 2 :].mean((1, 2, 3)) - 0.5
        rest = dict.fromkeys(("drift_low", "drift_high", "drift", "instability", "sigma"), score)
        passes = torch.ones_like(score, dtype=torch.long)
        return Decision(
            plain=plain, score=score, gated=score >= tau, passes=passes, threshold=torch.full_like(score, tau),
            streams=passes[:, None], **rest,
        )  # fmt: skip

    def act(self, encoder: Any, pixels: Tensor, decision: Decision, logits: Any, may_stop: Any = True) -> Correction:
        opened = torch.eye(2)[0].expand_as(decision.plain) + 0.0 * decision.plain
        features = torch.where(decision.gated[:, None], opened, decision.plain)
        return Correction(**vars(decision), features=features, opened=opened, closed=decision.plain)


GATE = RightHalf(tau=0.004, views=1)


@pytest.fixture(scope="module")
def bright() -> tuple[Any, Tensor, Tensor]:
    clf = rc.ZeroShotClassifier.from_features(Brightness(), ["dark", "bright"], torch.eye(2))
    return clf, torch.full((3, 3, 8, 8), 0.5), torch.zeros(3, dtype=torch.int64)


def test_evading_keeps_the_gate_shut_where_that_is_possible(bright: Any) -> None:
    clf, x, y = bright
    evade = Evade(eps=EPS, steps=40, step_size=0.5 / 255, eot=1, lambdas=(0.001, 1000.0), margin=0.002)
    result = attacked(evade, clf, GATE, x, y)
    assert bool((GATE(clf, result.images).score < 0.004).all())
    assert bool(result.success.all())
    for blunt in (Transfer(eps=EPS, steps=20), Both(eps=EPS, steps=20, eot=1)):
        images = attacked(blunt, clf, GATE, x, y).images
        assert not bool(GATE(clf, images).labels.any()), "it opens the gate and is corrected"
    only_weak = attacked(Evade(eps=EPS, steps=20, eot=1, lambdas=(0.001,)), clf, GATE, x, y)
    assert not bool(only_weak.success.any()), "the search over lambdas finds the weight"


def test_the_soft_gate_is_hard_forward_and_soft_backward(bright: Any) -> None:
    clf, x, y = bright
    pixels = (x + 0.002).requires_grad_()
    draw = take_draw(rc.as_module(clf, GATE), pixels, y, clf.encoder(x))
    value = BPDA(temperature=0.01).objective(draw)
    assert torch.allclose(value, torch.nn.functional.cross_entropy(draw.defended.logits, y, reduction="none"))
    (slope,) = torch.autograd.grad(value.sum(), pixels)
    left, right = slope[..., :4].mean(), slope[..., 4:].mean()
    assert left > 0, "brightening fools the plain answer"
    assert right < left, "but on the right it opens the gate"


SURE = Evade(steps=40, step_size=0.5 / 255, eot=1, lambdas=(1000.0,), margin=0.002)


def test_a_suite_returns_the_worst_of_its_members(bright: Any, toy: Any) -> None:
    suite = Suite(eps=EPS, members=(Transfer(steps=5), Both(steps=5, eot=1), SURE, Queries(queries=5, eot=1)))
    for (clf, x, y), guard in ((bright, GATE), (toy, GUARD)):
        result = attacked(suite, clf, guard, x, y, seed=1)
        assert list(result.parts) == [member.name for member in suite.members]
        assert torch.equal(result.broken, torch.stack(list(result.parts.values())).amax(0))
        assert int(result.queries.max()) <= suite.cost(guard)[0]
        assert int(result.backward.max()) <= suite.cost(guard)[1]
    assert bool((attacked(suite, bright[0], GATE, *bright[1:]).broken == 1).all())


def test_members_in_turn_spare_broken_images_and_give_the_same_worst_case(bright: Any) -> None:
    clf, x, y = bright
    thorough = Suite(eps=EPS, members=(Transfer(steps=5), SURE, Queries(queries=5, eot=1)))
    everything, needed = (
        attacked(suite, clf, GATE, x, y, seed=1) for suite in (thorough, thorough.replace(in_turn=True))
    )
    assert torch.equal(everything.broken, needed.broken)
    for name, shares in needed.parts.items():
        tried = ~shares.isnan()
        assert torch.equal(shares[tried], everything.parts[name][tried]), "images do not depend on those left out"
    assert bool(needed.parts["adaptive-square-5"].isnan().all()), "evasion has broken them all"
    assert int(needed.queries.max()) < int(everything.queries.min())


def test_members_that_make_no_sense_are_left_out(toy: Any) -> None:
    clf, x, y = toy
    suite = Suite(eps=EPS, members=(Evade(steps=2, eot=2), Transfer(steps=2)))
    assert list(attacked(suite, clf, rc.defenses.AOM(views=2), x, y).parts) == ["adaptive-transfer-2"]
    with pytest.raises(rc.ReactClipError, match=r"cannot be used here: aom has no gate to keep shut; choose another"):
        attacked(Evade(), clf, rc.defenses.AOM(), x, y)
    with pytest.raises(rc.ReactClipError, match="ttc has no anchor correction to see through"):
        attacked(Through(), clf, rc.defenses.TTC(), x, y)


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
    members = (Transfer(steps=2), Both(steps=2, eot=2), Rand(steps=2, eot=2), Queries(queries=3, eot=2))
    attacked(Suite(eps=EPS, members=members), clf, GUARD, x, y)
    judged = [seed for seed in drawn if seed in judging]
    assert set(judged) == judging
    assert len(judged) == len(members) * JUDGE_DRAWS, "each draw once per member: nobody optimises on them"
    assert len(set(drawn)) > JUDGE_DRAWS + 10
    assert all(seed >= 2**62 for seed in drawn), "an evaluation draws from small seeds"


class Coin(rc.Undefended):
    """Wrong in one of twenty calls, whatever the image."""

    def __call__(self, clf: Any, images: Tensor, seed: Any = 0) -> Any:
        calls.append(seed)
        features = torch.eye(2)[int(len(calls) % 20 == 0)].expand(len(images), 2)
        return rc.defenses.base.answer(clf, features, passes=(1, 0))


calls: list[Any] = []


def test_one_lucky_draw_is_not_a_success(bright: Any) -> None:
    clf, x, y = bright
    for attack in (BPDA(eps=EPS, steps=3, eot=2), Queries(eps=EPS, queries=4, eot=4)):
        calls.clear()
        result = attacked(attack, clf, Coin(), x, y)
        assert not bool(result.success.any())
        assert float(result.broken.max()) < 0.15, "one of ten judging draws"


# ---------------------------------------------------------------------- searches


def test_an_image_rests_once_ten_draws_in_a_row_are_wrong(bright: Any) -> None:
    clf, x, y = bright
    whole = x.clone()
    whole[1:] -= 0.2  # two of three images cannot be broken
    attack = Both(eps=EPS, steps=30, eot=2, checkpoint=False)
    result = attacked(attack, clf, rc.Undefended(), whole, y)
    assert result.broken.tolist() == [1, 0, 0]
    assert int(result.backward[0]) < int(result.backward[1]) == attack.cost(rc.Undefended())[1]


def test_restarts_and_targets_attack_only_what_is_left(bright: Any) -> None:
    clf, x, y = bright
    whole = x.clone()
    whole[1:] -= 0.2
    for options in ({"restarts": 3}, {"targets": 3}):
        attack = Both(eps=EPS, steps=4, eot=2, checkpoint=False, **options)
        assert attack.total_steps == 12
        result = attacked(attack, clf, rc.Undefended(), whole, y)
        assert result.broken.tolist() == [1, 0, 0]
        assert 3 * int(result.backward[0]) == int(result.backward[1]) == attack.cost(rc.Undefended())[1]


def test_a_targeted_search_climbs_the_margin_of_its_class(toy: Any) -> None:
    clf, x, y = toy
    plain = clf(x)
    second = attacks.losses.ranked_targets(plain, y, 1)[:, 0]
    images = attacked(Both(**SMALL, targets=1), clf, rc.Undefended(), x, y).images
    before, after = (attacks.losses.target_margin(clf(at), y, second) for at in (x, images))
    assert bool((after > before).all())


def test_the_gradient_of_j_does_not_vanish_where_the_answer_is_clear() -> None:
    one = torch.tensor([[12.0, 0.0, -1.0]], requires_grad=True)
    other = torch.tensor([[11.0, 0.5, -1.0]])
    slopes = []
    for temperature in (1.0, 10.0):
        value = rc.functional.js_divergence(one, other, temperature)
        slopes.append(torch.autograd.grad(value.sum(), one)[0].abs().max())
        assert torch.equal(value.detach(), rc.functional.js_divergence(one, other).detach())
    assert slopes[1] > 20 * slopes[0]
