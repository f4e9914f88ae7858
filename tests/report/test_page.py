"""Reports of finished, unfinished, damaged and joined runs: their texts and the files they write."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import react_clip as rc
from react_clip.cli import main
from react_clip.evaluation import EvaluationResult
from react_clip.report.page import Report, write_report
from react_clip.report.tables import all_tables

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def text_of(page: Path) -> str:
    """The words of a page, without markup, style, script and data."""
    markup = r"<(script|style)\b.*?</\1>|<[^>]+>|\s+"
    return re.sub(r" +", " ", html.unescape(re.sub(markup, " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)))


def words_of(folder: Path, out: Path, **options: Any) -> str:
    return text_of(write_report([folder], out, **options).page)


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


# ---------------------------------------------------------------------- a finished run


def test_a_report_is_one_page_and_its_figures(toy_report: tuple[Report, list[tuple[str, int, int]]]) -> None:
    report, steps = toy_report
    assert report.missing == ()
    assert report.figures
    written = {path for path in report.page.parent.rglob("*") if path.is_file()}
    assert written == {report.page, *report.figures}
    assert {path.suffix for path in report.figures} == {".svg", ".png"}
    assert [step[1] for step in steps] == list(range(1, len(report.figures) // 2 + 1))
    # Scripts and data aside, everything that could load something is an attribute.
    page = re.sub(r"<(script|style)\b.*?</\1>", "", report.page.read_text(), flags=re.DOTALL)
    linked = {link for link in re.findall(r'<a [^>]*href="([^"]*)"', page) if link[0] != "#"}
    assert linked == {f"figures/{path.name}" for path in report.figures}
    assert not re.search(r"\s(src|srcset|action|style)=", page), "nothing is loaded, and the policy forbids styles"
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids)), "ids of different figures never clash"


def test_the_page_says_what_the_run_was(toy_folder: Path, toy_report: tuple[Report, Any]) -> None:
    page, words = toy_report[0].page.read_text(), text_of(toy_report[0].page)
    result = EvaluationResult.load(toy_folder / "result.json")
    facts = [result.recipe_hash, result.device, result.created, *result.versions.values(), *result.notes]
    facts += [fact for info in result.sets for fact in (info.fingerprint, info.model_fingerprint)]
    facts += ["attacks 0; defences 0, 1", "Passed.", "Toys & <b>bold</b> claims", "480 of 480 rows (40 of 40 images)"]
    assert [fact for fact in (*facts, result.threat_meaning) if fact not in words] == []
    captions = re.findall(r"<caption>(.*?)</caption>", page)
    assert len(captions) == len(all_tables(result)) == 7
    assert all("Threat model: oblivious" in text and "Scoring: leakage_free" in text for text in captions)
    row = result.select(dataset="mean", attack="pgd-10", defense="react")[0]
    assert f'title="95 % interval: {100 * row.low:.2f} to {100 * row.high:.2f}"' in page


def test_the_summary_is_computed_from_the_numbers(tmp_path: Path, no_figures: None) -> None:
    words = words_of(BENCHMARKS / "table1", tmp_path, rows=0)
    result = EvaluationResult.load(BENCHMARKS / "table1" / "result.json")
    rows = result.select(dataset="mean", attack="pgd-10", eps=16 / 255)
    best = max(rows, key=lambda row: row.accuracy)
    worst = min((row for row in rows if row.defense != "CLIP"), key=lambda row: row.accuracy)
    assert f"the best defence is {best.defense} with {100 * best.accuracy:.1f} % [" in words
    assert f"the worst {worst.defense} with {100 * worst.accuracy:.1f} % [" in words
    clean = {row.defense: row.accuracy for row in result.select(dataset="mean", attack="clean")}
    assert f"{best.defense} costs {100 * (clean['CLIP'] - clean[best.defense]):.1f} points;" in words
    # Numbers that say the opposite are reported as the opposite.
    turned = [dataclasses.replace(row, accuracy=1 - row.accuracy, low=0.0, high=1.0) for row in result.rows]
    dataclasses.replace(result, rows=tuple(turned)).save(tmp_path / "turned" / "result.json")
    words = words_of(tmp_path / "turned", tmp_path, rows=0)
    assert f"the best defence is {worst.defense} with" in words
    assert "overlaps that of" in words
    assert "gains" in words


def test_a_calibration_is_shown_with_its_figure(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = BENCHMARKS / "calibration" / "clip-vit-b-16.json"
    for folder, given in ((tmp_path / "empty", file), (BENCHMARKS / "calibration", None)):
        report = write_report([folder], tmp_path / "out", calibration=given)
        assert "Calibration of clip-vit-b-16" in text_of(report.page)
        assert tmp_path / "out" / "figures" / "calibration.svg" in report.figures


# ---------------------------------------------------------------------- a run with something missing


def test_an_unfinished_run_says_so_and_counts_what_is_kept(toy_copy: Path, tmp_path: Path) -> None:
    shards = len(list(toy_copy.rglob("*.safetensors")))
    for name in ("result.json", "per_image.parquet"):
        (toy_copy / name).unlink()
    words = words_of(toy_copy, tmp_path / "out")
    assert f"the run is not finished ({shards} finished pieces of work are kept)" in words
    assert "There are no finished numbers in this folder yet" in words
    assert "Toys & <b>bold</b> claims" in words, "the recipe still tells the title"


def test_damaged_parts_are_named_and_the_rest_is_shown(toy_copy: Path, tmp_path: Path, no_figures: None) -> None:
    rows, result = toy_copy / "per_image.parquet", toy_copy / "result.json"
    whole = rows.read_bytes()
    for content in (b"", b"no parquet at all", whole[:-200]):
        rows.write_bytes(content)
        report = write_report([toy_copy], tmp_path / "out")
        assert any("per_image.parquet cannot be read" in line for line in report.missing)
        assert "The run has no rows per image yet" in text_of(report.page)
        assert "accuracy in %" in text_of(report.page), "the tables come from the result"
    rows.write_bytes(whole)
    result.write_text(json.dumps({**json.loads(result.read_text()), "schema": 99}))
    shutil.rmtree(toy_copy / "shards")
    report = write_report([toy_copy], tmp_path / "out")
    assert "no complete result of this version (schema" in report.missing[0]
    assert "photos were not kept in this folder" in report.missing[1]
    data = data_of(report.page)
    assert (len(data["columns"]["index"]), data["photos"]) == (480, {}), "the rows per image are still there"
    assert len(write_report([toy_copy], tmp_path / "out", photos=0).missing) == 1, "nobody asked for pictures"


def test_without_matplotlib_the_page_still_comes(
    toy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("react_clip.report.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("react_clip.report.figures", raising=False)
    report = write_report([toy_folder], tmp_path / "out")
    assert report.figures == ()
    assert any("need matplotlib, which is not installed" in line for line in report.not_drawn)
    assert "accuracy in %" in report.page.read_text()


# ---------------------------------------------------------------------- text that is no markup


def test_hostile_texts_stay_text(toy_copy: Path, tmp_path: Path, no_figures: None) -> None:
    result = EvaluationResult.load(toy_copy / "result.json")
    dataclasses.replace(result, title="{{ run }} {% x %} ${x} \\1 %s </title>").save(toy_copy / "result.json")
    page = write_report([toy_copy], tmp_path / "out").page
    text = page.read_text()
    assert "<title>{{ run }} {% x %} ${x} \\1 %s &lt;/title&gt;</title>" in text
    assert text.count("<script") == 2, "the data and the script, nothing from a class name"
    assert "<!--" not in text
    assert "<img" not in text
    assert "<img src=x onerror=alert(1)>" in data_of(page)["names"]


# ---------------------------------------------------------------------- the command


def test_the_command_writes_beside_the_run_and_joins_several(
    toy_copy: Path,
    second_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_figures: None,
) -> None:
    assert main(["report", str(toy_copy), "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(toy_copy / "report" / "index.html")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(toy_copy), str(second_folder), "--json", "--quiet"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"page", "figures", "missing"}
    page = tmp_path / "report" / "index.html"
    assert page.is_file(), "several runs are reported in the working directory"
    data = data_of(page)
    assert [item["label"] for item in data["defenses"]] == ["undefended", "react", "slow"]
    assert data["photos"], "pictures of any of the folders do"
    with pytest.raises(rc.ReactClipError, match="cannot be joined"):
        write_report([toy_copy, BENCHMARKS / "first-look"], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere does not exist; give the --out folder of"),
        (["RUN/../photos"], "photos is no run: it has neither result.json nor recipe.yaml"),
        (["RUN", "--rows", "-1"], "--rows is -1; it must be at least 0"),
        (["RUN", "--photos", "-5"], "--photos is -5; it must be at least 0"),
        (["RUN", "--calibration", "nowhere.json"], "nowhere.json"),
        (["RUN", "--calibration", "RUN/result.json"], "result.json"),
        (["RUN", "--out", "RUN/result.json"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    toy_copy: Path, capsys: pytest.CaptureFixture[str], no_figures: None, arguments: list[str], says: str
) -> None:
    folder = toy_copy.parent / "photos"
    folder.mkdir()
    code = main(["report", "--quiet", *(argument.replace("RUN", str(toy_copy)) for argument in arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert says in captured.err
    assert not list(folder.iterdir())
