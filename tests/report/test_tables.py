"""Tables: the numbers of the run, strict ones and the paper's, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import pytest

from react_clip.evaluation.results import EvaluationResult
from react_clip.report.tables import Cell, Table, all_tables
from synthetic_runs import CLIP, REACT, synthetic_run


@pytest.fixture(scope="module")
def run() -> EvaluationResult:
    return synthetic_run([CLIP, REACT], draws=2)


def test_the_first_table_holds_strict_accuracies(run: EvaluationResult) -> None:
    table = all_tables(run)[0]
    assert table.header == ("defence", "clean", "pgd-10 1/255", "pgd-10 4/255")
    for (label,), cells in table.rows:
        rows = run.select(dataset="mean", defense=label)
        assert [cell.value for cell in cells] == pytest.approx([100 * row.accuracy for row in rows])
        assert [cell.low for cell in cells] == pytest.approx([100 * row.low for row in rows])
    for words in ("clean as well as attacked", "Threat model: oblivious", "Scoring: leakage_free", "toy, fp32"):
        assert words in table.caption


def test_every_measured_number_has_a_table(run: EvaluationResult) -> None:
    tables = {table.name: table for table in all_tables(run)}
    names = "accuracy accuracy_as_in_the_paper per_dataset detection passes seeds attacks"
    assert list(tables) == names.split()
    row = run.select(dataset="mean", defense="ReACT", attack="pgd-10", eps=4 / 255)[0]
    last = {name: table.rows[-1][1][-1].value for name, table in tables.items()}
    assert last["accuracy_as_in_the_paper"] == pytest.approx(100 * row.paper_accuracy)
    assert last["detection"] == pytest.approx(100 * row.gate_rate)
    parts = {part: cells[-1].value for (label, part), cells in tables["seeds"].rows if label == "ReACT"}
    images = run.images[(run.images["defense"] == "ReACT") & (run.images["eps"] == 4 / 255)]
    by_seed = images.groupby(["draw", "dataset"])["robust"].mean().groupby("draw").mean()
    assert parts == pytest.approx(
        {
            "mean": 100 * by_seed.mean(),
            "standard deviation": 100 * by_seed.std(),
            "worst seed": 100 * by_seed.min(),
            "right with every seed": 100 * row.worst,
        }
    )
    assert last["passes"] == pytest.approx(row.passes)
    clean = run.select(dataset="mean", defense="ReACT", attack="clean")[0]
    assert tables["detection"].rows[-1][1][0].value == pytest.approx(100 * (1 - clean.gate_rate))
    [dataset, defense], cells = tables["per_dataset"].rows[-1]
    [one] = run.select(dataset=dataset, defense=defense, attack="pgd-10", eps=4 / 255)
    assert cells[-1].value == pytest.approx(100 * one.accuracy)


def test_texts_are_escaped() -> None:
    table = Table("t", "50 % of a_b & c", ("who|what", "x"), ((("a|b_c",), (Cell(1.0, 0.5, 1.5),)),))
    assert table.markdown().splitlines()[2:] == ["| who\\|what | x |", "| --- | ---: |", "| a\\|b_c | 1.0 ± 0.5 |"]
    latex = table.latex()
    assert r"50 \% of a\_b \& c" in latex
    assert r"a|b\_c & 1.0 $\pm$ 0.5 \\" in latex
