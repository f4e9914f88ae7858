"""The report of a run: what the page holds, that texts stay text, and the command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from evaluation_toys import toy_run

import react_clip as rc
from react_clip.cli import main
from react_clip.report.demo_page import Answer, Outcome, PhotoResult, write_demo
from react_clip.report.figures import KINDS
from react_clip.report.page import write_report
from synthetic_runs import CLIP, REACT, save_run, synthetic_run


@pytest.fixture(autouse=True)
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave most figures out: they have their own tests and take most of a report's time."""
    few = {name: KINDS[name] for name in ("passes", "sigma", "leakage")}
    monkeypatch.setattr("react_clip.report.figures.KINDS", few)


def rows_of(page: str) -> list[str]:
    """Rows of the table of images."""
    return re.findall(r'<tr><th scope="row">(.*?)</tr>', page[page.index('<table class="photos">') :], flags=re.DOTALL)


def test_the_page_has_figures_tables_images_and_the_run(folder: Path, tmp_path: Path) -> None:
    report = write_report([folder], tmp_path / "out")
    text = report.page.read_text()
    assert text.count("data:image/svg+xml;base64,") == len(report.figures) / 2 == 2
    assert all(path.is_file() for path in report.figures)
    for words in ("100 of 100 images", "git commit", "abc", "react-clip x", "Threat model: oblivious"):
        assert words in text
    assert [line.partition(" ")[0] for line in report.missing] == ["Label", "photos"]
    rows = rows_of(text)
    assert len(rows) == 100
    assert all(row.count("<td") == 2 + 3 for row in rows), "pictures, CLIP's clean answer, and every defence's answer"
    assert 'class="wrong"><b>✗' in text


def test_texts_stay_text_and_the_page_asks_for_nothing(folder: Path, tmp_path: Path) -> None:
    text = write_report([folder], tmp_path).page.read_text()
    assert "<title>Toys {{ run }} &lt;/title&gt;</title>" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "<img src=x" not in text
    assert text.count("<script>") == 1
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert "default-src 'none'" in text


def test_a_kept_photo_is_shown_with_its_perturbation(tmp_path: Path) -> None:
    toy_run(tmp_path / "run", seeds=())
    page = write_report([tmp_path / "run"], tmp_path / "out").page.read_text()
    counts = [row.count("<img") for row in rows_of(page)]
    assert len(counts) == 40
    assert set(counts) == {1, 3}, "the photo; the attacked photo and the perturbation where it was attacked"
    assert "the perturbation, magnified" in page


def test_the_command_joins_runs_or_writes_beside_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [save_run(synthetic_run([entry]), tmp_path / entry["label"]) for entry in (CLIP, REACT)]
    for given, out in ((runs, tmp_path / "out"), (runs[:1], runs[0] / "report")):
        options = ["--out", str(out)] if len(given) > 1 else []
        assert main(["report", *map(str, given), *options, "--json", "--quiet"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["page"] == str(out / "index.html")
        assert ("ReACT, pgd-10" in Path(answer["page"]).read_text()) == (len(given) > 1)


def test_a_damaged_run_is_one_line(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "images.parquet").write_bytes((copy / "images.parquet").read_bytes()[:-100])
    with pytest.raises(rc.ReactClipError, match=r"images.parquet is damaged .* run the evaluation again"):
        write_report([copy], tmp_path / "out")
    with pytest.raises(rc.ReactClipError, match=r"result\.json does not exist"):
        write_report([tmp_path], tmp_path / "out")


def test_the_demo_shows_every_answer_with_the_names_of_its_diagnostics(tmp_path: Path) -> None:
    def outcome(eps: int, noise: float, *names: str) -> Outcome:
        measured = {"distance": 0.123, "instability": None, "gated": True, "passes": 1.5}
        plain, ours = (names[0], 0.6, {}), (names[1], 0.9, measured)
        answers = [Answer("CLIP", "plain", *plain), Answer("SecondLook", "second_look", *ours)]
        pixels = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(eps))
        return Outcome(eps, noise, pixels, torch.full((3, 8, 8), eps / 255), answers)

    outcomes = [outcome(0, 0.0, "cat", "cat"), outcome(0, 0.05, "cat", "cat"), outcome(4, 0.0, "dog", "cat")]
    result = PhotoResult("cat.jpg", outcomes)
    write_demo(tmp_path / "demo.html", [result], model="toy", defenses=["one line"], steps=10, classes=2)
    text = (tmp_path / "demo.html").read_text()
    assert "for the clean photo, of 1 attacked ones (PGD-10): CLIP 0, SecondLook 1." in text
    assert "90%, distance 0.123, gated True, passes 1.5" in text
    assert text.count("<img") == 5, "three versions, the noise and the perturbation"
    assert "the change, magnified 32 times" in text
    assert [row["eps"] for row in result.to_dict()["outcomes"]] == [0, 0, 4]
