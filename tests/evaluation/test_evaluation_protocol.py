"""What is attacked, what is scored, and what the result says: checked from the per-image rows by counting again."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import COUNT, SIZE, ToyEncoder, toy_attacks, toy_classifier, toy_defenses, toy_photos, toy_run
from safetensors import safe_open

import react_clip as rc
from react_clip.encoders.cache import ViewCache, cached_views
from react_clip.evaluation import EvaluationResult, evaluate, metrics
from react_clip.evaluation.store import Pictures


def test_leakage_free_attacks_exactly_what_clip_gets_right(finished: Any, rows_of: Any) -> None:
    folder, _ = finished
    x, y = toy_photos()
    plain = toy_classifier()(x).argmax(1)
    for row in rows_of(folder):
        right = bool(plain[row["index"]] == y[row["index"]])
        assert row["clean_prediction"] == plain[row["index"]]
        assert row["attacked"] == (right and row["attack"] != "clean")
        if not row["attacked"]:
            assert row["plain_prediction"] == row["clean_prediction"]
            assert not row["attack_success"]


def test_what_is_not_attacked_passes_through_unperturbed(finished: Any, rows_of: Any) -> None:
    clean = {}
    keys = ("prediction", "r", "J", "score", "gated", "sigma", "passes")
    for row in rows_of(finished[0]):
        place = (row["index"], row["defense"], row["draw"])
        answer = [row[key] for key in keys]
        if row["attack"] == "clean":
            clean[place] = answer
        elif not row["attacked"]:
            assert answer == clean[place]


def test_natural_damage_reaches_every_image_and_has_no_budget(tmp_path: Path, rows_of: Any) -> None:
    attack = rc.attacks.Corruption(type="noise", severity=0.05)
    result = toy_run(tmp_path / "run", attacks=[attack], self_check=False)
    x, y = toy_photos()
    clf = toy_classifier()
    plain = clf(attack(clf, x, y).images).argmax(1)
    assert (plain != clf(x).argmax(1)).any(), "the noise must change an answer for this test to say anything"
    damaged = [row for row in rows_of(tmp_path / "run") if row["attack"] == "noise-0.05"]
    assert all(
        row["attacked"] and row["eps"] == 0 and row["plain_prediction"] == plain[row["index"]] for row in damaged
    )
    assert "noise-0.05, " in str(result)


def test_rows_are_what_the_per_image_file_says(finished: Any, rows_of: Any) -> None:
    folder, result = finished
    groups = defaultdict(list)
    for row in rows_of(folder):
        groups[row["attack"], row["eps"], row["defense"]].append(row)
    found = result.select(dataset="data")
    assert len(found) == len(groups) == 6
    for row in found:
        group = groups[row.attack, row.eps, row.defense]
        by_image = defaultdict(list)
        for item in group:
            assert item["correct"] == (item["prediction"] == item["label"])
            by_image[item["index"]].append(item["correct"])
        assert len(by_image) == row.n == COUNT
        assert row.accuracy == pytest.approx(sum(item["correct"] for item in group) / len(group))
        assert row.worst == pytest.approx(sum(all(c) for c in by_image.values()) / COUNT)
        assert row.majority == pytest.approx(sum(sum(c) * 2 > len(c) for c in by_image.values()) / COUNT)
        assert row.passes == pytest.approx(sum(item["passes"] for item in group) / len(group))
        assert row.attacked == sum(item["attacked"] for item in group) / 2
        right = [i for i in group if i["clean_prediction"] == i["label"] and (row.attack == "clean" or i["attacked"])]
        assert row.gate_rate == pytest.approx(sum(i["gated"] for i in right) / len(right))
        assert row.leakage == 0
        interval = metrics.wilson(row.accuracy, row.n)
        assert (row.low, row.high) == (interval.low, interval.high)
        assert row.low <= row.accuracy <= row.high
        assert (row.threat, row.scoring) == ("oblivious", "leakage_free")


def test_draws_are_the_defence_with_the_next_seeds(tmp_path: Path, rows_of: Any) -> None:
    guard = rc.ReACT(tau=0.3, views=3)
    toy_run(tmp_path, defenses=[guard], attacks=[], draws=3, seed=5)
    x, _ = toy_photos()
    for draw, seed in enumerate((5, 6, 7)):
        expected = torch.cat([guard(toy_classifier(), x[i : i + 8], seed=seed).labels for i in range(0, COUNT, 8)])
        rows = [row for row in rows_of(tmp_path) if row["draw"] == draw]
        assert [row["prediction"] for row in rows] == expected.tolist()
        assert {row["seed"] for row in rows} == {seed}
        assert {row["attack_seed"] for row in rows} == {5}


def test_draws_differ_and_worst_is_below_the_mean(finished: Any) -> None:
    (row,) = finished[1].select(dataset="data", attack="pgd-10", defense="react")
    assert row.worst < row.accuracy
    assert finished[1].defense_seeds == (0, 1)


def test_results_do_not_depend_on_the_batch(finished: Any, rows_of: Any, tmp_path: Path) -> None:
    toy_run(tmp_path, batch=13)
    wanted = ("index", "attack", "eps", "defense", "draw", "attacked", "plain_prediction", "prediction", "gated")
    once, again = ([{key: row[key] for key in wanted} for row in rows_of(folder)] for folder in (finished[0], tmp_path))
    assert once == again


def test_attack_all_attacks_everything_and_counts_the_leakage(tmp_path: Path, rows_of: Any) -> None:
    result = toy_run(tmp_path, scoring="attack_all", draws=1)
    rows = rows_of(tmp_path)
    assert all(row["attacked"] for row in rows if row["attack"] != "clean")
    leaked = [r for r in rows if r["attacked"] and r["clean_prediction"] != r["label"] and r["correct"]]
    by_attack = {
        (attack.name, guard): sum(r["attack"] == attack.name and r["defense"] == guard for r in leaked)
        for attack in toy_attacks()
        for guard in ("undefended", "react")
    }
    assert sum(by_attack.values()) > 0, "the toy should leak, or this test checks nothing"
    for (attack, guard), count in by_attack.items():
        for dataset in ("data", "mean"):
            (row,) = result.select(dataset=dataset, attack=attack, defense=guard)
            assert row.leakage == count
            assert row.leakage_share == pytest.approx(count / COUNT)
    assert "leaked" in str(result)


@pytest.mark.parametrize(("store", "dtype"), [("float16", torch.float16), ("uint8", torch.uint8)])
def test_adversarial_images_are_stored_as_asked(tmp_path: Path, store: str, dtype: torch.dtype, rows_of: Any) -> None:
    result = toy_run(tmp_path, store=store, draws=1)
    x, _ = toy_photos()
    plain = {(r["eps"], r["index"]): r["plain_prediction"] for r in rows_of(tmp_path) if r["attacked"]}
    seen = 0
    for path in (tmp_path / "shards").glob("*/pgd*/images/*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            assert "rounding can kill an attack" in json.loads(shard.metadata()["react-clip"])["note"]
            eps = 1 / 255 if "pgd-10" in str(path) else 4 / 255
            images, index = shard.get_tensor("images"), shard.get_tensor("index")
        assert images.dtype == dtype
        pixels = images.float() / 255 if dtype == torch.uint8 else images.float()
        assert (pixels - x[index]).abs().max() <= eps + 1e-6
        answers = toy_classifier()(pixels).argmax(1)
        assert answers.tolist() == [plain[eps, int(i)] for i in index]
        seen += len(index)
    assert seen == len(plain) > 20
    assert any("rounding can kill an attack" in note for note in result.notes)


def test_rounding_losses_are_counted(tmp_path: Path) -> None:
    # Half a grey level cannot be kept in bytes: every attack is rounded away.
    attack = rc.attacks.PGD(eps=0.49 / 255, steps=3, step_size=0.2 / 255, random_start=False)
    photos = toy_photos(amplitude=0.2)
    result = toy_run(tmp_path, store="uint8", attacks=[attack], data=photos, self_check=False)
    (row,) = result.attacks
    assert row.success_rate == 0
    assert row.lost_to_rounding > 0
    assert any("had succeeded and no longer do" in note for note in result.notes)


def test_not_storing_gives_the_same_pixels_again(tmp_path: Path, rows_of: Any) -> None:
    toy_run(tmp_path, store="none")
    before = rows_of(tmp_path)
    assert Pictures(tmp_path).clean("data", 0) is None
    assert Pictures(tmp_path).attacked("data", "pgd-10", 1 / 255, 0) is None
    assert not any("images" in safe_open(p, "pt").keys() for p in tmp_path.glob("shards/*/*/images/*"))  # noqa: SIM118
    for path in tmp_path.glob("shards/*/pgd*/react/draw-1/*"):
        path.unlink()
    toy_run(tmp_path, store="none")
    assert rows_of(tmp_path) == before


class NeverRight(ToyEncoder):
    """Features that point away from every class."""

    def _image_features(self, normalised: torch.Tensor) -> torch.Tensor:
        return -super()._image_features(normalised).abs() + torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0])


def test_nothing_right_means_nothing_to_attack(tmp_path: Path) -> None:
    clf = rc.ZeroShotClassifier.from_features(NeverRight(), list("abcde"), torch.eye(5))
    x, y = toy_photos()
    data = (x[y != 4], y[y != 4])
    options: dict[str, Any] = {"attacks": toy_attacks(), "progress": False}
    result = evaluate(clf, toy_defenses(), data, run_dir=tmp_path / "off", self_check=False, **options)
    (row,) = result.select(dataset="mean", attack="pgd-10", defense="react")
    assert row.attacked == 0
    assert math.isnan(row.gate_rate)
    assert all(math.isnan(attack.success_rate) for attack in result.attacks)
    with pytest.raises(rc.ReactClipError, match="gets no clean image of data right"):
        evaluate(clf, toy_defenses(), data, run_dir=tmp_path / "on", **options)


def test_the_self_check_refuses_a_model_that_pgd_does_not_break(tmp_path: Path) -> None:
    robust = toy_photos(amplitude=20)
    with pytest.raises(rc.ReactClipError, match=r"leaves undefended CLIP 100 % .* the attack or the model is broken"):
        toy_run(tmp_path / "own", data=robust)
    assert (tmp_path / "own" / "per_image.parquet").exists()
    assert not (tmp_path / "own" / "result.json").exists()
    with pytest.raises(rc.ReactClipError, match="the attack or the model is broken"):
        toy_run(tmp_path / "small", data=robust, attacks=[])
    assert not (tmp_path / "small" / "result.json").exists()
    result = toy_run(tmp_path / "off", data=robust, attacks=[], self_check=False)
    assert not result.self_check.enabled
    assert any("self-check" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"defenses": [rc.ReACT(), rc.ReACT(tau=0.1)]}, "defence 'react' is there 2 times; give one of them a label"),
        ({"attacks": [rc.attacks.PGD(), rc.attacks.PGD(step_size="eps/4"), rc.attacks.PGD()]}, "'pgd-10 4/255'"),
        ({"attacks": [rc.ReACT()]}, "the attack is ReACT.*; give its kind"),
        ({"defenses": [3]}, "defenses holds 3; an entry is a name, a mapping or an object"),
        ({"scoring": "fair"}, "choose one of leakage_free, attack_all"),
        ({"threat": "adaptive"}, "belongs to oblivious or transfer"),
        ({"store": "png"}, "choose one of float16, uint8, none"),
        ({"draws": 0}, "whole number >= 1"),
        ({"batch": True}, "batch is True; it must be a whole number"),
        ({"data": (torch.rand(4, 3, 32, 32) * 255, torch.zeros(4).long())}, r"must lie in \[0, 1\]"),
        ({"data": (torch.rand(4, 3, 32, 32), torch.zeros(3).long())}, "one class index each"),
        ({"data": (torch.rand(4, 3, 32, 32), torch.zeros(4))}, "one class index each"),
        ({"data": (torch.rand(4, 3, 32, 32), torch.full((4,), 5))}, "they must lie in 0 to 4"),
        ({"data": [1, 2]}, "no ImageDataset and no pair"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message) as caught:
        toy_run(tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


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
