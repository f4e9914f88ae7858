"""The ranking: its numbers against plain loops, runs that do not fit together, the page in a browser, own defences."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from evaluation_toys import CLASSES, ToyEncoder, toy_classifier, toy_photos, write_photos

import react_clip as rc
from react_clip.attacks import PGD, Corruption
from react_clip.cli import main
from react_clip.cli.rank import check_defense, load_defense
from react_clip.evaluation import evaluate
from react_clip.report.ranking import ALL, Ranking, rank

ATTACKS = {
    "weak": PGD(steps=1, eps=1 / 255),
    "other": PGD(steps=3, eps=1 / 255),
    "strong": PGD(steps=3, eps=4 / 255),
    "noisy": Corruption(severity=0.05),
    "dark": Corruption(type="brightness", severity=0.5),
}
DEFENSES = {"CLIP": rc.Undefended(), "ReACT": rc.ReACT(tau=0.3, views=3), "always": rc.ReACT(tau=None, views=2)}
DOC = Path(__file__).resolve().parents[2] / "docs" / "add-your-defence.md"


@pytest.fixture(autouse=True)
def no_traces(no_new_classes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget defences and import paths that a test has added."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def run_toy(folder: Path, defenses: Any = DEFENSES, seed: int = 0, **options: Any) -> Path:
    """A finished run of the toy."""
    settings: dict[str, Any] = {"attacks": ATTACKS, "batch": 20, "draws": 2, "progress": False, **options}
    evaluate(toy_classifier(), defenses, toy_photos(40, seed=seed), run_dir=folder, **settings)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_toy(tmp_path_factory.mktemp("rank") / "run")


@pytest.fixture(scope="module")
def ranking(folder: Path) -> Ranking:
    return rank([folder])


def test_numbers_are_those_of_plain_loops(folder: Path, ranking: Ranking) -> None:
    rows = pd.read_parquet(folder / "per_image.parquet").to_dict("records")

    def share(label: str, image: int, attack: str) -> float:
        draws = [r["correct"] for r in rows if (r["defense"], r["index"], r["attack"]) == (label, image, attack)]
        assert len(draws) == 2
        return sum(draws) / 2

    values = {entry.label: dict(zip(ranking.table.header[1:], entry.cells, strict=True)) for entry in ranking.entries}
    worst = {"1/255": ("weak", "other"), "4/255": ("strong",), ALL: ("weak", "other", "strong"), "clean": ("clean",)}
    for label, cells in values.items():
        for title, attacks in worst.items():
            least = [min(share(label, image, attack) for attack in attacks) for image in range(40)]
            assert cells[title].value == pytest.approx(100 * np.mean(least))
            assert cells[title].low <= cells[title].value <= cells[title].high
        natural = [share(label, image, attack) for image in range(40) for attack in ("noisy", "dark")]
        assert cells["damaged"].value == pytest.approx(100 * np.mean(natural))
        passes = [r["passes"] for r in rows if r["defense"] == label and r["attack"] == "clean"]
        assert cells["passes, clean"].value == pytest.approx(np.mean(passes))
    order = [values[entry.label][ALL].value for entry in ranking.entries]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) > 1, "the toy must tell defences apart for this test to say anything"


def test_a_defence_has_one_row_over_all_threat_models(folder: Path, tmp_path: Path) -> None:
    known = {"the same under another name": DEFENSES["ReACT"]}
    attacks = {"known": rc.attacks.Both(eps=4 / 255, steps=2, eot=1)}
    other = run_toy(tmp_path / "knows", known, threat="adaptive", attacks=attacks, self_check=False)
    both = rank([folder, other])
    column = both.table.header.index("knows it, 4/255") - 1
    measured = {entry.label: not np.isnan(entry.cells[column].value) for entry in both.entries}
    assert measured == {"CLIP": False, "ReACT": True, "always": False}
    assert len(both.conditions) == 2


def write_timings(path: Path, defenses: dict[str, rc.Defense]) -> Path:
    """A file of ``react-clip bench`` on the toy model: 1.5 ms for the first defence, 3 for the second."""
    contenders = [{"label": label, "milliseconds": 1.5 * number} for number, label in enumerate(defenses, 1)]
    report = {
        "model": "toy",
        "attacked": 1.0,
        "defenses": {label: defense.to_dict() for label, defense in defenses.items()},
        "contenders": contenders,
        "device": "cpu",
        "dtype": "fp32",
        "batch": 7,
        "command": "react-clip bench",
    }
    path.write_text(json.dumps(report))
    return path


def test_a_finetuned_tower_stands_beside_the_defences(folder: Path, tmp_path: Path) -> None:
    tower = run_toy(tmp_path / "tower", {"TeCoA": rc.Undefended()})
    result = json.loads((tower / "result.json").read_text())
    (tower / "result.json").write_text(json.dumps({**result, "model": "towers/TeCoA"}))
    crafted = {"threat": "transfer", "attack_clf": toy_classifier(), "self_check": False}
    transfer = run_toy(tmp_path / "transfer", {"CLIP": rc.Undefended()}, **crafted)
    for runs in ([folder, tower, transfer], [transfer, tower, folder]):
        both = rank(runs)
        column = both.table.header.index("other model, 4/255") - 1
        measured = {entry.label: not np.isnan(entry.cells[column].value) for entry in both.entries}
        assert measured == {"CLIP": True, "ReACT": False, "always": False, "TeCoA": False}
    times = rank([folder, tower], [write_timings(tmp_path / "bench.json", {"CLIP": rc.Undefended()})])
    assert {entry.label: entry.cells[-1].value for entry in times.entries if entry.cells[-1].value == 1.5} == {
        "CLIP": 1.5,
        "TeCoA": 1.5,
    }


def test_milliseconds_come_from_a_bench_of_the_same_configurations(folder: Path, tmp_path: Path) -> None:
    path = write_timings(
        tmp_path / "bench.json", {"ReACT": DEFENSES["ReACT"].replace(max_batch=7), "react": rc.ReACT()}
    )
    report = json.loads(path.read_text())
    ranking = rank([folder], [path])
    assert ranking.table.header[-1] == "ms, 100 % attacked"
    times = {entry.label: entry.cells[-1].value for entry in ranking.entries}
    assert times.pop("ReACT") == 1.5
    assert np.isnan(list(times.values())).all()
    for changed, error in (
        ({"model": "another"}, "timed another, but the runs defend toy"),
        ({"contenders": []}, "has no table of defences"),
        ({"contenders": None}, "has no table of defences"),
    ):
        path.write_text(json.dumps({**report, **changed}))
        with pytest.raises(rc.ReactClipError, match=error):
            rank([folder], [path])
    with pytest.raises(rc.ReactClipError, match="is no file of `react-clip bench`"):
        rank([folder], [tmp_path])


def test_runs_that_do_not_fit_together_are_refused(folder: Path, tmp_path: Path) -> None:
    mine = {"mine": rc.ReACT(tau=0.5, views=2)}
    with pytest.raises(rc.ReactClipError, match="other photos or other attacks; report them apart"):
        rank([folder, run_toy(tmp_path / "photos", mine, seed=1)])
    with pytest.raises(rc.ReactClipError, match="draws is 2 in one and 1 in the other"):
        rank([folder, run_toy(tmp_path / "draws", mine, draws=1)])
    other = run_toy(tmp_path / "model", mine)
    result = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**result, "model": "another"}))
    with pytest.raises(rc.ReactClipError, match=r"defends toy and .* defends another; rank runs of one model"):
        rank([folder, other])
    (tmp_path / "empty").mkdir()
    with pytest.raises(rc.ReactClipError, match="empty is no run: it has neither result"):
        rank([folder, tmp_path / "empty"])
    (folder_of_other := tmp_path / "threat").mkdir()
    for name in ("result.json", "per_image.parquet"):
        (folder_of_other / name).write_bytes((folder / name).read_bytes())
    changed = {**json.loads((folder / "result.json").read_text()), "threat": "adaptive"}
    (folder_of_other / "result.json").write_text(json.dumps(changed))
    with pytest.raises(rc.ReactClipError, match="no run has attackers who do not know the defence"):
        rank([folder_of_other])


def test_the_page_is_sorted_filtered_and_opened(ranking: Ranking, tmp_path: Path, visit: Callable[..., Any]) -> None:
    ranking.write_page(tmp_path / "ranking.html")
    page = visit(tmp_path / "ranking.html")

    def names() -> list[str]:
        return [text for text in page.locator("#ranking > tbody > tr:first-child > th").all_inner_texts() if text]

    assert names() == [entry.label for entry in ranking.entries]
    page.get_by_role("button", name="clean").first.click()
    clean = {entry.label: entry.cells[0].value for entry in ranking.entries}
    assert [clean[name] for name in names()] == sorted(clean.values(), reverse=True)
    page.get_by_role("button", name="defence", exact=True).click()
    assert names() == sorted(clean, key=str.lower)
    page.get_by_label("Show").fill("rea")
    assert page.locator("#ranking > tbody:visible").count() == 1
    page.get_by_label("Show").fill("")
    page.get_by_text("ReACT by data set").click()
    opened = page.locator("details[open]")
    assert '"kind": "react"' in opened.inner_text()
    assert opened.locator("tbody tr").count() == 1
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
    plain = visit(tmp_path / "ranking.html", java_script_enabled=False)
    assert plain.locator("#ranking > tbody").count() == 3


# ---------------------------------------------------------------------- defences of other people

RECIPE = """
title: Tiny
model: {model}
datasets: [toys]
attacks: [{{kind: pgd, steps: 2, eps: 8/255}}]
defenses: [{{kind: undefended, label: CLIP}}]
batch: 4
self_check: false
"""


def test_the_defence_of_the_docs_is_measured_and_ranked(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), flags=re.DOTALL)
    Path("my_defense.py").write_text(code)
    Path("tiny.yaml").write_text(RECIPE.format(model=tiny_folder))
    write_photos(tmp_path / "data", "toys", count=8, seed=0)
    clf = rc.ZeroShotClassifier.from_folder(rc.load(tiny_folder, device="cpu"), tmp_path / "data" / "toys" / "test")
    Path("heads").mkdir()
    features = clf.class_features.numpy()
    np.savez("heads/toys.npz", names=list(clf.names), folders=list(clf.names), features=features)
    words = ["rank", "my_defense.py:Mirror", "--recipe", "tiny.yaml", "--data", "data", "--heads", "heads", "--json"]
    assert main([*words, "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["defenses"]) == {"CLIP", "Mirror"}
    assert document["defenses"]["Mirror"][document["columns"].index("passes, clean")] == 2
    assert "Mirror" in Path("ranking.html").read_text(encoding="utf-8")
    assert main(["rank", "runs/Mirror", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


BAD = """
import torch
from react_clip.defenses.base import Defense, answer

