"""Evaluations against attackers who know the defence, or only another model: recipes, runs, kills, checks."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import (
    CLASSES,
    GUARDS,
    MEMBERS,
    ToyEncoder,
    adaptive_recipe,
    adaptive_run,
    numbers,
    part_of,
    suites,
    toy_classifier,
    toy_photos,
    toy_run,
)

import react_clip as rc
from react_clip import noise
from react_clip.attacks import BPDA, Both, Queries
from react_clip.evaluation import EvaluationResult, checks, runner
from react_clip.evaluation.cost import disk_bytes
from react_clip.evaluation.recipe import Images
from react_clip.evaluation.result import AttackRow, Row, merge
from react_clip.evaluation.store import Pictures
from react_clip.report.tables import all_tables


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    return folder, adaptive_run(folder)


# ---------------------------------------------------------------------- runs


def test_every_defence_meets_images_of_its_own(attacked: Any, rows_of: Any) -> None:
    folder, result = attacked
    pictures, photos = Pictures(folder), toy_photos(16)[0]
    index = next(row["index"] for row in rows_of(folder) if row["attacked"])
    shown = [pictures.attacked("data", "adaptive-suite-4", 4 / 255, index, label) for label in GUARDS]
    assert all(picture is not None for picture in shown)
    assert not torch.equal(shown[0], shown[1])
    assert all((picture - photos[index]).abs().max() <= 4 / 255 + 1e-6 for picture in shown)
    assert pictures.attacked("data", "adaptive-suite-4", 4 / 255, index) is None
    assert (result.threat, result.defense_seeds) == ("adaptive", (0, 1))
    for row in rows_of(folder):
        assert row["threat"] == "adaptive"
        assert row["seed"] < 2**31


def test_what_is_judged_is_what_the_defence_answers(attacked: Any, rows_of: Any) -> None:
    folder, _ = attacked
    pictures, clf = Pictures(folder), toy_classifier()
    for row in [row for row in rows_of(folder) if row["attacked"]][::7]:
        photo = pictures.attacked("data", row["attack"], row["eps"], row["index"], row["defense"])
        assert photo is not None
        answer = GUARDS[row["defense"]](clf, photo[None], seed=row["seed"])
        assert int(answer.labels) == row["prediction"]


def test_members_are_reported_and_the_threat_is_everywhere(attacked: Any) -> None:
    folder, result = attacked
    assert numbers(EvaluationResult.load(folder / "result.json")) == numbers(result)
    names = ["", *(member.name for member in MEMBERS)]
    assert [row.part for row in result.attacks if row.defense == "ReACT"] == 2 * names
    assert [row.part for row in result.attacks if row.defense == "AOM"] == 2 * [n for n in names if "evade" not in n]
    for table in all_tables(result):
        assert "adaptive (the attacker knows CLIP and the defence in full" in table.caption
        assert all(line.endswith(",adaptive,leakage_free") for line in table.csv().splitlines()[1:])
    table = next(table for table in all_tables(result) if table.name == "attacks")
    assert table.header[2:4] == ("defence", "part of the suite")
    assert len({labels for labels, _ in table.rows}) == len(table.rows), "no two rows look alike"


def test_attack_seeds_are_never_judging_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[bool, set[Any]] = {True: set(), False: set()}
    crafting = False
    draw, craft = noise.stream_keys, runner.SetRunner._craft

    def recorded(images: Any, seed: Any) -> Any:
        seeds[crafting].add(seed)
        return draw(images, seed)

    def flagged(self: Any, *arguments: Any) -> Any:
        nonlocal crafting
        crafting = True
        found = craft(self, *arguments)
        crafting = False
        return found

    monkeypatch.setattr(noise, "stream_keys", recorded)
    monkeypatch.setattr(runner.SetRunner, "_craft", flagged)
    adaptive_run(tmp_path, attacks=suites(1), draws=3, self_check=False, defenses={"ReACT": GUARDS["ReACT"]})
    assert {0, 1, 2} <= seeds[False]
    assert len(seeds[True]) > 10
    assert not seeds[True] & seeds[False]


def test_the_disk_estimate_counts_clean_photos_and_every_defence() -> None:
    adaptive = adaptive_recipe(attacks=["adaptive-both"], batch=64)
    oblivious = adaptive_recipe(threat="oblivious", attacks=["pgd"], batch=64)
    pixels = 64 * 3 * 100 * 100
    for recipe, copies in ((adaptive, 2), (oblivious, 1)):
        stored = disk_bytes(recipe, 64, 100) - disk_bytes(recipe.replace(images=Images("none")), 64, 100)
        assert stored == pixels * 2 * copies + pixels + 4096, "two bytes per attack, one for the clean photo, a shard"


def test_adaptive_results_are_joined_with_their_attacks(attacked: Any) -> None:
    _, whole = attacked
    both = merge([part_of(whole, label) for label in GUARDS])
    assert {row.defense for row in both.attacks} == set(GUARDS)
    assert sorted(map(repr, both.attacks)) == sorted(map(repr, whole.attacks))
    assert sorted(map(repr, both.checks)) == sorted(map(repr, whole.checks))


# ---------------------------------------------------------------------- transfer


def other_classifier() -> Any:
    encoder = ToyEncoder()
    encoder.name = "other"
    weight: Any = encoder.tower.weight
    weight.data += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 32
    return rc.ZeroShotClassifier.from_features(encoder, toy_classifier().names, torch.eye(CLASSES))


def test_images_of_another_model_are_shared_by_all_defences(tmp_path: Path, rows_of: Any) -> None:
    options: dict[str, Any] = {"attacks": [rc.attacks.PGD(eps=1 / 255)], "draws": 1, "data": toy_photos(24)}
    result = toy_run(tmp_path / "t", threat="transfer", attack_clf=other_classifier(), **options)
    own = toy_run(tmp_path / "o", **options)
    assert (result.threat, result.recipe["transfer_model"]) == ("transfer", "other")
    assert "crafts on another model" in result.threat_meaning
    assert result.self_check.robust_accuracy <= 0.3 * result.self_check.clean_accuracy, "judged where it was crafted"
    assert result.attacks[0].success_rate <= own.attacks[0].success_rate
    assert len(list((tmp_path / "t").glob("shards/data/pgd*/images/*"))) == 3
    with pytest.raises(rc.ReactClipError, match="transfer_model is None"):
        toy_run(tmp_path / "x", threat="transfer", **options)


# ---------------------------------------------------------------------- finished runs


def test_a_finished_run_is_read_back_without_the_encoder(attacked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, result = attacked
    encode, views = ToyEncoder._image_features, []
    monkeypatch.setattr(
        ToyEncoder, "_image_features", lambda self, batch: (views.append(len(batch)), encode(self, batch))[1]
    )
    again = adaptive_run(folder)
    assert numbers(again) == numbers(result)
    # Only PGD-10 of the self-check on undefended CLIP is run anew.
    assert sum(views) <= 13 * 16


# ---------------------------------------------------------------------- sanity checks


def test_the_checks_are_part_of_the_result(attacked: Any) -> None:
    _, result = attacked
    assert all(check.passed for check in result.checks)
    assert {(check.name, check.defense) for check in result.checks} == {
        (name, label) for name in ("steps", "huge budget", "oblivious", "budget", "queries") for label in GUARDS
    }


class Backwards(Both):
    """Climbs down."""

    def objective(self, draw: Any) -> Any:
        return -super().objective(draw)

    def defended_loss(self, draw: Any) -> Any:
        return -super().defended_loss(draw)

    def is_wrong(self, draw: Any) -> Any:
        return torch.zeros_like(draw.labels, dtype=torch.bool)


def test_a_broken_attack_is_refused(tmp_path: Path) -> None:
    broken = Backwards(eps=4 / 255, steps=8, eot=1)
    options: dict[str, Any] = {"attacks": [broken], "defenses": {"plain": rc.Undefended()}, "draws": 1}
    with pytest.raises(rc.ReactClipError, match=r"sanity check 'huge budget' failed .* nothing is reported") as caught:
        adaptive_run(tmp_path / "on", **options)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "on" / "per_image.parquet").exists()
    assert not (tmp_path / "on" / "result.json").exists()
    result = adaptive_run(tmp_path / "off", self_check=False, **options)
    assert result.checks == ()
    assert any("sanity checks of attacks that know the defence were switched off" in note for note in result.notes)


def test_weaker_than_an_oblivious_attack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An attack that takes no gradients has no steps or budget to probe: only the comparison can catch it.
    lazy = Queries(eps=4 / 255, queries=1, eot=1)
    monkeypatch.setattr(Queries, "search", lambda self, problem: problem.x)
    with pytest.raises(
        rc.ReactClipError, match=r"'oblivious' failed for adaptive-square-1 4/255 on 'plain': .* pgd-20"
    ):
        adaptive_run(tmp_path, attacks=[lazy], defenses={"plain": rc.Undefended()}, draws=1)


def row(eps: float, accuracy: float, n: int = 200) -> Row:
    return Row(
        "data", "a", eps, "d", "adaptive", "leakage_free", n, n, accuracy, 0, 1, 0, 0, 0, 0, math.nan, 1, 0
    )  # fmt: skip


def attack_row(part: str, success: float, attacked: int = 200) -> AttackRow:
    return AttackRow("data", "s", 4 / 255, "Suite(...)", attacked, success, 0, 1.0, "d", part)


def test_a_budget_that_helps_the_defence_is_refused() -> None:
    assert all(
        check.passed
        for check in checks.sanity_by_numbers(
            adaptive_recipe(), [row(1 / 255, 0.5), row(4 / 255, 0.3), row(0.0, 0.9)], []
        )
    )
    assert all(
        check.passed
        for check in checks.sanity_by_numbers(adaptive_recipe(), [row(1 / 255, 0.5), row(4 / 255, 0.54)], [])
    ), "chance"
    risen = checks.sanity_by_numbers(adaptive_recipe(), [row(4 / 255, 0.7), row(1 / 255, 0.5)], [])
    with pytest.raises(rc.ReactClipError, match=r"'budget' failed .* 70.0 % are left against 50.0 %"):
        checks.raise_if_failed(risen)


def test_queries_that_beat_gradients_are_refused() -> None:
    whole, square, both = (
        attack_row("", 0.9),
        attack_row("adaptive-square-100", 0.5),
        attack_row("adaptive-both-9", 0.8),
    )
    assert all(check.passed for check in checks.sanity_by_numbers(adaptive_recipe(), [], [whole, square, both]))
    weak = dataclasses.replace(both, success_rate=0.1)
    with pytest.raises(rc.ReactClipError, match=r"'queries' failed"):
        checks.raise_if_failed(checks.sanity_by_numbers(adaptive_recipe(), [], [whole, square, weak]))
    assert checks.sanity_by_numbers(adaptive_recipe(), [], [whole, square]) == []


def test_results_without_checks_still_load(attacked: Any, tmp_path: Path) -> None:
    values = json.loads((attacked[0] / "result.json").read_text())
    del values["checks"]
    for item in values["attacks"]:
        del item["defense"], item["part"]
    (tmp_path / "result.json").write_text(json.dumps(values))
    old = EvaluationResult.load(tmp_path / "result.json")
    assert old.checks == ()
    assert old.attacks[0].defense == ""


def test_any_defence_can_be_attacked(tmp_path: Path) -> None:
    guards = {"TTC": rc.defenses.TTC(), "TTE": rc.defenses.TTE(crops=1)}
    options: dict[str, Any] = {"data": toy_photos(8), "draws": 1, "self_check": False}
    result = adaptive_run(tmp_path, defenses=guards, attacks=[BPDA(eps=4 / 255, steps=4, eot=1)], **options)
    for label in guards:
        clean, robust = result.select(dataset="mean", defense=label)
        assert (clean.attack, robust.attack) == ("clean", "adaptive-bpda-4")
        assert robust.accuracy <= clean.accuracy
