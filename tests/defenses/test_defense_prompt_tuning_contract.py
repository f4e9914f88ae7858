"""R-TPT and SS-TPT keep what every defence promises, and refuse what they cannot do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import react_clip as rc
from react_clip import defenses
from react_clip.defenses import RTPT, SSTPT, Defended
from react_clip.defenses.augmix import AugMix
from toys import toy_classifier, toy_images

from .prompt_toys import NAMES, both, classifier, photos

# ---------------------------------------------------------------------- what every defence promises


def tensors(out: Defended) -> dict[str, Tensor]:
    return {name: value for name, value in vars(out).items() if isinstance(value, Tensor)}


def assert_same(one: Defended, other: Defended, rows: Any = slice(None), atol: float = 1e-6) -> None:
    for name, value in tensors(one).items():
        assert torch.allclose(value.double(), tensors(other)[name][rows].double(), atol=atol, equal_nan=True), name


@both
def test_an_image_gets_the_same_answer_in_any_batch_and_in_any_chunks(clf: rc.ZeroShotClassifier, guard: Any) -> None:
    images = photos(4)
    whole = guard(clf, images, seed=b"secret")
    for i in range(4):
        assert_same(guard(clf, images[i : i + 1], seed=b"secret"), whole, [i])
    order = [2, 0, 3, 1]
    assert_same(guard(clf, images[order], seed=b"secret"), whole, order)
    for max_batch in (5, 13, 1000):
        assert_same(guard.replace(max_batch=max_batch)(clf, images, seed=b"secret"), whole)


@both
def test_the_seed_decides_and_nothing_else(clf: rc.ZeroShotClassifier, guard: Any) -> None:
    images = photos(2)
    one = guard(clf, images, seed=1)
    assert_same(guard(clf, images, seed=1), one, atol=0.0)
    assert (guard(clf, images, seed=2).logits - one.logits).abs().amax(1).min() > 1e-3


@both
def test_it_works_wherever_gradients_are_switched_off(clf: rc.ZeroShotClassifier, guard: Any) -> None:
    images = photos(2)
    plain = guard(clf, images)
    with torch.no_grad():
        assert_same(guard(clf, images), plain)
    with torch.inference_mode():
        assert_same(guard(clf, images), plain)
        made_here = photos(2) * 1.0
        assert made_here.is_inference()
        assert_same(guard.replace(max_batch=4)(clf, made_here), plain)


@both
def test_gradients_reach_the_pixels_when_asked_for(clf: rc.ZeroShotClassifier, guard: Any) -> None:
    images = photos(2).requires_grad_()
    rc.as_module(clf, guard)(images)[:, 0].sum().backward()
    assert images.grad is not None
    assert torch.isfinite(images.grad).all()
    assert images.grad.flatten(1).abs().sum(1).min() > 0


@both
@pytest.mark.parametrize("max_batch", [4, 64])
def test_passes_are_what_the_encoder_really_did(
    clf: rc.ZeroShotClassifier, guard: Any, max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"views": 0, "prompts": 0, "reversed": 0, "largest": 0}
    raw, embedded = clf.encoder.raw_features, clf.encoder.text.encode_embedded

    def watch_views(pixels: Tensor) -> Tensor:
        done["views"] += len(pixels)
        done["largest"] = max(done["largest"], len(pixels))
        return raw(pixels)

    def watch_prompts(embeddings: Tensor, ends: Tensor) -> Tensor:
        done["prompts"] += len(embeddings)
        done["largest"] = max(done["largest"], len(embeddings))
        if embeddings.requires_grad:
            embeddings.register_hook(lambda slope: done.update(reversed=done["reversed"] + len(slope)))
        return embedded(embeddings, ends)

    monkeypatch.setattr(clf.encoder, "raw_features", watch_views)
    monkeypatch.setattr(clf.encoder.text, "encode_embedded", watch_prompts)
    for steps in (0, 1, 2):
        done.update(dict.fromkeys(done, 0))
        chosen = guard.replace(max_batch=max_batch, steps=steps)
        out = chosen(clf, photos(3))
        assert done["views"] == int(out.passes.sum())
        assert done["reversed"] == len(NAMES) * int(out.backward_passes.sum())
        assert done["largest"] <= max_batch
        assert (int(out.passes.max()), int(out.backward_passes.max())) == chosen.cost()
        # The plain prompts once; then each image's for every step and for the answer; steps again where cut in pieces.
        runs = steps * (1 if len(NAMES) <= max_batch else 2) + 1
        assert done["prompts"] == len(NAMES) * (1 + 3 * runs)


def test_the_published_configurations_cost_this_much(clf: rc.ZeroShotClassifier) -> None:
    assert RTPT().cost() == (64, 1)
    assert SSTPT().cost() == (32, 1)
    out = RTPT()(clf, photos(1))
    assert out.passes.tolist() == [64]
    assert out.backward_passes.tolist() == [1]
    assert SSTPT()(clf, photos(1)).passes.tolist() == [32]


@pytest.mark.parametrize("name", ["r-tpt", "ss-tpt"])
def test_an_image_tower_alone_says_why_not(name: str) -> None:
    with pytest.raises(rc.ReactClipError, match=f"{name} tunes prompt tokens and 'toy' has no text tower; use a") as e:
        defenses.from_dict(name)(toy_classifier(), toy_images(1))
    assert "\n" not in str(e.value)


def test_other_text_towers_say_why_not(places: dict[str, str]) -> None:
    encoder = rc.load(places["open_clip"], device="cpu")
    encoder.tower.text_pool_type = "last"
    with pytest.raises(rc.ReactClipError, match="takes no token embeddings"):
        RTPT()(classifier(encoder), photos(1, torch.float32))


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    "guard",
    [
        RTPT(views=32, steps=2, augmix=AugMix(chains=0, area=(0.5, 1.0))),
        SSTPT(weak_views=True, suitability=0.0, augmentation=rc.augment.WeakAugmentation(rotation=3.0)),
    ],
    ids=["r-tpt", "ss-tpt"],
)
def test_configurations_survive_json(guard: Any) -> None:
    again = defenses.from_dict(json.loads(json.dumps(guard.to_dict())))
    assert again == guard
    assert hash(again) == hash(guard)
    assert guard != type(guard)()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("r-tpt", {"views": 0}, "views is 0"),
        ("r-tpt", {"selected": 65}, "selected is 65; there are only 64 views"),
        ("r-tpt", {"neighbours": 64}, "neighbours is 64; a view has only 63 others"),
        ("r-tpt", {"neighbours": 0}, "neighbours is 0"),
        ("r-tpt", {"temperature": 0}, "temperature is 0; it must be > 0"),
        ("r-tpt", {"learning_rate": -1.0}, "learning_rate is -1.0; it must be > 0"),
        ("r-tpt", {"steps": -1}, "steps is -1"),
        ("r-tpt", {"max_batch": 0}, "max_batch is 0"),
        ("r-tpt", {"words": " "}, "words is ' '; give the words before the name"),
        ("r-tpt", {"augmix": {"twirl": 1}}, "augmix: AugMix has no field 'twirl'"),
        ("r-tpt", {"augmix": {"chains": -1}}, "augmix: chains is -1; it must be a whole number >= 0"),
        ("ss-tpt", {"selected": 1}, "selected is 1; it must be a whole number >= 2"),
        ("ss-tpt", {"suitability": 1.5}, "suitability is 1.5; it must be <= 1"),
        ("ss-tpt", {"consistency": -1.0}, "consistency is -1.0; it must be >= 0"),
        ("ss-tpt", {"weak_views": 1}, "weak_views is 1"),
        ("ss-tpt", {"augmentation": {"twirl": 1}}, "augmentation: WeakAugmentation has no field 'twirl'"),
    ],
)
def test_impossible_values_are_refused_in_one_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(rc.ReactClipError, match=says) as caught:
        defenses.from_dict({"defense": name, **options})
    assert "\n" not in str(caught.value)
