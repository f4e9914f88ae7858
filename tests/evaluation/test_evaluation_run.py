"""What is attacked, what is scored, and what a run leaves: checked from the answers by counting again."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import (
    CLASSES,
    COUNT,
    numbers,
    part_of,
    toy_classifier,
    toy_defenses,
    toy_photos,
    toy_run,
)
from torch import Tensor

import react_clip as rc
from react_clip import mappings
from react_clip.defenses.view import View
from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.results import join, load
from react_clip.evaluation.store import stored_image

# ---------------------------------------------------------------------- what is attacked


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
        assert row["clean_correct"] == before["correct"]
        if not row["attacked"]:
            assert {key for key in row if row[key] != before[key]} <= {"attack", "eps"}


def test_natural_damage_reaches_every_image_and_has_no_budget(tmp_path: Path) -> None:
    attack = rc.attacks.Corruption(type="noise", severity=0.05)
    result = toy_run(tmp_path, attacks=[attack], self_check=False, seeds=())
    x, y = toy_photos()
    plain = toy_classifier()(attack(toy_classifier(), x, y).images).argmax(1)
    damaged = result.images[(result.images["attack"] == "noise-0.05") & (result.images["defense"] == "undefended")]
    assert damaged["attacked"].all()
    assert (damaged["eps"] == 0).all()
    assert damaged.sort_values("index")["plain_prediction"].tolist() == plain.tolist()
    assert (damaged["robust"] == damaged["correct"]).all(), "nobody chose not to damage the photo"


def test_draws_have_seeds_of_their_own_and_repeat(tmp_path: Path) -> None:
    guard = rc.ReACT(tau=0.3, views=3)
    images = toy_run(tmp_path, defenses=[guard], attacks=[], seeds=(5, 6, 7), seed=5).images
    for draw, seed in enumerate((5, 6, 7)):
        rows = images[images["draw"] == draw].sort_values("index")
        assert rows["prediction"].tolist() == guard(toy_classifier(), toy_photos()[0], seed=seed).labels.tolist()
        assert (set(rows["seed"]), set(rows["attack_seed"])) == ({seed}, {5})


def test_results_do_not_depend_on_the_batch(finished: Any, tmp_path: Path) -> None:
    wanted = ["attack", "eps", "defense", "draw", "index", "attacked", "plain_prediction", "prediction", "gated"]
    once, again = (
        result.images[wanted].astype({"attack": str, "defense": str}).sort_values(wanted[:5], ignore_index=True)
        for result in (finished[1], toy_run(tmp_path, batch=13))
    )
    assert once.equals(again)


def test_photos_and_adversarial_images_have_8_bits(finished: Any) -> None:
    folder, result = finished
    x, _ = toy_photos()
    rows = result.images[(result.images["attacked"]) & (result.images["draw"] == 0)]
    assert len(rows) > 20
    for row in rows.to_dict("records")[::5]:
        clean: Any = stored_image(folder, row["index"], "data", "clean")
        shown: Any = stored_image(folder, row["index"], "data", title_of(row["attack"], row["eps"]))
        assert torch.equal(clean, x[row["index"]])
        assert (shown - clean).abs().max() <= row["eps"] + 1e-6
        assert torch.equal(255 * shown, (255 * shown).round())
        assert int(toy_classifier()(shown[None]).argmax()) == row["plain_prediction"]
    assert stored_image(folder, COUNT, "data", "clean") is None


def test_rounding_losses_are_counted(tmp_path: Path) -> None:
    # Half a grey level cannot be kept in bytes: every attack is rounded away.
    attack = rc.attacks.PGD(eps=0.49 / 255, steps=3, step_size=0.2 / 255, random_start=False)
    result = toy_run(tmp_path, attacks=[attack], data=toy_photos(amplitude=0.2), self_check=False)
    (row,) = result.attacks
    assert row.success_rate == 0
    assert row.lost > 0
    assert any("attacks had succeeded and fail rounded to 8 bits" in note for note in result.notes)


def test_not_storing_gives_the_same_pixels_again(tmp_path: Path, rows_of: Any) -> None:
    toy_run(tmp_path, images={"store": "none"})
    before = rows_of(tmp_path)
    assert stored_image(tmp_path, 0, "data", "clean") is None
    for path in tmp_path.glob("shards/*/pgd*/react/seed-1/*"):
        path.unlink()
    toy_run(tmp_path, images={"store": "none"})
    assert rows_of(tmp_path) == before


# ---------------------------------------------------------------------- what is scored


def test_rows_are_what_the_parquet_file_says(finished: Any) -> None:
    folder, result = finished
    groups = dict(list(load(folder).groupby(["attack", "eps", "defense"], observed=True)))
    assert len(result.rows) == len(groups) == 6
    for row in result.rows:
        group = groups[row.attack, row.eps, row.defense]
        assert (group["correct"] == (group["prediction"] == group["label"])).all()
        assert (group["robust"] == (group["correct"] & group["clean_correct"])).all()
        by_image = group.groupby("index")["robust"].mean()
        assert len(by_image) == row.n == COUNT
        assert row.accuracy == pytest.approx(group["robust"].mean())
        assert row.paper_accuracy == pytest.approx(group["correct"].mean())
        assert row.worst == pytest.approx((by_image == 1).mean())
        assert row.passes == pytest.approx(group["passes"].mean())
        assert row.attacked == group["attacked"].sum() / 2
    assert {row.dataset for row in result.rows} == {"data"}, "no row counts twice"
    assert [replace(row, dataset="data") for row in result.means] == list(result.rows)
    assert result.select(dataset="mean", defense="react", attack="clean") == [result.means[1]]


def test_an_attacker_may_leave_a_photo_as_it_is(tmp_path: Path) -> None:
    """A defence that errs on clean photos and is right on attacked ones has no robust accuracy for it."""

    class OnlyAttacked(rc.Undefended):
        def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
            known = {photo.sum().item() for photo in toy_photos()[0]}
            right = torch.eye(5)[torch.tensor([0 if p.sum().item() in known else 1 for p in x.pixels])]
            return right, {}

    x, y = toy_photos()
    ones = y == 1
    result = toy_run(tmp_path, defenses={"odd": OnlyAttacked()}, data=(x[ones], y[ones]), self_check=False, seeds=())
    (row,) = result.select(attack="pgd-3")
    assert row.accuracy == 0
    assert row.paper_accuracy > 0.3


def test_the_worst_case_over_attacks_is_that_of_plain_loops(tmp_path: Path) -> None:
    attacks = [rc.attacks.Corruption(severity=0.05), *(rc.attacks.PGD(eps=eps / 255, steps=1) for eps in (1, 2))]
    for worst_of, chosen_of in (
        (["all"], lambda images: images[images["eps"] > 0]),
        (["noise-0.05", "pgd-1 1/255"], lambda images: images[(images["attack"] != "clean") & (images["eps"] < 0.007)]),
    ):
        result = toy_run(tmp_path, attacks=attacks, worst_of=worst_of)
        rows, chosen = result.select(attack="worst of 2"), chosen_of(result.images)
        assert len(rows) == len(toy_defenses())
        for row in rows:
            wrong = chosen[(chosen["defense"] == row.defense) & ~chosen["robust"]]
            assert row.accuracy == pytest.approx(1 - len(wrong[["index", "draw"]].drop_duplicates()) / (2 * COUNT))
            assert row.eps == chosen["eps"].max()


def test_attack_all_attacks_everything_and_counts_the_leakage(tmp_path: Path, rows_of: Any) -> None:
    guard = rc.defenses.AOM(views=5, alpha=4.0, mapping=mappings.Constant(0.3))
    result = toy_run(tmp_path, scoring="attack_all", seeds=(), defenses={"strong": guard})
    rows = [row for row in rows_of(tmp_path) if row["attack"] != "clean"]
    assert all(row["attacked"] for row in rows)
    leaked = Counter(r["attack"] for r in rows if r["clean_prediction"] != r["label"] and r["correct"])
    assert leaked, "the toy should leak, or this test checks nothing"
    for row in result.rows:
        assert (row.leakage, row.leakage_fraction) == (leaked[row.attack], pytest.approx(leaked[row.attack] / COUNT))


# ---------------------------------------------------------------------- what a run leaves


def test_the_result_reads_back_and_carries_its_origin(finished: Any) -> None:
    folder, result = finished
    assert numbers(EvaluationResult.load(folder)) == numbers(result)
    written = json.loads((folder / "result.json").read_text())
    assert written["schema"] == 2
    assert not {"rows", "attacks", "images"} & set(written)
    assert set(result.versions) == {"python", "react-clip", "torch", "transformers", "threads"}
    assert len(result.recipe_hash) == len(result.package) == len(result.sets[0].fingerprint) == 64
    assert result.self_check.robust_accuracy < 0.3 * result.self_check.clean_accuracy


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 2}'])
def test_other_result_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(rc.ReactClipError, match=r"result\.json .*again"):
        EvaluationResult.load(tmp_path)
    with pytest.raises(rc.ReactClipError, match=r"images\.parquet does not exist"):
        load(tmp_path)


def test_runs_over_the_same_photos_are_joined(finished: Any, tmp_path: Path) -> None:
    _, whole = finished
    one, two = (part_of(whole, label) for label in ("undefended", "react"))
    both = join([one, two])
    assert sorted(map(repr, both.rows)) == sorted(map(repr, whole.rows))
    assert [item["label"] for item in both.recipe["defenses"]] == ["undefended", "react"]
    assert both.attacks == whole.attacks
    assert len(join([both, two]).images) == len(whole.images), "a defence of several runs is taken once"
    changed = {**two.recipe, "defenses": [{**item, "tau": 0.1} for item in two.recipe["defenses"]]}
    fewer = two.images[two.images["attack"] != "pgd-3"]
    for other, reason in (
        (replace(two, recipe=changed), "'react' is in several of the results"),
        (replace(two, sets=(replace(two.sets[0], fingerprint="x"),)), "data set data: digest is"),
        (replace(two, recipe={**two.recipe, "seeds": [0]}), r"seeds is \(0, 1\) in the first and \(0,\) in the second"),
        (replace(two, images=fewer), "only the first has the attack pgd-3 4/255"),
    ):
        with pytest.raises(rc.ReactClipError, match=reason):
            join([whole, other])


# ---------------------------------------------------------------------- refusals


def test_nothing_right_means_nothing_to_attack(tmp_path: Path) -> None:
    x, y = toy_photos()
    right = toy_classifier()(x).argmax(1) == y
    data = (x[right], (y[right] + 1) % CLASSES)
    result = toy_run(tmp_path / "off", data=data, self_check=False, seeds=())
    (row,) = result.select(dataset="mean", attack="pgd-10", defense="react")
    assert row.attacked == 0
    assert math.isnan(row.gate_rate)
    assert all(math.isnan(attack.success_rate) for attack in result.attacks)
    with pytest.raises(rc.ReactClipError, match="gets no clean image of data right"):
        toy_run(tmp_path / "on", data=data)


def test_the_self_check_refuses_a_model_that_pgd_does_not_break(tmp_path: Path) -> None:
    robust = toy_photos(amplitude=20)
    with pytest.raises(rc.ReactClipError, match=r"leaves undefended CLIP 100 % .* the attack or the model is broken"):
        toy_run(tmp_path / "on", data=robust)
    kept = [path.name for path in tmp_path.rglob("*.safetensors")]
    assert kept == ["self-check.safetensors"], "the check comes before the work"
    result = toy_run(tmp_path / "off", data=robust, attacks=[], self_check=False)
    assert not result.self_check.enabled
    assert any("self-check" in note for note in result.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attacks": [rc.attacks.PGD(), rc.attacks.PGD(step_size="eps/4"), rc.attacks.PGD()]}, "'pgd-10 4/255'"),
        ({"attacks": [rc.ReACT()]}, "the attack is ReACT.*; give its kind"),
        ({"data": (torch.rand(4, 3, 32, 32) * 255, torch.zeros(4).long())}, r"\[0, 1\]"),
        ({"data": (torch.rand(4, 3, 32, 32), torch.zeros(3).long())}, "class indices from 0"),
        ({"data": (torch.rand(4, 3, 32, 32), torch.full((4,), 5))}, "give some, of 0 to 4"),
        ({"data": [1, 2]}, "no ImageDataset and no pair"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(rc.ReactClipError, match=message):
        toy_run(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- answers that cannot be repeated


class GlobalNoise(rc.Undefended):
    """Draws from torch's own generator."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        return rc.functional.normalize(x.plain + 0.1 * torch.randn(x.plain.shape)), {}


class BatchMean(rc.Undefended):
    """Answers depend on the other images of the batch."""

    def defend(self, x: View) -> tuple[Tensor, dict[str, Tensor]]:
        return rc.functional.normalize(x.plain - 0.5 * x.plain.mean(0)), {}


def test_defences_that_do_not_repeat_their_answers_are_named(tmp_path: Path) -> None:
    defenses = {"global": GlobalNoise(), "mean": BatchMean(), "ours": rc.ReACT(tau=0.3, views=2)}
    with torch.random.fork_rng():
        notes = toy_run(tmp_path, defenses=defenses, attacks=[], seeds=()).notes
    assert [note.split()[0] for note in notes] == ["global", "mean"]
    assert "asked again with the same seed: it draws from a global generator" in notes[0]
    assert "in another batch" in notes[1]
