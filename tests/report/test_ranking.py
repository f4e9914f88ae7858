"""The ranking: its numbers against plain loops, runs that do not fit together, timings, the command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import react_clip as rc
from react_clip.cli import main
from react_clip.cli.rank import check_defense, load_defense
from react_clip.report.ranking import ALL, Ranking, rank
from synthetic_runs import CLIP, DEFENSES, REACT, SECOND, save_run, synthetic_run

ATTACKS = {"pgd-10": (1 / 255, 4 / 255), "other": (1 / 255,)}


def run(folder: Path, *defenses: Mapping[str, Any], **options: Any) -> Path:
    settings: dict[str, Any] = {"attacks": ATTACKS, "draws": 2, **options}
    return save_run(synthetic_run([dict(entry) for entry in defenses or DEFENSES], **settings), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("rank") / "run", natural=("noise", "dark"))


@pytest.fixture(scope="module")
def ranking(folder: Path) -> Ranking:
    return rank([folder])


def cells(ranking: Ranking, column: str) -> dict[str, float]:
    place = ranking.columns.index(column)
    return {entry.label: entry.cells[place].value for entry in ranking.entries}


def test_numbers_are_those_of_plain_loops(folder: Path, ranking: Ranking) -> None:
    import pandas as pd

    rows = pd.read_parquet(folder / "images.parquet").to_dict("records")
    worst = {
        "clean": [("clean", 0.0)],
        "1/255": [("pgd-10", 1 / 255), ("other", 1 / 255)],
        ALL: [(name, eps) for name, budgets in ATTACKS.items() for eps in budgets],
    }
    for label in ("CLIP", "ReACT", "SecondLook"):
        own = [row for row in rows if row["defense"] == label]
        for title, attacks in worst.items():
            means = []
            for dataset in ("pets", "cars"):
                images: dict[int, dict[tuple[str, float], list[bool]]] = {}
                for row in own:
                    if row["dataset"] == dataset and (row["attack"], row["eps"]) in attacks:
                        at = (row["attack"], row["eps"])
                        images.setdefault(row["index"], {}).setdefault(at, []).append(row["robust"])
                means.append(np.mean([min(map(np.mean, found.values())) for found in images.values()]))
            assert cells(ranking, title)[label] == pytest.approx(100 * np.mean(means))
        attacked = [row["passes"] for row in own if row["eps"] > 0]
        assert cells(ranking, "passes, attacked")[label] == pytest.approx(np.mean(attacked))
    order = list(cells(ranking, ALL).values())
    assert order == sorted(order, reverse=True)
    assert order[0] > order[-1]
    assert {"damaged", "passes, backward"} <= set(ranking.columns)


def test_other_threats_add_columns_under_the_labels_of_the_same_constants(folder: Path, tmp_path: Path) -> None:
    renamed = {**REACT, "label": "the same under another name"}
    knows = run(tmp_path / "knows", renamed, threat="adaptive", attacks={"suite": (4 / 255,)})
    crafted = run(tmp_path / "crafted", CLIP, threat="transfer", attacks={"pgd-20": (4 / 255,)}, sets={"pets": 9})
    tower = run(tmp_path / "tower", {**CLIP, "label": "TeCoA"}, natural=("noise", "dark"), model="towers/TeCoA")
    both = rank([folder, knows, crafted, tower])
    assert set(cells(both, ALL)) == {"CLIP", "ReACT", "SecondLook", "TeCoA"}, "a tower stands beside the defences"
    measured = {label for label, value in cells(both, "knows it, 4/255").items() if not math.isnan(value)}
    assert measured == {"ReACT"}
    assert [label for label, value in cells(both, "other model, 4/255").items() if not math.isnan(value)] == ["CLIP"]
    assert len(both.conditions) == 3
    assert both.informed is not None
    [((label, budget, attack, doubts), (photos, accuracy, broken))] = both.informed.rows
    assert (label, budget, attack) == ("ReACT", "4/255", "suite")
    assert accuracy.value == cells(both, "knows it, 4/255")["ReACT"]
    frame = rc.results.load(knows)
    wrong = 1 - frame[frame["attacked"]].groupby(["dataset", "index"])["correct"].mean()
    assert (photos.value, broken.value) == pytest.approx((len(wrong), 100 * wrong.mean()))
    assert doubts.startswith("random"), "two draws of the synthetic defence differ"
    both.write_page(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.index("All defences") < text.index("What the informed attack found") < text.index("What was measured")


def test_milliseconds_come_from_a_bench_of_the_same_configurations(folder: Path, tmp_path: Path) -> None:
    report = {
        **{"model": "toy", "attacked": 1.0, "device": "cpu", "dtype": "fp32", "batch": 7, "command": "bench"},
        "defenses": {"a": {"kind": "react", "tau": 0.7}, "b": {"kind": "react", "tau": 0.1}},
        "contenders": [{"label": "a", "milliseconds": 1.5}, {"label": "b", "milliseconds": 3.0}],
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    ranking = rank([folder], [path])
    times = cells(ranking, "ms, 100 % attacked")
    assert times.pop("ReACT") == 1.5
    assert np.isnan(list(times.values())).all()
    assert "batches of 7" in ranking.conditions[-1]
    for changed, error in (
        ({"model": "another"}, "timed another, but the runs defend toy"),
        ({"contenders": []}, "is no file of `react-clip bench"),
    ):
        path.write_text(json.dumps({**report, **changed}))
        with pytest.raises(rc.ReactClipError, match=error):
            rank([folder], [path])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sets": {"pets": 9}}, "cannot be joined"),
        ({"draws": 1}, "cannot be joined"),
        ({"model": "another"}, "the runs defend another and toy; rank runs of one model together"),
        ({"threat": "unheard-of"}, "threat model 'unheard-of' has no place in a ranking"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    other = run(tmp_path / "other", {**REACT, "label": "mine", "tau": 0.1}, natural=("noise", "dark"), **options)
    with pytest.raises(rc.ReactClipError, match=error):
        rank([folder, other])


def test_a_ranking_starts_from_attackers_who_know_no_defence(tmp_path: Path) -> None:
    with pytest.raises(rc.ReactClipError, match=r"no run has attackers who do not know .* recipes/standard.yaml"):
        rank([run(tmp_path / "knows", REACT, threat="adaptive")])


def test_the_page_and_the_command_hold_the_same_numbers(
    folder: Path, ranking: Ranking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rank", str(folder), "--out", str(tmp_path / "ranking.html"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["defenses"]) == {"CLIP", "ReACT", "SecondLook"}
    assert '"low"' in json.dumps(answer), "numbers have their intervals"
    text = (tmp_path / "ranking.html").read_text()
    for entry in ranking.entries:
        assert all(f">{cell.text()}</td>" in text for cell in entry.cells)
        assert f"<summary>{entry.label} by data set, and its constants</summary>" in text
    assert "&#34;threshold&#34;: 0.4" in text
    assert [labels[0] for labels, _ in ranking.entries[0].sets.rows] == ["cars", "pets"]
    assert SECOND["label"] in ranking.table.markdown()


# ---------------------------------------------------------------------- a defence of one's own

MINE = """
from react_clip.defenses.base import Defense

class Mine(Defense):
    kind = "mine"

    def defend(self, x):
        features = x.plain
        {line}
        return features, {{}}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_new_classes: None) -> Path:
    """A file that a test may write, with a name that no other test imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / f"{tmp_path.name}.py"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (MINE.format(line="features = features * float('nan')"), "and finite"),
        (MINE.format(line="1 / 0"), r"fails on two images \(ZeroDivisionError: division by zero\)"),
        ("import no_such_package", "cannot be imported: No module named 'no_such_package'"),
        ("1 / 0", r"cannot be loaded \(ZeroDivisionError: division by zero\)"),
        ("Mine = 3", "is no defence"),
    ],
)
def test_what_is_no_defence_is_refused_before_a_run(mine: Path, tiny_folder: Path, content: str, problem: str) -> None:
    mine.write_text(content)
    encoder = rc.load(tiny_folder, device="cpu")
    clf = rc.ZeroShotClassifier.from_features(encoder, ["a", "b"], np.eye(2, encoder.dim))
    with pytest.raises(rc.ReactClipError, match=problem):
        check_defense(load_defense(f"{mine}:Mine"), clf)