class {name}(Defense):
    kind = "{name}"

    def cost(self):
        return 1, 0

    def __call__(self, clf, images, seed=0):
        features = clf.encoder(images)
        logits = clf.logits(features)
        {line}
        return answer(clf, features, logits=logits, passes=(1, 0))
"""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("logits = logits[:, :2]", rf"logits of shape \(2, 2\); they must be \(2, {CLASSES}\)"),
        ("logits = logits * float('nan')", "NaN or infinite"),
        ("raise ZeroDivisionError('no luck')", r"fails on two images \(ZeroDivisionError: no luck\)"),
    ],
)
def test_wrong_answers_are_refused_before_a_run(line: str, problem: str, tmp_path: Path) -> None:
    name = "Wrong" + re.sub(r"\W", "", line)
    (tmp_path / f"{name.lower()}.py").write_text(textwrap.dedent(BAD.format(name=name, line=line)))
    defense = load_defense(f"{tmp_path / name.lower()}.py:{name}")
    clf = rc.ZeroShotClassifier.from_features(ToyEncoder(), [str(i) for i in range(CLASSES)], np.eye(CLASSES))
    with pytest.raises(rc.ReactClipError, match=problem):
        check_defense(defense, clf)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist; give the file that defines the defence"),
        ("import no_such_package", "cannot be imported: No module named 'no_such_package'"),
        ("1 / 0", r"cannot be loaded \(ZeroDivisionError: division by zero\)"),
        ("Mine = 3", "is no defence; derive the class"),
    ],
)
def test_files_that_hold_no_defence_get_one_line(content: str | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / ("file" + re.sub(r"\W", "", str(content)) + ".py")
    if content is not None:
        file.write_text(content)
    with pytest.raises(rc.ReactClipError, match=problem):
        load_defense(f"{file}:Mine")


def test_a_defence_stands_alone_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(folder), "my.py:Mine"]) == 2
    assert "my.py:Mine is a defence to measure; give it alone" in capsys.readouterr().err
