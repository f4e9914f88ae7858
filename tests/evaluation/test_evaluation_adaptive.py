"""Evaluations against attackers who know the defence, or only another model: runs and convergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import (
    CLASSES,
    GUARDS,
    MEMBERS,
    ToyEncoder,
    adaptive_run,
    toy_classifier,
    toy_photos,
    toy_run,
)

import react_clip as rc
from react_clip.attacks import Adaptive
from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import title_of
from react_clip.evaluation.store import stored_image


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluationResult]:
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    return folder, adaptive_run(folder)


def test_every_defence_meets_and_answers_images_of_its_own(attacked: Any, rows_of: Any) -> None:
    folder, _ = attacked
    photos, clf = toy_photos(16)[0], toy_classifier()
    rows = rows_of(folder)
    assert all(row["threat"] == "adaptive" and row["seed"] < 2**31 for row in rows), "attacks draw from larger seeds"
    different = []
    for row in [row for row in rows if row["attacked"]][::7]:
        where = (folder, row["index"], "data", title_of(row["attack"], row["eps"]))
        shown = {label: stored_image(*where, label) for label in GUARDS}
        different.append(not torch.equal(*shown.values()))
        photo = shown[row["defense"]]
        assert (photo - photos[row["index"]]).abs().max() <= row["eps"] + 1e-6
        assert int(GUARDS[row["defense"]](clf, photo[None], seed=row["seed"]).labels) == row["prediction"]
        assert stored_image(*where) is None
    assert any(different)


def test_members_and_checks_are_reported(attacked: Any) -> None:
    folder, result = attacked
    assert EvaluationResult.load(folder).checks == result.checks
    assert {(check.name, check.defense, check.passed) for check in result.checks} == {
        ("convergence", label, True) for label in GUARDS
    }
    names = ["", *(member.name for member in MEMBERS)]
    parts = {label: sorted(row.part for row in result.attacks if row.defense == label) for label in GUARDS}
    assert parts == {"ReACT": sorted(2 * names), "AOM": sorted(2 * [name for name in names if "evade" not in name])}


# ---------------------------------------------------------------------- transfer


def other_classifier() -> Any:
    encoder: Any = ToyEncoder()
    encoder.name = "other"
    weight = encoder.tower[0].weight
    weight.data += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 32
    return rc.ZeroShotClassifier.from_features(encoder, toy_classifier().names, torch.eye(CLASSES))


def test_images_of_another_model_are_shared_by_all_defences(tmp_path: Path) -> None:
    options: dict[str, Any] = {"attacks": [rc.attacks.PGD(eps=1 / 255)], "seeds": (), "data": toy_photos(24)}
    result = toy_run(tmp_path / "t", threat="transfer", attack_clf=other_classifier(), **options)
    own = toy_run(tmp_path / "o", **options)
    assert (result.threat, result.recipe["transfer_model"]) == ("transfer", "other")
    assert "crafts on another model" in result.threat_meaning
    assert result.self_check.robust_accuracy <= 0.3 * result.self_check.clean_accuracy, "judged where it was crafted"
    assert result.attacks[0].success_rate <= own.attacks[0].success_rate
    assert len(list((tmp_path / "t").glob("shards/data/pgd*/images/*"))) == 3
    with pytest.raises(rc.ReactClipError, match="transfer_model is None"):
        toy_run(tmp_path / "x", threat="transfer", **options)


# ---------------------------------------------------------------------- convergence


class Patient(Adaptive):
    """Works from the eighth step on."""

    def search(self, problem: Any) -> Any:
        return super().search(problem) if self.steps >= 8 else problem.x


def test_an_attack_that_has_not_converged_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"defenses": {"plain": rc.Undefended()}, "seeds": (), "data": toy_photos(48)}
    short = [Patient(eps=4 / 255, steps=4, eot=1)]
    with pytest.raises(rc.ReactClipError, match=r"has not converged on 'plain': .* nothing is reported"):
        adaptive_run(tmp_path, attacks=short, **options)
    assert (tmp_path / "images.parquet").exists()
    assert not (tmp_path / "result.json").exists()
    result = adaptive_run(tmp_path, attacks=short, self_check=False, **options)
    assert result.checks == ()
    assert any("the convergence of attacks that know the defence was not checked" in note for note in result.notes)
    result = adaptive_run(tmp_path / "long", attacks=[Patient(eps=4 / 255, steps=8, eot=1)], **options)
    assert [check.passed for check in result.checks] == [True]
