"""Sweeps in recipes, results joined to one, the memory of views, and looking at a run's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import SIZE, toy_classifier, toy_photos, toy_run

import react_clip as rc
from react_clip.encoders.cache import ViewCache, cached_views
from react_clip.evaluation import EvaluationResult, Recipe
from react_clip.evaluation.result import merge
from react_clip.evaluation.store import Pictures

RECIPE: dict[str, Any] = {"model": "toy", "datasets": ["toy"]}


def with_defense(**entry: Any) -> Recipe:
    return Recipe.from_dict({**RECIPE, "defenses": [entry]})


def test_a_grid_is_every_combination() -> None:
    recipe = with_defense(
        defense="defend-clip", label="D", tau=0.5, grid={"mapping.sigma": [0.05, 0.1], "alpha": [1.0, 2.0]}
    )
    assert [item.label for item in recipe.defenses] == [
        *("D sigma=0.05 alpha=1", "D sigma=0.05 alpha=2", "D sigma=0.1 alpha=1", "D sigma=0.1 alpha=2")
    ]
    last: Any = recipe.defenses[-1].defense
    assert (last.mapping.sigma, last.alpha, last.tau, last.probe_samples) == (0.1, 2.0, 0.5, 10)
    assert {item.family for item in recipe.defenses} == {"D"}
    assert recipe.defenses[-1].params == {"mapping.sigma": 0.1, "alpha": 2.0}
    assert Recipe.from_dict(recipe.to_dict()).defenses == recipe.defenses, "the run's own recipe is written out"


def test_labels_show_swept_values_where_they_say_so() -> None:
    recipe = with_defense(defense="aom", label="{alpha:.2f} of AOM", grid={"alpha": [1.0, 2.0]})
    assert [item.label for item in recipe.defenses] == ["1.00 of AOM", "2.00 of AOM"]
    assert {item.family for item in recipe.defenses} == {"aom"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"label": "{tau}", "grid": {"alpha": [1.0]}}, "label '{tau}' shows 'tau', which the grid does not sweep"),
        ({"label": "{alpha:d}", "grid": {"alpha": [1.0]}}, "label '{alpha:d}' cannot show alpha"),
        ({"params": {"alpha": 3.0}}, "params of 'aom' says that alpha is 3.0; it is 1.2"),
        ({"params": [1]}, "params is .*it must be a mapping"),
        ({"family": "a\nb"}, "family is 'a.*one line of text"),
    ],
)
def test_coordinates_that_make_no_sense_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message):
        with_defense(defense="aom", **entry)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([1, 2], "grid is .* it maps fields to lists"),
        ({}, "it maps fields to lists"),
        ({"alpha": 2.0}, "grid field 'alpha' is 2.0; it must be a list"),
        ({"alpha": []}, "at least one value"),
        ({"strength": [1]}, "aom has no field 'strength'"),
        ({"alpha.x": [1]}, "leads into 'alpha', which is 1.2 and has no fields"),
        ({"alpha": [-1.0]}, "alpha is -1.0"),
        ({"alpha": list(range(30)), "views": list(range(1, 30))}, "stands for 870 defences; at most 400"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: Any, message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message):
        with_defense(defense="aom", grid=grid)


def test_views_that_were_encoded_before_are_not_encoded_again(tmp_path: Path) -> None:
    clf = toy_classifier()
    encoder: Any = clf.encoder
    encode, batches = encoder._image_features, []
    encoder._image_features = lambda views: (batches.append(len(views)), encode(views))[1]
    strengths = {f"alpha {alpha}": rc.defenses.AOM(alpha=alpha, views=3) for alpha in (0.5, 1.0, 2.0)}

    def run(name: str, chosen: dict[str, Any]) -> tuple[EvaluationResult, int]:
        batches.clear()
        result = rc.evaluate(clf, chosen, toy_photos(8), run_dir=tmp_path / name, progress=False, self_check=False)
        return result, sum(batches)

    together, shared_views = run("together", strengths)
    alone, own_views = run("alone", {"alpha 2.0": strengths["alpha 2.0"]})
    # One plain pass and one to learn the planned cost of a defence come on top of the 4 x 8 views of AOM.
    assert shared_views - own_views <= 8, "the second and third strength need no view of their own"
    assert [row.accuracy for row in together.select(defense="alpha 2.0")] == [row.accuracy for row in alone.rows]
    passes = {row.passes for row in together.rows}
    assert passes == {4.0}, "what a defence costs is what it would cost alone"


def test_the_view_cache_is_bounded_and_exact() -> None:
    cache, calls = ViewCache(limit_bytes=3 * 4 * 10), []

    def ask(views: torch.Tensor) -> torch.Tensor:
        return cache.get(views, lambda views: (calls.append(1), torch.full((1, 10), float(len(calls))))[1])

    batches = [torch.full((1, 3, 2, 2), value) for value in (0.1, 0.2, 0.3, 0.4)]
    first = [ask(batch) for batch in batches]
    assert torch.equal(ask(batches[3]), first[3])
    assert len(calls) == 4
    ask(batches[0])
    assert len(calls) == 5, "the oldest was dropped to make room"
    ask(batches[3] + 1e-7)
    assert len(calls) == 6, "another last bit is another view"
    cache.clear()
    ask(batches[3])
    assert len(calls) == 7


def test_gradients_are_never_cached() -> None:
    clf = toy_classifier()
    images = torch.rand(2, 3, SIZE, SIZE)
    with cached_views(clf.encoder, ViewCache()):
        with torch.no_grad():
            clf.encoder.encode_views(images)
        pixels = images.clone().requires_grad_()
        clf.encoder.encode_views(pixels).sum().backward()
    assert pixels.grad is not None
    assert bool(pixels.grad.abs().sum() > 0)


def test_runs_over_the_same_photos_are_joined(tmp_path: Path) -> None:
    one = toy_run(tmp_path / "a", defenses={"plain": rc.Undefended()})
    two = toy_run(tmp_path / "b", defenses={"guarded": rc.ReACT(tau=0.3, views=3)})
    both = merge([one, two])
    assert [row.defense for row in both.rows] == ["plain"] * len(one.rows) + ["guarded"] * len(two.rows)
    assert [item["label"] for item in both.recipe["defenses"]] == ["plain", "guarded"]
    with pytest.raises(rc.ReactClipError, match="'plain' is in several of the results"):
        merge([one, one])
    for other, reason in (
        (toy_run(tmp_path / "c", data=toy_photos(16), defenses={"x": rc.Undefended()}), "other photos or other"),
        (toy_run(tmp_path / "d", draws=1, defenses={"x": rc.Undefended()}), "draws is 2 in one and 1 in the other"),
        (toy_run(tmp_path / "e", attacks=[], defenses={"x": rc.Undefended()}), "other photos or other"),
    ):
        with pytest.raises(rc.ReactClipError, match=reason):
            merge([one, other])


def test_a_run_shows_its_pictures(finished: Any) -> None:
    folder, result = finished
    photos, _ = toy_photos()
    pictures = Pictures(folder)
    name = result.sets[0].name
    for index in (0, 13, 39):
        shown = pictures.clean(name, index)
        assert shown is not None
        assert torch.allclose(shown, photos[index], atol=1e-6)
    seen = 0
    for index in range(len(photos)):
        attacked = pictures.attacked(name, "pgd-3", 4 / 255, index)
        if attacked is not None:
            seen += 1
            assert 0 < (attacked - photos[index]).abs().max() <= 4 / 255 + 1e-6
    assert seen == result.select(attack="pgd-3")[0].attacked
    assert pictures.clean(name, 40) is None
    assert pictures.clean("nothing", 0) is None
    assert pictures.attacked(name, "pgd-3", 8 / 255, 0) is None


def test_a_run_that_keeps_no_images_shows_none(tmp_path: Path) -> None:
    toy_run(tmp_path, store="none", draws=1)
    assert Pictures(tmp_path).clean("data", 0) is None
    assert Pictures(tmp_path).attacked("data", "pgd-10", 1 / 255, 0) is None


def test_class_names_and_both_drifts_are_part_of_a_result(finished: Any, rows_of: Any) -> None:
    folder, _ = finished
    result = EvaluationResult.load(folder / "result.json")
    assert result.sets[0].class_names == tuple(f"class {number}" for number in range(5))
    rows = [row for row in rows_of(folder) if row["defense"] == "react"]
    for row in rows:
        assert row["r"] == pytest.approx((row["d_high"] - row["d_low"]) / row["d_low"], rel=1e-4)
