"""Properties of every defence: shapes, seeds, batches, passes and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import defenses
from react_clip.defenses import Defended, Defense
from toys import toy_classifier, toy_images

from .prompt_toys import classifier, photos
from .watching import F64, watched_classifier

SEEDLESS = {"undefended", "anti-adv", "clipure", "csr", "et3"}
WHOLE_BATCH = {"undefended", "clipure"}
"""Defences that encode the batch as it is given."""
PER_IMAGE = {"clipure": {"batch": 1}}
"""Fields with which an answer does not depend on the batch, where those of the published code make it depend."""
SMALL = {"r-tpt": {"views": 9, "selected": 3, "neighbours": 4}, "ss-tpt": {"views": 6}}
"""Fields of the defences that need a text tower, which are tried on a small complete CLIP instead of the toy."""
IN_A_BALL = ("ttc", "doc", "mac", "hd", "csr", "et3")
every_defense = pytest.mark.parametrize("name", defenses.names())
every_toy_defense = pytest.mark.parametrize("name", [name for name in defenses.names() if name not in SMALL])


class Trial:
    """A defence with a classifier that it can run on, and images for it."""

    def __init__(self, name: str, tiny: Path, dtype: torch.dtype = torch.float32) -> None:
        self.guard = defenses.from_dict({"kind": name, **SMALL.get(name, {})})
        self.clf = classifier(rc.load(tiny, device="cpu", dtype=dtype)) if name in SMALL else toy_classifier(dtype)
        self.images = photos(7, dtype) if name in SMALL else toy_images(7, dtype=dtype)

    def run(self, images: Tensor, seed: int | bytes = 0, **changes: Any) -> Defended:
        return self.guard.replace(**changes)(self.clf, images, seed=seed)


def fields(out: Defended) -> dict[str, Tensor]:
    return {name: value for name, value in vars(out).items() if isinstance(value, Tensor)}


def assert_same(one: Defended, other: Defended, rows: slice | list[int] = slice(None), atol: float = 1e-9) -> None:
    for name, value in fields(one).items():
        expected = fields(other)[name][rows]
        assert value.dtype == expected.dtype, name
        assert torch.allclose(value.double(), expected.double(), atol=atol, equal_nan=True), name


@every_defense
def test_answers_have_the_right_shapes_and_nothing_else_changes(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder)
    clf, images = trial.clf, trial.images[:5]
    before, weights = images.clone(), {k: v.clone() for k, v in clf.state_dict().items()}
    random_state = torch.get_rng_state()
    clf.encoder.requires_grad_(True)
    out = trial.run(images)
    assert len(out) == 5
    assert out.features.shape == (5, clf.encoder.dim)
    assert out.logits.shape == (5, len(clf.names))
    assert out.features.dtype == out.logits.dtype == torch.float32
    assert torch.isfinite(out.logits).all()
    assert torch.allclose(out.features.norm(dim=1), torch.ones(5), atol=1e-5)
    assert out.names == [clf.names[i] for i in out.labels.tolist()]
    for field in ("drift_low", "drift_high", "drift", "instability", "score", "gated", "sigma"):
        assert getattr(out, field).shape == (5,), field
    assert out.gated.dtype == torch.bool
    assert out.passes.dtype == (torch.float32 if name == "second_look" else torch.long)
    assert out.backward_passes.dtype == torch.long
    assert not any(value.requires_grad for value in fields(out).values())

    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state), "global randomness was used"
    assert all(torch.equal(value, weights[key]) for key, value in clf.state_dict().items())
    assert all(parameter.grad is None for parameter in clf.parameters()), "weights that want gradients get none"


@every_defense
def test_an_image_gets_the_same_answer_alone_in_any_batch_and_in_any_chunks(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder, F64)
    trial.guard = trial.guard.replace(**PER_IMAGE.get(name, {}))
    images, atol = trial.images, 1e-6 if name in (*SMALL, "dbd") else 1e-9
    whole = trial.run(images)
    for i in range(len(images)):
        assert_same(trial.run(images[i : i + 1]), whole, [i], atol)
    order = [3, 0, 6, 5, 1, 2, 4]
    assert_same(trial.run(images[order]), whole, order, atol)
    for max_batch in (3, 1000) if hasattr(trial.guard, "max_batch") else ():
        assert_same(trial.run(images, max_batch=max_batch), whole, atol=atol)


@every_defense
def test_the_answer_follows_from_the_seed(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder)
    images = trial.images[:4]
    one = trial.run(images, seed=1)
    assert_same(trial.run(images, seed=1), one, atol=0)
    assert torch.equal(trial.run(images, seed=2).logits, one.logits) == (name in SEEDLESS)
    assert torch.equal(trial.run(images, seed=b"a secret").logits, trial.run(images, seed=b"a secret").logits)


@every_defense
def test_answers_are_the_same_without_gradients(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder, F64)
    images = trial.images[:3]
    plain = trial.run(images)
    with torch.no_grad():
        assert_same(trial.run(images), plain, atol=1e-6)
    with torch.inference_mode():
        assert_same(trial.run(images), plain, atol=1e-6)
        made_here = images * 1.0
        assert made_here.is_inference()
        assert_same(trial.run(made_here), plain, atol=1e-6)


@pytest.mark.parametrize(
    "guard",
    [
        *[defenses.from_dict(name) for name in defenses.names() if name not in SMALL],
        rc.ReACT(tau=-1e9, sequential=0.9),
        defenses.AOM(sequential=0.9),
    ],
    ids=repr,
)
def test_passes_are_those_of_the_encoder_and_calls_are_no_larger_than_max_batch(guard: Any) -> None:
    images = toy_images(12)
    limit = 5 if hasattr(guard, "max_batch") else len(images)
    guard = guard if limit > 5 else guard.replace(max_batch=limit)
    for part in (images, images[:1]):
        clf, encoder = watched_classifier()
        out = guard(clf, part)
        assert encoder.encoded == int(out.passes.sum())
        assert encoder.reversed == int(out.backward_passes.sum())
        forward, backward = guard.cost()
        assert int(out.passes.max()) <= forward
        assert int(out.backward_passes.max()) <= backward
        assert max(len(pixels) for pixels in encoder.seen) <= limit
    if getattr(guard, "sequential", None):
        assert len(set(guard(clf, images).passes.tolist())) == 2, "some images must stop early, others not"


@every_defense
def test_configurations_survive_json_and_refuse_unknown_fields(name: str) -> None:
    guard = defenses.from_dict(name)
    assert isinstance(guard, Defense)
    assert guard.name == name
    again = defenses.from_dict(json.loads(json.dumps(guard.to_dict())))
    assert again == guard
    assert hash(again) == hash(guard)
    assert repr(again) == repr(guard)
    with pytest.raises(rc.ReactClipError, match=f"{name} has no field 'speed'") as caught:
        defenses.from_dict({"kind": name, "speed": 1})
    assert "\n" not in str(caught.value)


@every_toy_defense
def test_bad_pixels_are_refused(name: str) -> None:
    for wrong in (toy_images(2) * 2.0, toy_images(2)[:, :2], toy_images(2)[..., :8]):
        with pytest.raises(rc.ReactClipError):
            defenses.from_dict(name)(toy_classifier(), wrong)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        *[(name, "eps", 8, "eps is 8; pixels lie in .0, 1., so write 8/255") for name in IN_A_BALL],
        *[(name, "step_size", 2, "so write 2/255") for name in ("ttc", "doc", "mac", "hd", "anti-adv", "csr")],
        *[(name, "steps", 0, "whole number >= 1") for name in (*IN_A_BALL, "anti-adv", "clipure")],
        *[(name, "max_batch", 0, "max_batch is 0") for name in defenses.names() if name not in WHOLE_BATCH],
        *[(name, "tau", float("nan"), "tau is nan") for name in ("react", "ttc", "doc", "mac")],
        ("react", "sigma_low", 0.05, "need 0 < sigma_low < sigma_high"),
        ("react", "sigma_low", -0.1, "need 0 < sigma_low"),
        ("react", "alpha", -1.0, "alpha is -1.0; it must be >= 0"),
        *[("react", "sequential", share, f"sequential is {share}") for share in (0.4, 1.0)],
        ("second_look", "threshold", 2.2, "threshold is 2.2; it must be <= 2"),
        ("second_look", "threshold", -0.1, "threshold is -0.1; it must be >= 0"),
        ("second_look", "look", 1.0, "look is 1.0; it must be < 1"),
        ("clipure", "step_size", -1, "step_size is -1; it must be >= 0"),
        ("csr", "threshold", 1.5, "threshold is 1.5; it must be <= 1"),
        ("csr", "radius", 0, "radius is 0; it must be > 0"),
        ("et3", "step_size", -1, "step_size is -1; it must be >= 0"),
        ("agc", "views", 0, "views is 0"),
        ("dbd", "selected", 32, "selected is 32; it must be a whole number <= 31"),
        ("dbd", "threshold", -2, "threshold is -2; it must be >= -1"),
        ("agc", "beta_adv", -1, "beta_adv is -1; it must be >= 0"),
        ("clipure", "batch", 0, "batch is 0; it must be a whole number >= 1"),
        ("clipure", "graph", True, "graph is True"),
        ("doc", "momentum", -1, "momentum is -1; it must be >= 0"),
        ("doc", "diversity", -1, "diversity is -1"),
        ("doc", "momentum", 1.5, "momentum is 1.5"),
        ("mac", "temperature", 0, "temperature is 0; it must be > 0"),
        ("mac", "views", 0, "views is 0"),
        ("tte", "crops", -1, "crops is -1; it must be a whole number >= 0"),
        ("tte", "padding", 0, "padding is 0; it must be a whole number >= 1"),
        ("r-tpt", "selected", 65, "selected is 65; there are only 64 views"),
        ("r-tpt", "neighbours", 64, "neighbours is 64; a view has only 63 others"),
        ("r-tpt", "temperature", 0, "temperature is 0; it must be > 0"),
        ("r-tpt", "learning_rate", -1.0, "learning_rate is -1.0; it must be > 0"),
        ("r-tpt", "steps", -1, "steps is -1"),
        ("r-tpt", "words", " ", "words is ' '; give the words before the name"),
        ("r-tpt", "augmix", {"chains": -1}, "augmix: chains is -1; it must be a whole number >= 0"),
        ("r-tpt", "augmix", {"area": [0.5, 1.5]}, "augmix: area is"),
        ("r-tpt", "augmix", {"severity": 11.0}, "augmix: severity is 11.0"),
        ("ss-tpt", "selected", 1, "selected is 1; it must be a whole number >= 2"),
        ("ss-tpt", "suitability", 1.5, "suitability is 1.5; it must be <= 1"),
        ("ss-tpt", "weak_views", 1, "weak_views is 1; it must be true or false"),
        ("ss-tpt", "augmentation", {"blur_kernel": 4}, "augmentation: blur_kernel is 4; it must be odd"),
    ],
)
def test_impossible_values_are_refused_in_one_line(name: str, field: str, value: Any, says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        defenses.from_dict({"kind": name, field: value})
    assert "\n" not in str(caught.value)


def test_results_print_shortly_and_become_dictionaries_and_tables() -> None:
    clf, images = toy_classifier(), toy_images(6)
    for guard in (rc.Undefended(), rc.ReACT(), rc.SecondLook(threshold=0.5)):
        out = guard(clf, images)
        assert len(repr(out)) < 200
        assert f"6 images: {out.names[0]}" in repr(out)
        rows = json.loads(json.dumps(out.to_dict()))
        assert [row["name"] for row in rows] == out.names
        assert [row["gated"] for row in rows] == out.gated.tolist()
        table = out.to_pandas()
        assert table["probability"].tolist() == pytest.approx(out.probs.max(-1).values.tolist())
