"""Evaluations against attackers who know the defence, or only another model: recipes, runs, kills, checks."""

from __future__ import annotations

import math
from contextlib import nullcontext
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
    toy_classifier,
    toy_photos,
    toy_run,
)

import react_clip as rc
from react_clip.attacks import Both, Queries
from react_clip.evaluation import EvaluationResult, checks
from react_clip.evaluation.result import AttackRow, Row, merge
from react_clip.evaluation.store import Pictures
from react_clip.report.tables import all_tables


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    return folder, adaptive_run(folder)


# ---------------------------------------------------------------------- runs


def test_every_defence_meets_and_answers_images_of_its_own(attacked: Any, rows_of: Any) -> None:
    folder, _ = attacked
    pictures, photos, clf = Pictures(folder), toy_photos(16)[0], toy_classifier()
    rows = rows_of(folder)
    assert all(row["threat"] == "adaptive" and row["seed"] < 2**31 for row in rows), "attacks draw from larger seeds"
    different = []
    for row in [row for row in rows if row["attacked"]][::7]:
        where = ("data", row["attack"], row["eps"], row["index"])
        shown = {label: pictures.attacked(*where, label) for label in GUARDS}
        different.append(not torch.equal(*shown.values()))
        photo = shown[row["defense"]]
        assert (photo - photos[row["index"]]).abs().max() <= row["eps"] + 1e-6
        assert int(GUARDS[row["defense"]](clf, photo[None], seed=row["seed"]).labels) == row["prediction"]
        assert pictures.attacked(*where) is None
    assert any(different)


def test_members_and_checks_are_reported_and_the_threat_is_everywhere(attacked: Any) -> None:
    folder, result = attacked
    assert numbers(EvaluationResult.load(folder / "result.json")) == numbers(result)
    assert all(check.passed for check in result.checks)
    assert {(check.name, check.defense) for check in result.checks} == {
        (name, label) for name in ("convergence", "huge budget", "oblivious", "budget", "queries") for label in GUARDS
    }
    names = ["", *(member.name for member in MEMBERS)]
    assert [row.part for row in result.attacks if row.defense == "ReACT"] == 2 * names
    assert [row.part for row in result.attacks if row.defense == "AOM"] == 2 * [n for n in names if "evade" not in n]
    for table in all_tables(result):
        assert "adaptive (the attacker knows CLIP and the defence in full" in table.caption
        assert all(line.endswith(",adaptive,leakage_free") for line in table.csv().splitlines()[1:])
    table = next(table for table in all_tables(result) if table.name == "attacks")
    assert table.header[2:4] == ("defence", "part of the suite")
    assert len({labels for labels, _ in table.rows}) == len(table.rows), "no two rows look alike"


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


# ---------------------------------------------------------------------- sanity checks


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
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "on").rglob("*.safetensors")}
    result = adaptive_run(tmp_path / "on", self_check=False, **options)
    assert shards == {path: path.stat().st_mtime_ns for path in (tmp_path / "on").rglob("*.safetensors")}
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


class Patient(Both):
    """Works from the eighth step on."""

    def search(self, problem: Any) -> Any:
        return super().search(problem) if self.steps >= 8 else problem.x


def test_an_attack_that_has_not_converged_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"defenses": {"plain": rc.Undefended()}, "draws": 1, "data": toy_photos(48)}
    with pytest.raises(rc.ReactClipError, match=r"sanity check 'convergence' failed .* twice the steps and draws"):
        adaptive_run(tmp_path / "short", attacks=[Patient(eps=4 / 255, steps=4, eot=1)], **options)
    result = adaptive_run(tmp_path / "long", attacks=[Patient(eps=4 / 255, steps=8, eot=1)], **options)
    assert [check.name for check in result.checks if not check.passed] == []


def row(eps: float, accuracy: float, n: int = 200) -> Row:
    return Row(
        "data", "a", eps, "d", "adaptive", "leakage_free", n, n, accuracy, 0, 1, 0, 0, 0, 0, math.nan, 1, 0
    )  # fmt: skip


def attack_row(part: str, success: float, attacked: int = 200) -> AttackRow:
    return AttackRow("data", "s", 4 / 255, "Suite(...)", attacked, success, 0, 1.0, "d", part)


WHOLE, SQUARE = attack_row("", 0.9), attack_row("adaptive-square-100", 0.5)


@pytest.mark.parametrize(
    ("rows", "attacks", "failure"),
    [
        ([row(1 / 255, 0.5), row(4 / 255, 0.3), row(0.0, 0.9)], [], ""),
        ([row(1 / 255, 0.5), row(4 / 255, 0.54)], [], ""),  # within the intervals
        ([row(4 / 255, 0.7), row(1 / 255, 0.5)], [], "'budget' failed .* 70.0 % are left against 50.0 %"),
        ([], [WHOLE, SQUARE, attack_row("adaptive-both-9", 0.8)], ""),
        ([], [WHOLE, SQUARE, attack_row("adaptive-both-9", 0.1)], "'queries' failed"),
        ([], [WHOLE, SQUARE], ""),  # nothing to compare with
    ],
)
def test_larger_budgets_and_gradients_must_not_help_the_defence(rows: Any, attacks: Any, failure: str) -> None:
    found = checks.sanity_by_numbers(adaptive_recipe(), rows, attacks)
    with pytest.raises(rc.ReactClipError, match=failure) if failure else nullcontext():
        checks.raise_if_failed(found)
