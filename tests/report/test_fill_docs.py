"""The tool that fills documents: numbers and tables come from result files, and a stale document is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import fill_docs
import pytest
from fill_docs import TABLES, filled

from synthetic_runs import CLIP, REACT, SECOND, save_run, synthetic_run

RECORDS = [
    {"label": "a", "ms": 1.25, "parts": {"x": 3}},
    {"label": "b|c", "ms": None, "parts": {"x": 4}},
    {"label": "d", "ms": 2.0, "parts": {"x": 5}},
]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bench.json").write_text(json.dumps({"gpu": {"rows": RECORDS}}))
    save_run(synthetic_run([CLIP, REACT, SECOND]), tmp_path / "run")
    save_run(synthetic_run([{**SECOND, "label": "Other"}]), tmp_path / "other")
    monkeypatch.setattr(fill_docs, "RESULTS", tmp_path)
    fill_docs.load.cache_clear()
    return tmp_path


def table(*words: str) -> list[str]:
    return TABLES[words[0]](*words[1:]).splitlines()


def test_numbers_come_from_a_json_file_or_a_run(results: Path) -> None:
    text = "Takes <!-- number: bench.json gpu.rows.2.ms .2f -->9<!-- end --> ms, "
    text += "<!-- number: run ReACT clean -->?<!-- end --> %."
    [row] = fill_docs.load("run").select(dataset="mean", defense="ReACT", attack="clean")
    assert filled(text) == text.replace("-->9<", "-->2.00<").replace("-->?<", f"-->{100 * row.accuracy:.1f}<")
    assert filled(filled(text)) == filled(text)


def test_records_are_filtered_and_formatted(results: Path) -> None:
    text = "<!-- table: rows bench.json gpu.rows label=a|b|c ms:milliseconds:.1f parts.x -->\nold\n<!-- end -->\n"
    assert "| 1.2 | 3 |" in filled(text)
    assert table("rows", "bench.json", "gpu.rows", "label", "ms")[:4] == [
        *("| label | ms |", "| --- | ---: |", "| a | 1.25 |", "| b\\|c | – |")
    ]


def test_tables_of_runs_name_their_source(results: Path) -> None:
    [row] = fill_docs.load("run").select(dataset="mean", defense="ReACT", attack="pgd-10", eps=4 / 255)
    half = 50 * (row.paper_high - row.paper_low)
    for words, line, text in (
        ("scores run other", 0, "| method | clean | pgd-10 1/255 | pgd-10 4/255 | passes | backward passes |"),
        ("scores run other", 3, f"{100 * row.paper_accuracy:.1f} ± {half:.1f} ({100 * row.accuracy:.1f})"),
        ("scores run other", 5, "| Other |"),
        ("attacks run ReACT gate_rate", 4, f"| pgd-10 4/255 | {100 * row.gate_rate:.1f} |"),
        ("run run accuracy", -1, "Threat model: oblivious"),
        ("sets run clean CLIP|ReACT", 0, "| CLIP → ReACT | clean |"),
        ("mean run ReACT drift", 0, "| data set | clean | 1/255 | 4/255 |"),
        ("mean run ReACT drift", -1, "made by `react-clip x`"),
        ("ranking run only=clean", 0, "| defence | clean |"),
    ):
        assert text in table(*words.split())[line]


def test_a_stale_document_is_noticed_and_rewritten(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fill_docs, "ROOT", tmp_path)
    document = tmp_path / "README.md"
    document.write_text("<!-- number: bench.json gpu.rows.0.parts.x -->0<!-- end -->\n")
    monkeypatch.setattr("sys.argv", ["fill_docs.py", "--check"])
    assert fill_docs.main() == 1
    assert "README.md: out of date" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fill_docs.py"])
    assert fill_docs.main() == 0
    assert "-->3<!--" in document.read_text()
    document.write_text("<!-- table: no-such-table -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="a mark cannot be filled"):
        fill_docs.main()
