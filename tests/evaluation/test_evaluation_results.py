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
from evaluation_toys import COUNT, part_of, toy_photos, toy_run

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
    with pytest.raises(rc.ReactClipError, match="'react' is in several of the results"):
        merge([two, two])
    for other, reason in (
        (replace(two, sets=(replace(two.sets[0], fingerprint="x"),)), "other photos or other"),
        (replace(two, draws=1), "draws is 2 in one and 1 in the other"),
        (replace(two, rows=tuple(two.select(attack="clean"))), "other photos or other"),
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
    attacked = [pictures.attacked(name, "pgd-3", 4 / 255, index) for index in range(len(photos))]
    distances = [
        float((one - photo).abs().max()) for one, photo in zip(attacked, photos, strict=True) if one is not None
    ]
    assert all(0 < distance <= 4 / 255 + 1e-6 for distance in distances)
    assert len(distances) == result.select(attack="pgd-3")[0].attacked
    assert pictures.clean(name, 40) is None
    assert pictures.clean("nothing", 0) is None
    assert pictures.attacked(name, "pgd-3", 8 / 255, 0) is None


def test_every_table_names_threat_scoring_and_model(finished: Any, tmp_path: Path) -> None:
    written = tables.write_tables(finished[1], tmp_path)
    names = {path.stem for path in written}
    assert names == {"accuracy", "per_dataset", "detection", "passes", "draws", "attacks"}
    assert len(written) == 3 * len(names)
    for path in written:
        text = path.read_text()
        assert "oblivious" in text
        assert "leakage_free" in text.replace("\\", "")
        if path.suffix != ".csv":
            assert "not the defence" in text
            assert "toy" in text
            assert "self-check" not in text


def test_markdown_cells_are_the_results_numbers(finished: Any) -> None:
    result = finished[1]
    lines = tables.accuracy_table(result).markdown().splitlines()
    assert lines[2] == "| defence | clean | pgd-10 1/255 | pgd-3 4/255 |"
    for line in lines[4:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for cell, row in zip(cells[1:], result.select(dataset="mean", defense=cells[0]), strict=True):
            assert cell == f"{100 * row.accuracy:.1f} ± {50 * (row.high - row.low):.1f}"


def test_csv_has_numbers_and_intervals(finished: Any) -> None:
    result = finished[1]
    rows = list(csv.DictReader(io.StringIO(tables.per_dataset_table(result).csv())))
    assert len(rows) == 2
    for row in rows:
        assert (row["threat"], row["scoring"]) == ("oblivious", "leakage_free")
        (expected,) = result.select(dataset="data", attack="pgd-10", defense=row["defence"])
        for title, value in (("", expected.accuracy), (" low", expected.low), (" high", expected.high)):
            assert float(row[f"pgd-10 1/255{title}"]) == pytest.approx(100 * value, rel=1e-5)


def test_latex_is_booktabs_and_escaped(finished: Any) -> None:
    renamed = replace(finished[1], title="50% of a_b & c")
    text = tables.accuracy_table(renamed).latex()
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"50\% of a\_b \& c", r"$\pm$"):
        assert part in text
    assert not re.search(r"(?<!\\)[%_#]", text)
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if line.endswith(r"\\")} == {3}


def test_detection_counts_what_the_gate_should_do(finished: Any) -> None:
    result = finished[1]
    rows = list(csv.DictReader(io.StringIO(tables.detection_table(result).csv())))
    (clean,) = result.select(dataset="mean", attack="clean", defense="react")
    (attacked,) = result.select(dataset="mean", attack="pgd-10", defense="react")
    react = next(row for row in rows if row["defence"] == "react")
    assert float(react["clean"]) == pytest.approx(100 * (1 - clean.gate_rate), rel=1e-5)
    assert float(react["pgd-10 1/255"]) == pytest.approx(100 * attacked.gate_rate, rel=1e-5)


def test_draws_have_mean_worst_and_majority(finished: Any) -> None:
    text = tables.draws_table(finished[1]).markdown()
    for kind in ("| mean |", "| worst of 2 |", "| majority |"):
        assert text.count(kind) == 2


def test_attack_all_never_comes_without_its_leakage(tmp_path: Path) -> None:
    result = toy_run(tmp_path, scoring="attack_all", draws=1, self_check=False)
    table = tables.accuracy_table(result)
    (row,) = result.select(dataset="mean", attack="pgd-10", defense="react")
    assert f"({row.leakage:g} leaked)" in table.markdown()
    assert "pgd-10 1/255 leaked" in table.csv()
    assert "every image is attacked" in table.caption
    assert all("self-check was switched off" in one.caption for one in tables.all_tables(result))


def test_what_was_not_measured_is_a_dash_and_an_empty_field() -> None:
    cell = tables.Cell(float("nan"))
    table = tables.Table("t", "c", ("a", "b"), ((("x|y",), (cell,)),), "oblivious", "leakage_free")
    assert r"| x\|y | – |" in table.markdown()
    assert table.csv().splitlines()[1] == "x|y,,oblivious,leakage_free"
    assert r"x|y & -- \\" in table.latex()
