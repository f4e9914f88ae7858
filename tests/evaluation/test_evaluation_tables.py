"""Tables: the right numbers, each with its interval, its threat model and its scoring, in three formats."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from evaluation_toys import toy_run

from react_clip.report import tables


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
    renamed = dataclasses.replace(finished[1], title="50% of a_b & c")
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
