"""What holds for every defence: shapes, seeds, batches, classes, passes, gates, gradients and configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import defenses, noise
from react_clip.defenses import Defended, Defense, batch
from react_clip.defenses.base import forced_answers
from toys import toy_classifier, toy_images

from .conftest import F64, classifier, photos

SEEDLESS = {"undefended", "anti-adv", "clipure", "csr", "et3"}
TEXT = {"r-tpt": {"views": 9, "selected": 3, "neighbours": 4}, "ss-tpt": {"views": 6}}
"""Fields of the defences that need a text tower, which are tried on a small complete CLIP instead of the toy."""
GATES = {
    **{"react": "tau", "defend-clip": "tau", "ttc": "tau"},
    **{"second_look": "threshold", "csr": "threshold", "dbd": "threshold"},
}
"""Defences with a gate, and the field of its threshold."""
GATES_OPEN = {"ttc": {"tau": 1e9}, "csr": {"threshold": 1.0}}
every_defense = pytest.mark.parametrize("name", defenses.names())
every_toy_defense = pytest.mark.parametrize("name", [name for name in defenses.names() if name not in TEXT])


class Trial:
    """A defence with a classifier that it can run on, and images for it."""

    def __init__(self, name: str, tiny: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
        # After an even number of steps CLIPure is back where it began.
        self.guard = defenses.from_dict({"kind": name, **TEXT.get(name, {"steps": 9} if name == "clipure" else {})})
        self.clf, self.images = toy_classifier(dtype), toy_images(7, dtype=dtype)
        if name in TEXT and tiny:
            self.clf, self.images = classifier(rc.load(tiny, device="cpu", dtype=dtype)), photos(7, dtype)
        if name in GATES:  # between the scores, so that both sides of the gate are tried
            score = self.guard(self.clf, self.images).score.sort().values
            self.guard = self.guard.replace(**{GATES[name]: float(score[3:5].mean())})

    def run(self, images: Tensor, seed: int | bytes = 0) -> Defended:
        return self.guard(self.clf, images, seed=seed)


def fields(out: Defended) -> dict[str, Tensor]:
    names = ("features", "logits", "gated", "passes", "backward_passes")
    return {**{name: getattr(out, name) for name in names}, **out.diagnostics}


def assert_same(one: Defended, other: Defended, rows: slice | list[int] = slice(None), atol: float = 1e-9) -> None:
    assert fields(one).keys() == fields(other).keys()
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
    assert out.features.shape == (5, clf.encoder.dim)
    assert out.logits.shape == (5, len(clf.names))
    assert out.features.dtype == out.logits.dtype == torch.float32
    assert torch.isfinite(out.logits).all()
    assert torch.allclose(out.features.norm(dim=1), torch.ones(5), atol=1e-5)
    assert out.names == [clf.names[i] for i in out.labels.tolist()]
    for diagnostic in ("gated", "passes", "drift", "instability", "score", "sigma", *out.diagnostics):
        assert getattr(out, diagnostic).shape == (5,), diagnostic
    assert not any(value.requires_grad for value in fields(out).values())
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), random_state), "global randomness was used"
    assert all(torch.equal(value, weights[key]) for key, value in clf.state_dict().items())
    assert all(parameter.grad is None for parameter in clf.parameters()), "weights that want gradients get none"


@every_defense
def test_an_image_gets_the_same_answer_alone_in_any_batch_and_in_parts(
    name: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(name, tiny_folder, F64)
    images, atol = trial.images, 1e-6 if name in (*TEXT, "dbd", "clipure") else 1e-9
    whole = trial.run(images)
    for i in (0, 5):
        assert_same(trial.run(images[i : i + 1]), whole, [i], atol)
    order = [3, 0, 6, 5, 1, 2, 4]
    assert_same(trial.run(images[order]), whole, order, atol)
    monkeypatch.setattr(batch, "VIEWS", 4)
    monkeypatch.setattr(batch, "VIEWS_WITH_GRADIENTS", 3)
    assert_same(trial.run(images), whole, atol=atol)


@every_defense
def test_the_answer_follows_from_the_seed_with_and_without_gradients(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder, F64)
    images, secret = trial.images[:3], b"a secret of many bytes"
    one = trial.run(images, seed=1)
    assert torch.equal(trial.run(images, seed=2).logits, one.logits) == (name in SEEDLESS)
    assert torch.equal(trial.run(images, seed=secret).logits, trial.run(images, seed=secret).logits)
    with torch.inference_mode():
        made_here = images * 1.0
        assert made_here.is_inference()
        assert_same(trial.run(made_here, seed=1), one, atol=0)


@every_defense
def test_passes_are_those_of_the_encoder(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder)
    for part in (trial.images, trial.images[:1]):
        with trial.clf.encoder.counting() as count:
            out = trial.run(part)
        assert count.forward == pytest.approx(float(out.passes.sum()))
        # Those of prompt tuning are the text tower's.
        assert name in TEXT or count.backward == float(out.backward_passes.sum())


@every_defense
def test_gated_is_true_exactly_where_the_feature_is_not_the_images_own(name: str, tiny_folder: Path) -> None:
    trial = Trial(name, tiny_folder, F64)
    out = trial.run(trial.images)
    changed = (out.features - rc.Undefended()(trial.clf, trial.images).features).abs().amax(1) > 1e-12
    assert torch.equal(out.gated, changed)
    assert ("gate_open" in out.diagnostics) == (name in GATES)


@pytest.mark.parametrize("name", GATES)
def test_every_gate_can_be_forced_by_an_attacker(name: str) -> None:
    trial = Trial(name, dtype=F64)
    out = trial.run(trial.images)
    assert 0 < out.gate_open.sum() < 7, "both sides of the gate must be tried"
    pixels = trial.images.clone().requires_grad_()
    forced = forced_answers(trial.guard, trial.clf, pixels, 0)
    assert torch.equal(forced.gate.open, out.gate_open)
    assert torch.equal(forced.gate.open, forced.gate.margin >= 0)
    opened, closed, gated = forced.opened, forced.closed, forced.gate.open[:, None]
    assert torch.allclose(torch.where(gated, opened.features, closed.features), out.features, atol=1e-9)
    assert torch.allclose(torch.where(gated, opened.logits, closed.logits), out.logits, atol=1e-7)
    assert (closed.features - opened.features).abs().amax(1).min() > 0
    for answers in (closed, opened):
        assert torch.autograd.grad(answers.logits[:, 0].sum(), pixels, retain_graph=True)[0].abs().sum() > 0


@every_toy_defense
def test_an_attacker_gets_both_answers_for_the_passes_of_one(name: str) -> None:
    trial = Trial(name)
    once = trial.guard.replace(**GATES_OPEN.get(name, {})).run(
        trial.clf.encoder, trial.images, 0, trial.clf, skip_unneeded=False
    )
    with trial.clf.encoder.counting() as count:
        forced = forced_answers(trial.guard, trial.clf, trial.images, 0)
    # Beside these, the plain answer of a defence that does not need it, or the answer before the pixels are moved.
    assert count.forward <= float(once.passes.sum()) + 7 + 1e-3
    if name not in GATES:
        assert torch.allclose(forced.closed.features, trial.clf.encoder(trial.images), atol=1e-6)
        assert torch.allclose(forced.opened.features, trial.run(trial.images).features, atol=1e-4)
        assert forced.gate.open.all()
        assert (forced.gate.margin == torch.inf).all()


@every_toy_defense
def test_images_may_have_classes_of_their_own_and_no_view_need_be_skipped(name: str) -> None:
    trial = Trial(name, dtype=F64)
    three = toy_classifier(F64, classes=3)
    lists = [trial.clf, three, trial.clf, three, trial.clf, trial.clf, three]
    keys = noise.stream_keys(trial.images, 5)
    out = trial.guard.run(trial.clf.encoder, trial.images, keys, lists)
    assert out.logits.isinf().sum() == 3 * 2
    for clf in (trial.clf, three):
        rows = [row for row, each in enumerate(lists) if each is clf]
        alone = trial.guard.run(clf.encoder, trial.images[rows], keys[rows], clf)
        assert torch.allclose(out.features[rows], alone.features, atol=1e-6)
        assert torch.allclose(out.logits[rows][:, : len(clf.names)], alone.logits, atol=1e-5)
        assert [out.names[row] for row in rows] == alone.names
    every_view = trial.guard.run(trial.clf.encoder, trial.images, 0, trial.clf, skip_unneeded=False)
    assert torch.allclose(every_view.features, trial.run(trial.images).features, atol=1e-9)
    # TTC and CSR take gradients for the images that they move alone.
    assert name in ("ttc", "csr") or len(set(every_view.passes.tolist())) == 1, "every image takes the same time"


@every_toy_defense
def test_an_encoder_that_maps_everything_to_one_point_gives_finite_answers(name: str) -> None:
    clf, images = toy_classifier(), toy_images(3)
    for parameter in clf.encoder.tower[0].parameters():
        parameter.data.zero_()
    out = defenses.from_dict(name)(clf, images)
    assert torch.isfinite(out.features).all()
    assert not any(value.isinf().any() for value in out.diagnostics.values())
    assert name != "react" or out.drift.tolist() == [0, 0, 0]
    # The angle of AGC is at least the arc cosine of 1 - 1e-7.
    atol = 1e-3 if name == "agc" else 1e-6
    assert name == "clipure" or torch.allclose(out.features, clf.encoder(images), atol=atol)


@every_toy_defense
@pytest.mark.parametrize("differentiable", [True, False])
def test_gradients_reach_the_pixels(name: str, differentiable: bool) -> None:
    """With recomputed and with kept activations."""
    trial = Trial(name, dtype=F64)
    pixels = trial.images.clone().requires_grad_()
    logits = rc.as_module(trial.clf, trial.guard, differentiable=differentiable)(pixels)
    assert torch.allclose(logits.detach(), trial.run(trial.images).logits, atol=1e-5)
    slope = torch.autograd.grad(logits[:, 0].sum(), pixels)[0]
    assert torch.isfinite(slope).all()
    assert (slope.flatten(1).abs().sum(1) > 0).all()


@every_defense
def test_configurations_survive_json_and_those_of_the_last_release_can_be_read(name: str) -> None:
    guard = defenses.from_dict(name)
    assert isinstance(guard, Defense)
    assert guard.name == name
    again = defenses.from_dict(json.loads(json.dumps(guard.to_dict())))
    assert (again, hash(again), repr(again)) == (guard, hash(guard), repr(guard))
    assert defenses.from_dict({**guard.to_dict(), "lazy": True, "max_batch": 128, "jitter": 0.0}) == guard
    for field, value, says in (("speed", 1, "speed is 1: "), ("jitter", 0.5, f"{name} no longer has 'jitter'")):
        with pytest.raises(rc.ReactClipError, match=says):
            defenses.from_dict({"kind": name, field: value})


def test_bad_input_is_refused_in_one_line() -> None:
    guard, clf, images = rc.SecondLook(), toy_classifier(), toy_images(2)
    wrong: Any
    for wrong in (images * 2.0, images[:, :2], images[..., :8], images.byte()):
        with pytest.raises(rc.ReactClipError):
            guard(clf, wrong)
    for arguments, seed, says in (
        ((images, clf), 0, "first argument is of type Tensor; call guard"),
        ((clf, images), "12345", "seed is of type str; give a whole number"),
        ((clf, images), 0.5, "seed is of type float"),
        ((clf, images), b"", "the secret has 0 bytes, which can be guessed"),
        ((clf, images), b"my-secret", "the secret has 9 bytes"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            guard(*arguments, seed=seed)  # type: ignore[arg-type]
    for secret, says in (
        ("my own secret key", "type str; give at least 16 bytes"),
        (b"short", "has 5 bytes"),
        (7, "type int"),
    ):
        with pytest.raises(rc.ReactClipError, match=says):
            guard(clf, images, secret=secret)
    with pytest.raises(rc.ReactClipError, match="seed and secret are both given"):
        guard(clf, images, seed=0, secret=bytes(32))


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("react", "sigma_low", 0.05, "need 0 < sigma_low < sigma_high"),
        ("r-tpt", "selected", 65, "selected is 65; there are only 64 views"),
        ("r-tpt", "neighbours", 64, "neighbours is 64; a view has only 63 others"),
        ("r-tpt", "words", " ", "words is ' ': "),
        ("r-tpt", "augmix", {"area": [0.5, 1.5]}, "augmix: area is"),
        ("ss-tpt", "augmentation", {"blur_kernel": 4}, "augmentation: blur_kernel is 4; it must be odd"),
    ],
)
def test_impossible_values_are_refused_in_one_line(name: str, field: str, value: Any, says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says):
        defenses.from_dict({"kind": name, field: value})


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
    assert rc.Undefended()(clf, images).drift.isnan().all()
    features = rc.SecondLook().run(clf.encoder, images, 0)
    assert features.to_dict()[0].keys() >= {"gated", "passes", "score"}
    with pytest.raises(rc.ReactClipError, match="without classes"):
        _ = features.logits
    with pytest.raises(rc.ReactClipError, match="give a classifier with labels"):
        defenses.CLIPure().run(clf.encoder, images, 0)
    with pytest.raises(AttributeError, match="'speed' is no field or diagnostic; there are drift"):
        _ = features.speed


def test_constants_exist_for_encoders_that_were_calibrated_only() -> None:
    for kind, name in ((rc.defenses.DefendCLIP, "clip-vit-b-16"), (rc.SecondLook, "openai/clip-vit-base-patch32")):
        with pytest.raises(rc.ReactClipError, match=f"`react-clip calibrate PHOTOS --model {name}"):
            kind.for_encoder(name)
