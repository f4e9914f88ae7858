"""Every adaptive attack climbs what it claims, stays in its ball, and is judged on draws that it never saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import react_clip as rc
from react_clip import adaptive, noise
from react_clip.adaptive import BPDA, Both, Evade, Feature, Queries, Rand, Suite, Through, Transfer
from react_clip.adaptive import base as adaptive_base
from react_clip.adaptive.gradient import GradientAttack, Scene
from react_clip.adaptive.pipeline import Pipeline
from react_clip.defenses.react import Correction, Decision
from toys import toy_classifier, toy_images

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
    Evade(**SMALL, lambdas=(0.1,), on="both", instability=False),
    BPDA(**SMALL),
    Feature(**SMALL),
]
ALL = [*WHITE_BOX, Queries(eps=EPS, queries=10, eot=2), Rand(eps=EPS, steps=3, eot=2), Transfer(eps=EPS, steps=5)]


@pytest.fixture(scope="module")
def task() -> tuple[Any, Tensor, Tensor]:
    clf, x = toy_classifier(), toy_images(5)
    return clf, x, clf(x).argmax(1)


def worth(attack: GradientAttack, clf: Any, guard: Any, clean: Tensor, y: Tensor, images: Tensor) -> Tensor:
    """The attack's objective on draws of our own."""
    pipeline, scene = Pipeline(clf, guard, 77), Scene(y, clf.encoder(clean))
    with torch.no_grad():
        values = [attack.objective(pipeline.look(images), scene, attack.variants()[0]) for _ in range(8)]
    return torch.stack(values).mean(0)


PAIRS = [
    pytest.param(attack, guard, id=f"{attack.name}, {guard.name}")
    for attack in WHITE_BOX
    for guard in (GUARD, rc.defenses.AOM(views=3), rc.defenses.TTC())
    if not attack.obstacle(guard)
]


@pytest.mark.parametrize(("attack", "guard"), PAIRS)
def test_what_is_climbed_goes_up(attack: GradientAttack, guard: Any, task: Any) -> None:
    clf, x, y = task
    images = attack(clf, guard, x, y, seed=1).images
    assert (images - x).abs().max() <= EPS + 1e-6
    assert images.min() >= 0
    assert images.max() <= 1
    before, after = (worth(attack, clf, guard, x, y, at) for at in (x, images))
    assert after.mean() > before.mean()


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.name)
def test_the_contract(attack: adaptive.AdaptiveAttack, task: Any) -> None:
    clf, x, y = task
    seen: list[tuple[int, int]] = []
    found = attack(clf, GUARD, x, y, seed=2, progress=lambda done, total: seen.append((done, total)))
    again = attack(clf, GUARD, x, y, seed=2)
    assert torch.equal(found.images, again.images)
    assert torch.equal(found.broken, again.broken)
    assert not torch.equal(found.images, attack(clf, GUARD, x, y, seed=3).images)
    assert seen[-1] == (attack.total_steps, attack.total_steps)
    assert torch.equal(found.success, found.broken > 0.5)
    forward, backward = attack.cost(GUARD, GUARD.cost())
    assert int(found.queries.max()) <= forward
    assert int(found.backward.max()) <= backward
    assert adaptive.from_dict(attack.to_dict()) == attack
    assert repr(attack).startswith(f"{type(attack).__name__}(eps=8/255, ")
    none = attack(clf, GUARD, x[:0], y[:0])
    assert none.images.shape == (0, *x.shape[1:])
    wider = attack(clf, GUARD, x, y, eps=torch.tensor([0.0, EPS, EPS, EPS, EPS]))
    assert torch.equal(wider.images[0], x[0])


def test_planned_passes_are_those_spent(task: Any) -> None:
    clf, x, y = task
    encoder: Any = clf.encoder
    for guard in (GUARD.replace(lazy=False), rc.defenses.AOM(views=3)):
        for attack in (Both(**SMALL, checkpoint=False), Evade(**SMALL, lambdas=(1.0, 2.0), checkpoint=False)):
            if not attack.obstacle(guard):
                encoder.encoded = 0
                attack(clf, guard, x, y)
                assert encoder.encoded == attack.cost(guard, guard.cost())[0] * len(x)


