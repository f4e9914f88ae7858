"""The page about performance: sections and figures come from the benchmark's files, and only from those that exist."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from performance_docs import performance
from performance_figures import growth, performance_figures, read_reports

from react_clip import cli
from react_clip.choices import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("cost", "aims", "sweeps", "roofline", "tried")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table that the command writes about a small model, under the name of a real one, and the real sweeps."""
    folder = tmp_path_factory.mktemp("bench")
    common = ["--shapes", "small", "--images", "8", "--batch", "4", "--rounds", "2", "--singles", "2", "--quiet"]
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    small = {"text_config": sizes, "vision_config": {**sizes, "patch_size": 8, "image_size": 32}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", small)
        assert cli.main(["bench", *common, "--out", str(folder / "cpu-vit-b-32-table-clean.json")]) == 0
    for path in (ROOT / "benchmarks" / "results" / "bench").glob("cpu-vit-b-32-sweep-*.json"):
        shutil.copy(path, folder)
    idea: dict[str, Any] = {"idea": "a faster way", "what": "half of it", "kept": True, "why": "it is faster"}
    (folder / "tried.json").write_text(json.dumps([{**idea, "ratio": 0.5, "device": "cpu", "dtype": "bf16"}]))
    return folder


@pytest.mark.parametrize("section", SECTIONS)
def test_without_measurements_there_is_no_section(tmp_path: Path, section: str) -> None:
    assert performance(section, tmp_path) == ""


def test_every_number_of_a_section_is_one_of_its_file(measured: Path) -> None:
    report = json.loads((measured / "cpu-vit-b-32-table-clean.json").read_text())
    text = performance("cost", measured)
    for row in report["contenders"]:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['label']} |"))
        assert f"| {row['passes']:.2f} | {row['overhead']:.2f} (" in line
        assert f"| {row['latency_p50']:,.1f} | {row['latency_p99']:,.1f} |" in line
    assert report["command"] in text
    assert "Weights are random" in text

    text = performance("sweeps", measured)
    points = json.loads((measured / "cpu-vit-b-32-sweep-classes.json").read_text())["sweeps"]["classes"]
    for point in points:
        assert f"| classes {point['value']:,.0f} | {point['contenders'][1]['milliseconds']:,.3f} |" in text
    assert "% attacked" in text

    aims = performance("aims", measured)
    overhead = next(row["overhead"] for row in report["contenders"] if row["label"] == "ReACT")
    assert f"| {overhead:.2f}{'' if overhead <= 1.15 else ', missed'} |" in aims
    assert performance("roofline", measured).startswith("## Roofline")
    tried = performance("tried", measured)
    assert "| idea | cpu, bf16 | kept | why |" in tried
    assert "| a faster way: half of it | 0.50 | yes | it is faster |" in tried


def test_points_are_compared_within_rounds_and_beside_the_bare_encoder() -> None:
    def point(value: int, ours: list[float], bare: list[float], passes: float) -> dict[str, Any]:
        rows = [("bare encoder", bare, 1.0), ("ReACT", ours, passes)]
        contenders = [{"label": label, "round_milliseconds": times, "passes": work} for label, times, work in rows]
        return {"value": value, "contenders": contenders}

    # The second round is slow for everybody, the third one for all of the second point.
    first = point(1, [4.0, 8.0, 4.0], [1.0, 2.0, 1.0], 4.0)
    second = point(8, [6.6, 13.2, 19.8], [1.5, 3.0, 4.5], 4.0)
    report = {"sweeps": {"images": [first, second]}}
    assert growth(report, "images") == [(1, 1.0), (8, pytest.approx(1.1))]


def test_newer_measurements_take_the_place_of_older_ones(tmp_path: Path, measured: Path) -> None:
    table = (measured / "cpu-vit-b-32-table-clean.json").read_text()
    (tmp_path / "rivals-clean.json").write_text(table)
    assert [report["file"] for report in read_reports(tmp_path)] == ["rivals-clean.json"]
    (tmp_path / "gpu-vit-b-16-table-clean.json").write_text(table)
    assert [report["file"] for report in read_reports(tmp_path)] == ["gpu-vit-b-16-table-clean.json"]


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
