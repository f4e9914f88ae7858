"""The tool that fills documents: numbers and tables come from result files, and a stale document is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import fill_docs
import pytest
import run_tables
from fill_docs import TABLES, filled

from react_clip.intervals import interval
from react_clip.report.ranking import ALL
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
    monkeypatch.setattr(run_tables, "RESULTS", tmp_path)
    for cached in (run_tables.load, run_tables.means_of, run_tables.compared):
        cached.cache_clear()
    return tmp_path


def table(*words: str) -> list[str]:
    return TABLES[words[0]](*words[1:]).splitlines()


def test_numbers_come_from_a_json_file_or_a_run(results: Path) -> None:
    text = "Takes <!-- number: bench.json gpu.rows.2.ms .2f -->9<!-- end --> ms, "
    text += "<!-- number: run ReACT clean -->?<!-- end --> %."
    row = run_tables.means_of("run")["ReACT", "clean"]
    assert filled(text) == text.replace("-->9<", "-->2.00<").replace("-->?<", f"-->{100 * row.accuracy:.1f}<")


def test_records_are_filtered_and_formatted(results: Path) -> None:
    text = "<!-- table: rows bench.json gpu.rows label=a|b|c ms:milliseconds:.1f parts.x -->\nold\n<!-- end -->\n"
    assert "| 1.2 | 3 |" in filled(text)
    assert table("rows", "bench.json", "gpu.rows", "label", "ms")[:4] == [
        *("| label | ms |", "| --- | ---: |", "| a | 1.25 |", "| b\\|c | – |")
    ]


def test_tables_of_runs_name_their_source(results: Path) -> None:
    row = run_tables.means_of("run")["ReACT", "pgd-10 4/255"]
    shown = interval(100 * row.paper_accuracy, 100 * row.paper_low, 100 * row.paper_high)
    for words, line, text in (
        ("scores run other", 0, "| method | clean | pgd-10 1/255 | pgd-10 4/255 | passes | backward passes |"),
        ("scores run other", 3, f"{shown} ({100 * row.accuracy:.1f})"),
        ("scores run other", 5, "| Other |"),
        ("attacks run ReACT gate_rate", 4, f"| pgd-10 4/255 | {100 * row.gate_rate:.1f} |"),
        ("run run accuracy", -1, "Threat model: oblivious"),
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


def test_two_defences_are_compared_on_the_same_photos(results: Path) -> None:
    images = run_tables.load("run").images
    right = images[images["attack"] == "pgd-10"].pivot_table(
        index=["dataset", "index", "eps"], columns="defense", values="robust", observed=True
    )
    right = right.astype(bool).groupby(level=["dataset", "index"], observed=True).all()
    one = run_tables.compared("run", "ReACT", "SecondLook", ALL)
    won, lost = (int((right[a] & ~right[b]).sum()) for a, b in (("SecondLook", "ReACT"), ("ReACT", "SecondLook")))
    assert (one.photos, one.won, one.lost) == (100, won, lost)
    text = '<!-- paired: run ReACT SecondLook "pgd-10 4/255" won -->?<!-- end -->'
    at = run_tables.compared("run", "ReACT", "SecondLook", "pgd-10 4/255")
    assert filled(text) == text.replace("?", str(at.won))
    assert [line.split(" | ")[0] for line in table("pairs", "run", "ReACT", "SecondLook")[2:5]] == [
        *("| clean", "| pgd-10 1/255", "| pgd-10 4/255")
    ]


def test_the_older_rule_of_second_look_is_called_so(results: Path) -> None:
    save_run(synthetic_run([CLIP, {**SECOND, "blend": 1.0}]), results / "old")
    assert list(dict.fromkeys(run_tables.load("old").images["defense"])) == ["CLIP", "SecondLook (older rule)"]
    assert any(line.startswith("| SecondLook (older rule) |") for line in table("ranking", "old"))
    assert not any("older" in line for line in table("ranking", "run"))


def test_a_suite_that_ended_after_its_first_attack_says_so(results: Path) -> None:
    run = synthetic_run([CLIP], attacks={"autoattack-ttc": (4 / 255,)})
    attacked = run.images.index[run.images["attacked"]]
    run.images["queries"] = 105.0
    run.images.loc[attacked[:3], "queries"] = 208.0
    run.images.loc[attacked[0], "attack_success"] = False
    save_run(run, results / "suite")
    assert (
        table("suites", "suite")[2]
        == f"| autoattack-ttc 4/255 (`suite`) | {len(attacked)} | {len(attacked) - 3} | 2 | 1 |"
    )


def test_claims_name_the_file_and_the_interval_of_every_marked_number(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_docs, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(
        "Nothing marked here. ReACT keeps [much](x.md), <!-- number: run ReACT clean -->?<!-- end --> %,\n"
        "and <!-- paired: run CLIP ReACT clean lost -->?<!-- end --> photos are lost. The end."
    )
    row = run_tables.means_of("run")["ReACT", "clean"]
    lost = run_tables.compared("run", "CLIP", "ReACT", "clean")
    claim = table("claims")[2].split(" | ")
    assert claim[0] == f"| ReACT keeps much, {100 * row.accuracy:.1f} %, and {lost.lost} photos are lost."
    assert claim[1].startswith(f"{100 * row.low:.1f} to {100 * row.high:.1f}; ")
    assert claim[2:] == ["100", "no; yes", "`run`", "README.md |"]
    assert table("claims")[-2] == "| `run` | `react-clip x` |"