def test_looking_inside_gives_the_defence_s_own_answer(task: Any) -> None:
    clf, x, _ = task
    hardened = GUARD.replace(jitter=0.5, alpha_closed=0.3)
    for guard in (GUARD, hardened, rc.defenses.AOM(views=3), rc.defenses.DefendCLIP(views=3), rc.defenses.TTC()):
        pipeline = Pipeline(clf, guard, 5)
        look = pipeline.look(x)
        expected = guard(clf, x, seed=adaptive_base.derived_seed(5, "draw 1"))
        assert torch.allclose(look.defended, expected.logits, atol=1e-3)
        if guard.name == "react":
            gated = look.score >= look.threshold
            assert gated.tolist() == expected.gated.tolist()
            assert torch.allclose(look.defended, torch.where(gated[:, None], look.opened, look.closed))


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

    def decide(self, encoder: Any, pixels: Tensor, keys: Any, divergence: Any) -> Decision:
        plain, tau = encoder.encode_views(pixels), float(self.tau or 0.0)
        score = pixels[..., pixels.shape[-1] // 2 :].mean((1, 2, 3)) - 0.5
        rest = dict.fromkeys(("drift_low", "drift_high", "drift", "instability", "sigma"), score)
        passes = torch.ones_like(score, dtype=torch.long)
        return Decision(
            plain=plain, score=score, gated=score >= tau, passes=passes, threshold=torch.full_like(score, tau),
            streams=passes[:, None], **rest,
        )  # fmt: skip

    def act(self, encoder: Any, pixels: Tensor, decision: Decision, logits: Any = None) -> Correction:
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
    found = evade(clf, GATE, x, y)
    answers = GATE(clf, found.images)
    assert bool((answers.score < 0.004).all())
    assert bool(found.success.all())
    for blunt in (Transfer(eps=EPS, steps=20), Both(eps=EPS, steps=20, eot=1)):
        assert not bool(GATE(clf, blunt(clf, GATE, x, y).images).labels.any()), "it opens the gate and is corrected"
    only_weak = Evade(eps=EPS, steps=20, eot=1, lambdas=(0.001,))(clf, GATE, x, y)
    assert not bool(only_weak.success.any()), "the sweep is what finds the weight"


def test_the_soft_gate_is_hard_in_front_and_soft_behind(bright: Any) -> None:
    clf, x, y = bright
    pixels = (x + 0.002).requires_grad_()
    look = Pipeline(clf, GATE, 0).look(pixels)
    attack = BPDA(temperature=0.01)
    value = attack.objective(look, Scene(y, clf.encoder(x)), 0.0)
    plain = torch.nn.functional.cross_entropy(look.defended, y, reduction="none")
    assert torch.allclose(value, plain)
    (slope,) = torch.autograd.grad(value.sum(), pixels)
    left, right = slope[..., :4].mean(), slope[..., 4:].mean()
    assert left > 0, "brightening fools the plain answer"
    assert right < left, "but on the right it opens the gate"


def test_the_worst_of_a_suite_is_no_better_than_any_member(bright: Any, task: Any) -> None:
    for (clf, x, y), guard in ((bright, GATE), (task, GUARD)):
        suite = Suite(
            eps=EPS,
            members=(
                Transfer(steps=5),
                Both(steps=5, eot=1),
                Evade(steps=40, step_size=0.5 / 255, eot=1, lambdas=(1000.0,), margin=0.002),
                Queries(queries=5, eot=1),
            ),
        )
        found = suite(clf, guard, x, y, seed=1)
        assert list(found.parts) == [member.name for member in suite.members]
        assert torch.equal(found.broken, torch.stack(list(found.parts.values())).amax(0))
        assert int(found.queries.max()) <= suite.cost(guard, guard.cost())[0]
        assert int(found.backward.max()) <= suite.cost(guard, guard.cost())[1]
    assert bool((suite(bright[0], GATE, *bright[1:]).broken == 1).all())


def test_members_in_turn_spare_what_is_broken_and_find_the_same_worst_case(bright: Any) -> None:
    clf, x, y = bright
    evade = Evade(steps=40, step_size=0.5 / 255, eot=1, lambdas=(1000.0,), margin=0.002)
    thorough = Suite(eps=EPS, members=(Transfer(steps=5), evade, Queries(queries=5, eot=1)))
    brief = Suite(eps=EPS, members=thorough.members, in_turn=True)
    everything, needed = thorough(clf, GATE, x, y, seed=1), brief(clf, GATE, x, y, seed=1)
    assert torch.equal(everything.broken, needed.broken)
    for name, shares in needed.parts.items():
        tried = ~shares.isnan()
        assert torch.equal(shares[tried], everything.parts[name][tried]), "who is left does not depend on who is not"
    assert bool(needed.parts["adaptive-square-5"].isnan().all()), "evasion has broken them all"
    assert int(needed.queries.max()) < int(everything.queries.min())


def test_the_attackers_copy_of_the_defence_has_fewer_views(task: Any) -> None:
    clf, x, y = task
    encoder: Any = clf.encoder
    guard = GUARD.replace(lazy=False)
    spent = {}
    for views in (None, 1):
        attack = Both(eps=EPS, steps=2, eot=2, checkpoint=False, views=views)
        encoder.encoded = 0
        attack(clf, guard, x, y)
        spent[views] = encoder.encoded
        assert encoder.encoded == attack.cost(guard, guard.cost())[0] * len(x)
    assert spent[None] - spent[1] == 3 * 2 * 2 * len(x), "three iterates, two draws, two views less each"
    assert Both(views=1).price(rc.defenses.TTC(), (4, 2)) == Both().price(rc.defenses.TTC(), (4, 2))
    for kind in (Both, Rand):
        with pytest.raises(rc.ReactClipError, match="views"):
            kind(views=0)


def test_members_that_make_no_sense_rest(task: Any) -> None:
    clf, x, y = task
    suite = Suite(eps=EPS, members=(Evade(**{**SMALL, "steps": 2}), Transfer(steps=2)))
    assert list(suite(clf, rc.defenses.AOM(views=2), x, y).parts) == ["adaptive-transfer-2"]
    with pytest.raises(rc.ReactClipError, match=r"cannot be used here: aom has no gate to keep shut; choose another"):
        Evade()(clf, rc.defenses.AOM(), x, y)
    with pytest.raises(rc.ReactClipError, match="ttc has no anchor correction to see through"):
        Through()(clf, rc.defenses.TTC(), x, y)


def test_judging_draws_are_disjoint_from_those_optimised_on(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clf, x, y = task
    seeds: dict[bool, set[Any]] = {False: set(), True: set()}
    judging = False
    draw, judge = noise.stream_keys, adaptive_base.Target.judge

    def recorded(images: Tensor, seed: Any) -> Tensor:
        seeds[judging].add(seed)
        return draw(images, seed)

    def flagged(self: Any, images: Tensor) -> Any:
        nonlocal judging
        judging = True
        tally = judge(self, images)
        judging = False
        return tally

    monkeypatch.setattr(noise, "stream_keys", recorded)
    monkeypatch.setattr(adaptive_base.Target, "judge", flagged)
    members = (Transfer(steps=2), Both(steps=2, eot=2), Rand(steps=2, eot=2), Queries(queries=3, eot=2))
    Suite(eps=EPS, members=members)(clf, GUARD, x, y, seed=0)
    assert len(seeds[True]) == adaptive_base.JUDGE_DRAWS, "the same draws for every member"
    assert len(seeds[False]) > 10
    assert not seeds[True] & seeds[False]
    assert all(seed >= 2**62 for seed in seeds[True] | seeds[False]), "an evaluation draws from small seeds"


def test_one_lucky_draw_is_not_a_success(bright: Any) -> None:
    class Coin:
        """Wrong in one of twenty draws, whatever the image."""

        name = "coin"

        def __init__(self) -> None:
            self.calls = 0

        def cost(self) -> tuple[int, int]:
            return 1, 0

        def to_dict(self) -> dict[str, Any]:
            return {"defense": "coin"}

        def __call__(self, clf: Any, images: Tensor, seed: Any = 0) -> Any:
            self.calls += 1
            wrong = self.calls % 20 == 0
            features = torch.eye(2)[int(wrong)].expand(len(images), 2)
            return rc.defenses.base.answer(clf, features=features, passes=1)

    clf, x, y = bright
    for attack in (BPDA(eps=EPS, steps=3, eot=2), Queries(eps=EPS, queries=4, eot=4)):
        found = attack(clf, Coin(), x, y)
        assert not bool(found.success.any())
        assert float(found.broken.max()) <= 0.1


def test_images_of_another_model_are_replayed(task: Any) -> None:
    clf, x, y = task
    from toys import ToyEncoder

    source = rc.ZeroShotClassifier.from_features(ToyEncoder(seed=9), list(clf.names), clf.class_features)
    attack = Transfer(eps=EPS, steps=5)
    found = attack.from_source(source, clf, rc.Undefended(), x, y, seed=1)
    own = attack(clf, rc.Undefended(), x, y, seed=1)
    assert not torch.equal(found.images, own.images)
    assert own.broken.mean() >= found.broken.mean()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "adaptive-none"}, "does not exist; choose one of adaptive-both, adaptive-bpda"),
        ({"kind": "adaptive-both", "step": 1}, "has no field 'step'; it has eps, steps"),
        ({"kind": "adaptive-both", "eps": 8}, "write 8/255"),
        ({"kind": "adaptive-both", "eps": "x"}, "a number such as 4/255"),
        ({"kind": "adaptive-both", "combine": "sum"}, "one of mean, max, min"),
        ({"kind": "adaptive-both", "sigma": "fixed"}, "one of differentiated, detached"),
        ({"kind": "adaptive-both", "eot": 0}, "eot is 0"),
        ({"kind": "adaptive-both", "steps": [3]}, "steps is"),
        ({"kind": "adaptive-both", "checkpoint": 1}, "true or false"),
        ({"kind": "adaptive-both", "step_size": "eps/3"}, "a number such as"),
        ({"kind": "adaptive-evade", "lambdas": []}, "a list of numbers > 0"),
        ({"kind": "adaptive-evade", "lambdas": [0]}, "a list of numbers > 0"),
        ({"kind": "adaptive-evade", "margin": -1}, "margin is -1"),
        ({"kind": "adaptive-bpda", "temperature": 0}, "temperature is 0"),
        ({"kind": "adaptive-square", "queries": 0}, "queries is 0"),
        ({"kind": "adaptive-suite", "members": []}, "no members"),
        ({"kind": "adaptive-suite", "members": "adaptive-both"}, "it must be a list"),
        ({"kind": "adaptive-suite", "members": [3]}, "a suite member is 3"),
        ({"kind": "adaptive-suite", "members": ["adaptive-both", "adaptive-both"]}, "is there 2 times"),
        ({"kind": "adaptive-suite", "members": [{"kind": "adaptive-both", "eps": "1/255"}]}, "give eps to the suite"),
        ({"kind": "adaptive-suite", "members": ["adaptive-suite"]}, "is no suite"),
        ({"kind": "adaptive-suite", "members": ["pgd"]}, "adaptive attack 'pgd' does not exist"),
    ],
)
def test_a_mistake_is_one_clear_line(config: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        adaptive.from_dict(config)
    assert "\n" not in str(caught.value)


def test_a_suite_survives_json() -> None:
    suite = Suite(eps=EPS, members=(Both(steps=3), Evade(lambdas=(1.0, 5.0)), Queries(queries=7)))
    again = adaptive.from_dict(suite.to_dict())
    assert again.to_dict() == suite.to_dict()
    assert repr(again) == repr(suite)
    assert adaptive.from_dict({"kind": "adaptive-suite"}).to_dict() == Suite().to_dict()
