"""The pages about performance: sections and figures come from the benchmark's files, and only from those that exist."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from performance_docs import performance
from performance_figures import growth, performance_figures, read_reports

from react_clip import cli
from react_clip.bench import OURS
from react_clip.choices import SHAPES

AGREEMENT = {"clean": {"photos": 40, "same_gate": 0.75, "same_label": 0.5}}
ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("cost", "aims", "precision", "compilation", "react", "sequential", "sweeps", "roofline", "tried")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table that the command writes about a small model, under the names of real ones, and the real sweeps."""
    folder = tmp_path_factory.mktemp("bench")
    common = ["--shapes", "small", "--images", "8", "--batch", "4", "--rounds", "2", "--singles", "2", "--quiet"]
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    small = {"text_config": sizes, "vision_config": {**sizes, "patch_size": 4, "image_size": 32}}
    table = folder / "cpu-vit-b-32-table-clean.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", small)
        assert cli.main(["bench", *common, "--defenses", "second_look", "--out", str(table)]) == 0
    shutil.copy(table, folder / "cpu-vit-b-16-second-look-clean.json")
    for path in (ROOT / "benchmarks" / "results" / "bench").glob("cpu-vit-b-32-sweep-*.json"):
        shutil.copy(path, folder)
    where = {"device": "cpu", "dtype": "float32", "kept": True}
    ideas = [
        {"idea": "a faster way", "what": "half of it", "why": "it is faster", "ratio": 0.5, **where},
        {"idea": "int8 in OpenVINO", "what": "fewer bits", "why": "", "ratio": 0.25, "agreement": AGREEMENT, **where},
    ]
    (folder / "tried.json").write_text(json.dumps(ideas))
    return folder


@pytest.mark.parametrize("section", SECTIONS)
def test_without_measurements_there_is_no_section(tmp_path: Path, section: str) -> None:
    assert performance(section, tmp_path) == ""


def test_every_number_of_a_section_is_one_of_its_file(measured: Path) -> None:
    report = json.loads((measured / "cpu-vit-b-32-table-clean.json").read_text())
    rows = {row["label"]: row for row in report["contenders"]}
    look, react = rows["second_look"], rows["ReACT"]
    rounds = [
        mine / plain
        for mine, plain in zip(look["round_milliseconds"], rows["bare encoder"]["round_milliseconds"], strict=True)
    ]
    text = performance("cost", measured)
    assert f"| {sum(rounds) / 2:.2f} | {look['passes']:.2f} | {look['overhead']:.2f} (" in text
    assert report["command"]
    assert "`cpu-vit-b-16-second-look-clean.json`; each holds" in text
    for label in ("bare encoder", "second_look", "ReACT", "all 14 passes"):
        for value in (rows[label]["milliseconds"], rows[label]["latency_p50"]):
            assert (f"| {value:,.0f} |" if value >= 100 else f"| {value:#.3g} |") in text
    assert f"| at most 1.85 | {sum(rounds) / 2:.2f} | " in performance("aims", measured)
    assert f"| {react['passes']:.2f} | {react['overhead']:.2f} (" in performance("react", measured)


def test_ideas_are_shown_with_their_ratios_and_precisions_with_their_agreement(measured: Path) -> None:
    tried = performance("tried", measured)
    assert "| idea | cpu, float32 | kept | why |" in tried
    assert "| a faster way: half of it | 0.50 | yes | it is faster |" in tried
    assert "int8" not in tried
    row = "| int8 in OpenVINO, CPU | 0.25 | SecondLook | 75.00 %, 50.00 % of 40 |"
    assert row in performance("precision", measured).splitlines()
    assert "sweeps-cpu.svg" in performance("sweeps", measured)
    assert "| ViT-B/32, x86_64 CPU, 2 threads, bf16 |" in performance("roofline", measured)


def test_points_are_compared_within_rounds_and_beside_the_bare_encoder() -> None:
    def point(value: int, ours: list[float], bare: list[float], passes: float) -> dict[str, Any]:
        rows = [("bare encoder", bare, 1.0), ("ReACT", ours, passes)]
        contenders = [{"label": label, "round_milliseconds": times, "passes": work} for label, times, work in rows]
        return {"value": value, "contenders": contenders}

    # The second round is slow for everybody, the third one for all of the second point.
    first = point(1, [4.0, 8.0, 4.0], [1.0, 2.0, 1.0], 4.0)
    second = point(8, [6.6, 13.2, 19.8], [1.5, 3.0, 4.5], 4.0)
    report = {"sweeps": {"images": [first, second]}}
    assert growth(report, "images", OURS) == [(1, 1.0), (8, pytest.approx(1.1))]


def test_figures_show_what_is_there_and_say_whose_it_is(measured: Path) -> None:
    drawn = performance_figures(read_reports(measured))
    assert list(drawn) == ["cost-cpu", "sweeps-cpu", "roofline-cpu"]
    bars = drawn["cost-cpu"]().axes
    assert [label.get_text() for label in bars[0].get_yticklabels()][:2] == ["bare encoder", "ReACT"]
    panels = drawn["sweeps-cpu"]().axes
    assert len(panels) == 4
    assert all("ViT-B/32" in {text.get_text() for text in panel.texts} for panel in panels)
    [roof] = drawn["roofline-cpu"]().axes
    words = {" ".join(text.get_text().split()) for text in roof.texts}
    assert {"ViT-B/32, bare encoder", "ViT-B/32, ReACT"} <= words
    assert performance_figures([]) == {}
