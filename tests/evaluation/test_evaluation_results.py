"""What a run leaves: the result file, tables in three formats, stored pictures, and results merged into one."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_toys import COUNT, part_of, toy_photos

import react_clip as rc
from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.result import merge
from react_clip.evaluation.store import Pictures
from react_clip.report import tables


def test_the_result_file_reads_back_and_carries_its_origin(finished: Any) -> None:
    folder, result = finished
    again = EvaluationResult.load(folder / "result.json")
    assert again.to_json() == result.to_json()
    assert json.loads((folder / "result.json").read_text())["schema"] == 1
    assert set(result.versions) == {"python", "react-clip", "torch", "transformers", "threads"}
    assert result.device == "cpu"
    assert len(result.recipe_hash) == len(result.sets[0].fingerprint) == 64
    assert result.sets[0].images == COUNT
    assert result.self_check.enabled
    assert result.self_check.robust_accuracy < 0.3 * result.self_check.clean_accuracy


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_other_result_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(rc.ReactClipError, match=r"result\.json .*again"):
        EvaluationResult.load(tmp_path / "result.json")


def test_runs_over_the_same_photos_are_joined(finished: Any) -> None:
    _, whole = finished
    one, two = (part_of(whole, label) for label in ("undefended", "react"))
    both = merge([one, two])
    assert both.rows == (*one.rows, *two.rows)
    assert [item["label"] for item in both.recipe["defenses"]] == ["undefended", "react"]
    assert both.attacks == whole.attacks
    assert merge([both, two]).rows == both.rows, "a defence of several runs is taken once"
    changed = {**two.recipe, "defenses": [{**item, "tau": 0.1} for item in two.recipe["defenses"]]}
    with pytest.raises(rc.ReactClipError, match="'react' is in several of the results"):
        merge([two, replace(two, recipe=changed)])
    for other, reason in (
        (replace(two, sets=(replace(two.sets[0], fingerprint="x"),)), "other photos or other"),
        (replace(two, draws=1), "draws is 2 in one and 1 in the other"),
        (replace(two, rows=tuple(two.select(attack="clean"))), "other photos or other"),
    ):
        with pytest.raises(rc.ReactClipError, match=reason):
            merge([one, other])


def test_a_run_shows_its_pictures(finished: Any) -> None:
    pictures, photos = Pictures(finished[0]), toy_photos()[0]
    for index, photo in enumerate(photos):
        shown, attacked = pictures.clean("data", index), pictures.attacked("data", "pgd-3", 4 / 255, index)
        assert shown is not None
        assert torch.allclose(shown, photo, atol=1e-6)
        assert attacked is None or 0 < (attacked - photo).abs().max() <= 4 / 255 + 1e-6
    assert pictures.clean("data", 40) is None
    assert pictures.clean("nothing", 0) is None
    assert pictures.attacked("data", "pgd-3", 8 / 255, 0) is None


def table_rows(result: EvaluationResult, name: str) -> list[dict[str, str]]:
    """The rows of one table as its CSV file has them."""
    table = next(table for table in tables.all_tables(result) if table.name == name)
    return list(csv.DictReader(io.StringIO(table.csv())))


def test_every_table_names_threat_scoring_and_model(finished: Any, tmp_path: Path) -> None:
    written = tables.write_tables(finished[1], tmp_path)
    names = ("accuracy", "per_dataset", "detection", "detection_per_dataset", "passes", "draws", "attacks")
    assert {path.name for path in written} == {f"{name}{kind}" for name in names for kind in (".md", ".csv", ".tex")}
    for path in written:
        words = ["oblivious", "leakage_free"] if path.suffix == ".csv" else ["oblivious", "not the defence", "toy"]
        assert all(word in path.read_text() for word in words)
        assert "self-check" not in path.read_text()


def test_tables_hold_the_results_numbers(finished: Any) -> None:
    result = finished[1]
    lines = tables.accuracy_table(result).markdown().splitlines()
    assert lines[2] == "| defence | clean | pgd-10 1/255 | pgd-3 4/255 |"
    for line in lines[4:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for cell, row in zip(cells[1:], result.select(dataset="mean", defense=cells[0]), strict=True):
            assert cell == f"{100 * row.accuracy:.1f} ± {50 * (row.high - row.low):.1f}"
    for values in table_rows(result, "per_dataset"):
        (row,) = result.select(dataset="data", attack="pgd-10", defense=values["defence"])
        for title, share in (("", row.accuracy), (" low", row.low), (" high", row.high)):
            assert float(values[f"pgd-10 1/255{title}"]) == pytest.approx(100 * share, rel=1e-5)
    # Detection counts gates that stay closed on clean images and open under attack.
    detected = next(values for values in table_rows(result, "detection") if values["defence"] == "react")
    clean, attacked, _ = result.select(dataset="mean", defense="react")
    assert float(detected["clean"]) == pytest.approx(100 * (1 - clean.gate_rate), rel=1e-5)
    assert float(detected["pgd-10 1/255"]) == pytest.approx(100 * attacked.gate_rate, rel=1e-5)
    (detected_there,) = [row for row in table_rows(result, "detection_per_dataset") if row["defence"] == "react"]
    assert (detected_there["data set"], detected_there["clean"]) == ("data", detected["clean"])
    assert [values["draws"] for values in table_rows(result, "draws")] == 2 * ["mean", "worst of 2", "majority"]


def test_latex_is_booktabs_and_escaped(finished: Any) -> None:
    text = tables.accuracy_table(replace(finished[1], title="50% of a_b & c")).latex()
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"50\% of a\_b \& c", r"$\pm$"):
        assert part in text
    assert not re.search(r"(?<!\\)[%_#]", text)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if line.endswith(r"\\")} == {3}


def test_what_was_not_measured_is_a_dash_and_an_empty_field() -> None:
    cell = tables.Cell(float("nan"))
    table = tables.Table("t", "c", ("a", "b"), ((("x|y",), (cell,)),), "oblivious", "leakage_free")
    assert r"| x\|y | – |" in table.markdown()
    assert table.csv().splitlines()[1] == "x|y,,oblivious,leakage_free"
    assert r"x|y & -- \\" in table.latex()
