"""What is attacked, what is scored, and what the result says: checked from the per-image rows by counting again."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from evaluation_toys import COUNT, SIZE, ToyEncoder, toy_attacks, toy_classifier, toy_defenses, toy_photos, toy_run
from safetensors import safe_open

import react_clip as rc
from react_clip.encoders.cache import ViewCache, cached_views
from react_clip.evaluation import Recipe, evaluate
from react_clip.evaluation.store import Pictures
from react_clip.report import tables


def test_only_what_clip_gets_right_is_attacked_and_the_rest_keeps_its_answers(finished: Any, rows_of: Any) -> None:
    x, y = toy_photos()
    plain = toy_classifier()(x).argmax(1)
    clean: dict[Any, dict[str, Any]] = {}
    for row in rows_of(finished[0]):
        right = bool(plain[row["index"]] == y[row["index"]])
        assert row["clean_prediction"] == plain[row["index"]]
        assert row["attacked"] == (right and row["attack"] != "clean")
        # The first rows of each image are the clean ones.
        before = clean.setdefault((row["index"], row["defense"], row["draw"]), row)
        if not row["attacked"]:
            different = {key for key in row if row[key] != before[key]}
            assert different <= {"attack", "eps"}


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


def test_the_worst_case_over_attacks_is_that_of_plain_loops(tmp_path: Path, rows_of: Any) -> None:
    recipe = {"perturbations": {"noise": [0.05]}, "attacks": [{"kind": "pgd", "steps": 1, "eps": ["1/255", "2/255"]}]}
    attacks = Recipe.from_dict({**recipe, "model": "toy", "datasets": ["data"], "defenses": ["undefended"]}).attacks
    assert [item.title for item in attacks] == ["noise-0.05", "pgd-1 1/255", "pgd-1 2/255"]
    for worst_of, count in ((["all"], 2), (["noise-0.05", "pgd-1 1/255"], 2), (["pgd-1 2/255"], 1)):
        folder = tmp_path / "-".join(worst_of).replace("/", "")
        result = toy_run(folder, attacks=[item.attack for item in attacks], worst_of=worst_of, draws=2)
        counted = [item for item in attacks if item.title in worst_of or (worst_of == ["all"] and item.eps)]
        titles = {(item.label, item.eps) for item in counted}
        answers = [row for row in rows_of(folder) if (row["attack"], row["eps"]) in titles]
        for row in result.select(dataset="data", attack=f"worst of {count}"):
            mine = [answer for answer in answers if answer["defense"] == row.defense]
            wrong = {(answer["index"], answer["draw"]) for answer in mine if not answer["correct"]}
            assert row.accuracy == pytest.approx(1 - len(wrong) / (2 * COUNT))
            assert row.eps == max(item.eps for item in counted)
        assert len(result.select(dataset="data", attack=f"worst of {count}")) == len(toy_defenses())


def test_rows_are_what_the_per_image_file_says(finished: Any) -> None:
    folder, result = finished
    images = pd.read_parquet(folder / "per_image.parquet")
    assert (images["correct"] == (images["prediction"] == images["label"])).all()
    groups = dict(list(images.groupby(["attack", "eps", "defense"], observed=True)))
    assert len(result.select(dataset="data")) == len(groups) == 6
    for row in result.select(dataset="data"):
        group = groups[row.attack, row.eps, row.defense]
        by_image = group.groupby("index")["correct"].mean()
        assert len(by_image) == row.n == COUNT
        assert row.accuracy == pytest.approx(group["correct"].mean())
        assert row.worst == pytest.approx((by_image == 1).mean())
        assert row.majority == pytest.approx((by_image > 0.5).mean())
        assert row.passes == pytest.approx(group["passes"].mean())
        assert row.attacked == group["attacked"].sum() / 2
        right = group[(group["clean_prediction"] == group["label"]) & (group["attacked"] | (row.attack == "clean"))]
        assert row.gate_rate == pytest.approx(right["gated"].mean())
        assert row.leakage == 0
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


def test_results_do_not_depend_on_the_batch(finished: Any, rows_of: Any, tmp_path: Path) -> None:
    toy_run(tmp_path, batch=13)
    wanted = ("index", "attack", "eps", "defense", "draw", "attacked", "plain_prediction", "prediction", "gated")
    once, again = ([{key: row[key] for key in wanted} for row in rows_of(folder)] for folder in (finished[0], tmp_path))
    assert once == again


def test_attack_all_attacks_everything_and_counts_the_leakage(tmp_path: Path, rows_of: Any) -> None:
    result = toy_run(tmp_path, scoring="attack_all", draws=1)
    rows = [row for row in rows_of(tmp_path) if row["attack"] != "clean"]
    assert all(row["attacked"] for row in rows)
    leaked = Counter((r["attack"], r["defense"]) for r in rows if r["clean_prediction"] != r["label"] and r["correct"])
    assert leaked, "the toy should leak, or this test checks nothing"
    table = tables.accuracy_table(result)
    assert "every image is attacked" in table.caption
    for row in result.rows:
        assert row.leakage == leaked[row.attack, row.defense]
        assert row.leakage_share == pytest.approx(row.leakage / COUNT)
        # No accuracy is shown without its leakage.
        assert f" ± {50 * (row.high - row.low):.1f} ({row.leakage:g} leaked)" in table.markdown()
    assert "pgd-10 1/255 leaked" in table.csv()
    assert "leaked" in str(result)


@pytest.mark.parametrize(("store", "dtype"), [("float16", torch.float16), ("uint8", torch.uint8)])
def test_adversarial_images_are_stored_as_asked(tmp_path: Path, store: str, dtype: torch.dtype, rows_of: Any) -> None:
    result = toy_run(tmp_path, store=store, draws=1)
    x, _ = toy_photos()
    plain = {(r["eps"], r["index"]): r["plain_prediction"] for r in rows_of(tmp_path) if r["attacked"]}
    seen = 0
    for path in (tmp_path / "shards").glob("*/pgd*/images/*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            assert "rounding can undo an attack" in json.loads(shard.metadata()["react-clip"])["note"]
            eps = 1 / 255 if "pgd-10" in str(path) else 4 / 255
            images, index = shard.get_tensor("images"), shard.get_tensor("index")
        assert images.dtype == dtype
        pixels = images.float() / 255 if dtype == torch.uint8 else images.float()
        assert (pixels - x[index]).abs().max() <= eps + 1e-6
        answers = toy_classifier()(pixels).argmax(1)
        assert answers.tolist() == [plain[eps, int(i)] for i in index]
        seen += len(index)
    assert seen == len(plain) > 20
    assert any("rounding can undo an attack" in note for note in result.notes)


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
        toy_run(tmp_path / "on", data=robust)
    assert not (tmp_path / "on" / "shards").exists(), "the check comes before the work"
    result = toy_run(tmp_path / "off", data=robust, attacks=[], self_check=False)
    assert not result.self_check.enabled
    assert "self-check was switched off" in tables.accuracy_table(result).caption
    assert any("self-check" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": [rc.attacks.PGD(), rc.attacks.PGD(step_size="eps/4"), rc.attacks.PGD()]}, "'pgd-10 4/255'"),
        ({"attacks": [rc.ReACT()]}, "the attack is ReACT.*; give its kind"),
        ({"defenses": [3]}, "it must be a list of names, mappings or objects"),
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
    options: dict[str, Any] = {"progress": False, "self_check": False}
    alone = evaluate(clf, {"alpha 2.0": strengths["alpha 2.0"]}, toy_photos(8), run_dir=tmp_path / "alone", **options)
    own_views = sum(batches)
    together = evaluate(clf, strengths, toy_photos(8), run_dir=tmp_path / "together", **options)
    assert sum(batches) - 2 * own_views <= 8, "the second and third strength need no view of their own"
    assert [row.accuracy for row in together.select(defense="alpha 2.0")] == [row.accuracy for row in alone.rows]
    assert {row.passes for row in together.rows} == {4.0}, "what a defence costs is what it would cost alone"


def test_the_view_cache_is_bounded_and_exact() -> None:
    cache, calls = ViewCache(limit_bytes=3 * 4 * 10), []

    def ask(value: float) -> int:
        """How often the encoder has been called after asking for one view."""
        cache.get(torch.full((1, 3, 2, 2), value), lambda views: (calls.append(1), torch.zeros(1, 10))[1])
        return len(calls)

    assert [ask(value) for value in (0.1, 0.2, 0.3, 0.4, 0.4)] == [1, 2, 3, 4, 4]
    assert ask(0.1) == 5, "the oldest was dropped to make room"
    assert ask(0.4 + 1e-7) == 6, "another last bit is another view"
    cache.clear()
    assert ask(0.4) == 7


def test_gradients_are_never_cached() -> None:
    encoder, pixels = ToyEncoder(), torch.rand(2, 3, SIZE, SIZE)
    with cached_views(encoder, ViewCache()):
        with torch.no_grad():
            encoder.encode_views(pixels)
        encoder.encode_views(pixels.requires_grad_()).sum().backward()
    assert pixels.grad is not None
    assert bool(pixels.grad.any())
