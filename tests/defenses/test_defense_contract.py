"""What every registered defence promises, whatever it does inside."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import defenses
from react_clip.config import Configuration
from react_clip.defenses import Defended, Defense
from react_clip.defenses.base import Priced
from toys import toy_classifier, toy_images

from .watching import F64, watched_classifier

SEEDLESS = {"undefended", "anti-adv"}
every_defense = pytest.mark.parametrize("name", defenses.names())


def run(
    name: str, images: Tensor, clf: rc.ZeroShotClassifier | None = None, seed: int | bytes = 0, **options: Any
) -> Defended:
    """The defence on images; skips those that read text, which toys cannot."""
    guard = defenses.from_dict({"kind": name, **options})
    clf = clf or toy_classifier(images.dtype)
    try:
        return guard(clf, images, seed=seed)
    except rc.ReactClipError as error:
        if "text tower" in str(error):
            pytest.skip("needs a text tower")
        raise


def fields(out: Defended) -> dict[str, Tensor]:
    return {name: value for name, value in vars(out).items() if isinstance(value, Tensor)}


def assert_same(one: Defended, other: Defended, rows: slice | list[int] = slice(None), atol: float = 1e-9) -> None:
    for name, value in fields(one).items():
        expected = fields(other)[name][rows]
        assert value.dtype == expected.dtype, name
        assert torch.allclose(value.double(), expected.double(), atol=atol, equal_nan=True), name


@every_defense
def test_answers_have_the_promised_form_and_nothing_else_changes(name: str) -> None:
    clf, images = toy_classifier(), toy_images(5)
    before, weights = images.clone(), {k: v.clone() for k, v in clf.state_dict().items()}
    random_state = torch.get_rng_state()
    out = run(name, images, clf)
    assert len(out) == 5
    assert out.features.shape == (5, 12)
    assert out.logits.shape == (5, 5)
    assert out.features.dtype == out.logits.dtype == torch.float32
    assert torch.isfinite(out.logits).all()
    assert torch.allclose(out.features.norm(dim=1), torch.ones(5), atol=1e-5)
    assert ((out.labels >= 0) & (out.labels < 5)).all()
    assert out.names == [clf.names[i] for i in out.labels.tolist()]
    for field in ("drift_low", "drift_high", "drift", "instability", "score", "gated", "sigma"):
        assert getattr(out, field).shape == (5,), field
    assert out.gated.dtype == torch.bool
    assert out.passes.dtype == out.backward_passes.dtype == torch.long
    assert not any(value.requires_grad for value in fields(out).values())

    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state), "global randomness was used"
    assert all(torch.equal(value, weights[key]) for key, value in clf.state_dict().items())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in clf.parameters())


@every_defense
def test_parameters_that_want_gradients_get_none(name: str) -> None:
    clf = toy_classifier()
    clf.encoder.requires_grad_(True)
    out = run(name, toy_images(2), clf)
    assert not out.logits.requires_grad
    assert all(parameter.grad is None for parameter in clf.parameters())


@every_defense
def test_an_image_gets_the_same_answer_alone_in_any_batch_and_in_any_chunks(name: str) -> None:
    images = toy_images(7, dtype=F64)
    whole = run(name, images)
    for i in range(len(images)):
        assert_same(run(name, images[i : i + 1]), whole, [i])
    order = [3, 0, 6, 5, 1, 2, 4]
    assert_same(run(name, images[order]), whole, order)
    if hasattr(defenses.from_dict(name), "max_batch"):
        for max_batch in (1, 3, 7, 1000):
            assert_same(run(name, images, max_batch=max_batch), whole)


@every_defense
def test_the_seed_decides_and_nothing_else(name: str) -> None:
    images = toy_images(4)
    one = run(name, images, seed=1)
    assert_same(run(name, images, seed=1), one, atol=0)
    assert torch.equal(run(name, images, seed=2).logits, one.logits) == (name in SEEDLESS)
    secret = run(name, images, seed=b"a secret")
    assert torch.equal(run(name, images, seed=b"a secret").logits, secret.logits)


@every_defense
def test_it_works_wherever_gradients_are_switched_off(name: str) -> None:
    clf, images = toy_classifier(), toy_images(3)
    plain = run(name, images, clf)
    with torch.no_grad():
        assert_same(run(name, images, clf), plain, atol=1e-6)
    with torch.inference_mode():
        assert_same(run(name, images, clf), plain, atol=1e-6)
        made_here = toy_images(3) * 1.0
        assert made_here.is_inference()
        assert_same(run(name, made_here, clf), plain, atol=1e-6)


@every_defense
def test_passes_are_what_the_encoder_really_did(name: str) -> None:
    images = toy_images(6)
    for part in (images, *images.split(1)):
        clf, encoder = watched_classifier()
        out = run(name, part, clf)
        assert encoder.encoded == int(out.passes.sum())
        assert encoder.reversed == int(out.backward_passes.sum())
        guard = defenses.from_dict(name)
        assert isinstance(guard, Priced)
        forward, backward = guard.cost()
        assert int(out.passes.max()) <= forward
        assert int(out.backward_passes.max()) <= backward


@every_defense
def test_max_batch_limits_the_views_of_one_call(name: str) -> None:
    if not hasattr(defenses.from_dict(name), "max_batch"):
        pytest.skip("encodes what it is given")
    clf, encoder = watched_classifier()
    run(name, toy_images(7), clf, max_batch=3)
    assert max(len(pixels) for pixels in encoder.seen) <= 3


@every_defense
def test_configurations_survive_json_and_refuse_what_they_do_not_know(name: str) -> None:
    guard = defenses.from_dict(name)
    assert isinstance(guard, Defense)
    assert isinstance(guard, Configuration)
    assert guard.name == name
    again = defenses.from_dict(json.loads(json.dumps(guard.to_dict())))
    assert again == guard
    assert hash(again) == hash(guard)
    assert repr(again) == repr(guard)
    with pytest.raises(rc.ReactClipError, match=f"{name} has no field 'speed'") as caught:
        defenses.from_dict({"kind": name, "speed": 1})
    assert "\n" not in str(caught.value)


@every_defense
def test_what_is_no_image_is_refused(name: str) -> None:
    for wrong in (toy_images(2) * 2.0, toy_images(2)[:, :2], toy_images(2)[..., :8]):
        with pytest.raises(rc.ReactClipError):
            run(name, wrong)


def fragile(name: str, field: str, value: Any, says: str) -> Any:
    return pytest.param(name, {field: value}, says, id=f"{name}-{field}-{value}")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        *[fragile(n, "eps", 8, "eps is 8; pixels lie in .0, 1., so write 8/255") for n in ("ttc", "doc", "mac", "hd")],
        *[fragile(n, "eps", -0.1, "eps is -0.1; it must be >= 0") for n in ("ttc", "doc", "mac", "hd")],
        *[fragile(n, "step_size", 2, "so write 2/255") for n in ("ttc", "doc", "mac", "hd", "anti-adv")],
        *[
            fragile(n, "step_size", "x", "must be a number such as 4/255")
            for n in ("ttc", "doc", "mac", "hd", "anti-adv")
        ],
        *[fragile(n, "steps", 0, "whole number >= 1") for n in ("ttc", "doc", "mac", "hd", "anti-adv")],
        *[fragile(n, "max_batch", 0, "max_batch is 0") for n in ("ttc", "doc", "mac", "hd", "anti-adv", "tte")],
        *[fragile(n, "tau", float("nan"), "tau is nan") for n in ("ttc", "doc", "mac")],
        fragile("ttc", "beta", float("inf"), "beta is inf"),
        fragile("doc", "momentum", -1, "momentum is -1; it must be >= 0"),
        fragile("doc", "diversity", -1, "diversity is -1"),
        fragile("doc", "gamma", None, "gamma is None"),
        fragile("doc", "probes", 0, "probes is 0"),
        fragile("mac", "temperature", 0, "temperature is 0; it must be > 0"),
        fragile("mac", "views", 0, "views is 0"),
        fragile(
            "mac",
            "augmentation",
            {"twirl": 1},
            "augmentation: WeakAugmentation has no field 'twirl'; its fields are rotation",
        ),
        fragile("tte", "crops", -1, "crops is -1; it must be a whole number >= 0"),
        fragile("tte", "crops", True, "crops is True"),
        fragile("tte", "padding", 4, "padding is 4; it must be <= 0.5"),
        fragile("tte", "padding", -0.1, "padding is -0.1"),
    ],
)
def test_impossible_values_are_refused_in_one_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        defenses.from_dict({"kind": name, **options})
    assert "\n" not in str(caught.value)
