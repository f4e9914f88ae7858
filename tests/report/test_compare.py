"""Two runs compared: pairs, counts and intervals against plain loops and scipy, and what does not match."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import react_clip as rc
from react_clip.cli import main
from react_clip.evaluation.results import EvaluationResult
from react_clip.intervals import bootstrap_difference, mcnemar
from react_clip.report.compare import compare
from synthetic_runs import CLIP, REACT, SECOND, save_run, synthetic_run


def test_mcnemar_is_scipys_binomial_test() -> None:
    for first, second in ((0, 0), (0, 1), (3, 9), (40, 40), (7, 700), (3000, 2800)):
        expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
        assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(expected)


def test_the_bootstrap_covers_the_true_difference() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        sets = [rng.choice([-1.0, 0.0, 1.0], size, p=[0.1, 0.6, 0.3]) for size in (80, 40)]
        value, low, high = bootstrap_difference(sets, draws=1000)
        assert value == pytest.approx(np.mean([each.mean() for each in sets]))
        covered += low <= 0.2 <= high
    assert 0.9 <= covered / 300 <= 0.99


@pytest.fixture(scope="module")
def runs() -> tuple[EvaluationResult, EvaluationResult]:
    """The second lacks a set, an attack, a defence and some photos, whose order differs, and has other constants."""
    first = synthetic_run([CLIP, REACT, SECOND], attacks={"pgd-10": (1 / 255, 4 / 255), "fab": (4 / 255,)}, draws=3)
    second = synthetic_run(
        [CLIP, {**REACT, "tau": 0.1}],
        outcome=lambda stream, entry, eps, right: right & (stream.random(len(right)) < 0.6),
        sets={"pets": 60},
        draws=3,
    )
    images = second.images[second.images["index"] >= 20]
    return first, replace(second, images=images.assign(index=79 - images["index"]))


def test_pairs_are_those_of_plain_loops(runs: tuple[EvaluationResult, EvaluationResult]) -> None:
    found = compare(*runs)
    texts = [labels for labels, _ in found.table.rows]
    attacks = ("clean", "pgd-10 1/255", "pgd-10 4/255")
    assert sorted(texts) == sorted((attack, label) for attack in attacks for label in ("CLIP", "ReACT"))
    for (attack, label), cells in found.table.rows:
        right: list[dict[str, list[bool]]] = [{}, {}]
        for run, photos in zip(runs, right, strict=True):
            for row in run.images.to_dict("records"):
                title = row["attack"] if not row["eps"] else f"{row['attack']} {255 * row['eps']:.0f}/255"
                if (title, row["defense"], row["dataset"]) == (attack, label, "pets"):
                    photos.setdefault(row["photo"], []).append(row["robust"])
        pairs = [(np.mean(right[0][photo]), np.mean(right[1][photo])) for photo in right[1]]
        only = [sum(a > 0.5 >= b for a, b in pairs), sum(b > 0.5 >= a for a, b in pairs)]
        one, two = np.mean(pairs, axis=0)
        expected = [40, 100 * one, 100 * two, 100 * (two - one), *only, mcnemar(*only)]
        assert [cell.value for cell in cells] == pytest.approx(expected)
        assert cells[3].low <= cells[3].value <= cells[3].high


def test_what_does_not_match_is_said(runs: tuple[EvaluationResult, EvaluationResult]) -> None:
    assert compare(*runs).differences == (
        "only the first has the data set cars",
        "only the first has the attack fab 4/255",
        "only the first has the defence SecondLook",
        "defence ReACT: tau is 0.7 in the first, 0.1 in the second",
    )
    other = replace(runs[1], recipe={**runs[1].recipe, "scoring": "attack_all"})
    assert compare(runs[0], other).differences[0] == "scoring is leakage_free in the first and attack_all in the second"
    with pytest.raises(rc.ReactClipError, match="share no photo under the same attack and defence: only the first"):
        compare(runs[0], replace(runs[1], images=runs[1].images.assign(dataset="elsewhere")))


def test_photos_of_older_runs_are_matched_by_their_place_in_equal_sets(
    runs: tuple[EvaluationResult, EvaluationResult],
) -> None:
    first = runs[0]
    older = replace(first, images=first.images.drop(columns="photo"))
    assert {(cells[0].value, cells[-1].value) for _, cells in compare(first, older).table.rows} == {(100, 1.0)}
    [pets, cars] = older.sets
    changed = replace(older, sets=(pets, replace(cars, fingerprint="other")))
    assert {cells[0].value for _, cells in compare(first, changed).table.rows} == {60.0}


def test_the_commands_print_tables_in_three_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(save_run(synthetic_run([CLIP, REACT]), tmp_path / name)) for name in "ab")
    wanted = {"markdown": "| ReACT |", "latex": r"\toprule", "csv": "defence,clean,clean low,clean high"}
    for kind, words in wanted.items():
        assert main(["report", one, "--table", "accuracy", "--format", kind]) == 0
        assert words in capsys.readouterr().out
    assert main(["rank", one, "--out", str(tmp_path / "t.tex")]) == 0
    assert r"\toprule" in (tmp_path / "t.tex").read_text()
    capsys.readouterr()
    assert main(["report", one, "--table", "accuracy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0][1].keys() == {"value", "low", "high"}
    assert main(["compare", one, two, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []
    for words, error in ((["--table", "speed"], "the run has the tables accuracy, "), (["--format", "csv"], "--table")):
        assert main(["report", one, *words]) == 2
        assert error in capsys.readouterr().err
