"""Figures of the runs that the repository keeps: they exist, they show the results' numbers, they can be read."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures import FigureOf, all_figures, calibration_figure, why_not, write_figures
from react_clip.report.run import Run, read_run
from react_clip.report.style import COLOURS, INK, PAPER, SMALL, budget_colour, save_figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CALIBRATION = RESULTS / "calibration" / "clip-vit-b-16.json"
EXPECTED = {
    "table1": {"accuracy", "drift", "scales", "cost", "accuracy-per-set", "drift-per-set"},
    "table1-extended": {"beyond", "cost"},
    "table3": {"sweep-tau", "drift"},
    "table4": {"gate-scores", "gate-scores-per-set", "accuracy"},
    "anchor-scale": {"anchor-scale"},
    "sweep-views": {"sweep-views"},
    "sweep-alpha": {"sweep-alpha"},
    "step-quarter": {"accuracy"},
    "table5-pgd100": {"accuracy", "drift-per-set"},
}
SINGLE = [
    *(("table1", name) for name in ("accuracy", "cost", "drift", "scales")),
    *(("table1-extended", name) for name in ("beyond",)),
    *(("anchor-scale", "anchor-scale"), ("table3", "sweep-tau"), ("sweep-views", "sweep-views")),
    *(("sweep-alpha", "sweep-alpha"), ("table4", "gate-scores")),
]


@cache
def run_of(name: str) -> Run:
    return read_run(RESULTS / name)


@cache
def figure_of(run: str, name: str) -> FigureOf:
    return next(figure for figure in all_figures(run_of(run)) if figure.name == name)


@cache
def drawn(run: str, name: str) -> Figure:
    return figure_of(run, name).make()


def lines_of(axes: Axes) -> list[tuple[list[float], list[float], str]]:
    found = [(line.get_xdata(), line.get_ydata(), to_hex(line.get_color())) for line in axes.get_lines()]
    return [(np.asarray(x).tolist(), np.asarray(y).tolist(), colour) for x, y, colour in found if len(x) > 2]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_run_has_its_figures_and_reasons_for_the_rest(name: str) -> None:
    figures = all_figures(run_of(name))
    names = [figure.name for figure in figures]
    assert EXPECTED[name] <= set(names)
    assert len(set(names)) == len(names)
    reasons = why_not(run_of(name))
    assert not set(reasons) & set(names)
    assert all(line and "\n" not in line for line in reasons.values())
    result = run_of(name).result
    assert result is not None
    images = sum(info.images for info in result.sets)
    for figure in figures:
        assert f"{images:,} images" in figure.caption
        assert "Threat model: oblivious" in figure.caption
        assert "Scoring: leakage-free" in figure.caption


def test_reasons_name_what_is_lacking_and_who_has_it() -> None:
    reasons = why_not(run_of("table1"))
    assert "lazy: false" in reasons["gate-scores"]
    assert re.search(r"\d+ % of the rows", reasons["gate-scores"])
    assert "recipes/anchor-scale.yaml" in reasons["anchor-scale"]
    assert "recipes/table1-extended.yaml" in reasons["beyond"]
    assert "attack_all" in reasons["leakage"]
    assert "react-clip calibrate" in reasons["calibration"]
    recipes = {name for line in reasons.values() for name in re.findall(r"recipes/[\w-]+\.yaml", line)}
    assert recipes
    assert all((RESULTS.parents[1] / name).exists() for name in recipes)


def test_accuracy_shows_the_results_numbers() -> None:
    result = run_of("table1").result
    assert result is not None
    axes = drawn("table1", "accuracy").axes[0]
    lines = lines_of(axes)
    for label in ("CLIP", "AOM", "Defend-CLIP", "ReACT (paper)", "ReACT (calibrated)"):
        rows = sorted(result.select(dataset=MEAN, defense=label), key=lambda row: row.eps)
        wanted = ([255 * row.eps for row in rows], [100 * row.accuracy for row in rows])
        assert any(np.allclose(line[:2], wanted) for line in lines), label
    bands = [collection.get_paths()[0].vertices for collection in axes.collections if collection.get_paths()]
    row = result.select(dataset=MEAN, defense="AOM", eps=16 / 255)[0]
    for bound in (row.low, row.high):
        assert any(np.isclose(band, [16.0, 100 * bound]).all(axis=1).any() for band in bands)
    clean = result.select(dataset=MEAN, defense="CLIP", attack="clean")[0].accuracy
    assert any(f"{100 * clean:.1f} %" in text.get_text() for text in axes.texts)


@pytest.mark.parametrize(
    ("run", "name", "field"),
    [
        ("anchor-scale", "anchor-scale", "sigma"),
        ("table3", "sweep-tau", "tau"),
        ("sweep-views", "sweep-views", "views"),
        ("sweep-alpha", "sweep-alpha", "alpha"),
    ],
)
def test_sweeps_show_the_results_numbers(run: str, name: str, field: str) -> None:
    result = run_of(run).result
    assert result is not None
    points = []
    for config in result.recipe["defenses"]:
        value = config["mapping"]["sigma"] if field == "sigma" else config[field]
        if config["instability"] or field == "sigma":
            points.append((value, result.select(dataset=MEAN, defense=config["label"], eps=4 / 255)[0].accuracy))
    wanted = np.transpose(sorted(points)) * [[1], [100]]
    lines = [line for line in lines_of(drawn(run, name).axes[0]) if line[2] == budget_colour(4 / 255).lower()]
    assert any(np.allclose(line[:2], wanted) for line in lines)
    if field == "sigma":
        stars = [line for line in drawn(run, name).axes[0].get_lines() if line.get_marker() == "*"]
        best = max(points, key=lambda point: point[1])
        assert any(np.allclose([star.get_xdata()[0], star.get_ydata()[0]], [best[0], 100 * best[1]]) for star in stars)


def test_drift_is_the_mean_over_images_that_clip_gets_right() -> None:
    images = run_of("table1").images
    assert images is not None
    (x, y, _), *_ = lines_of(drawn("table1", "drift").axes[0])
    rows = images.where(defense="ReACT (paper)", eps=8 / 255)
    keep = rows["attacked"] & (rows["clean_prediction"] == rows["label"])
    assert math.isclose(y[x.index(8.0)], float(rows["r"][keep].mean()), rel_tol=1e-6)
    assert "so r is drawn alone" in figure_of("table1", "drift").caption


def test_violins_mark_the_clean_percentile() -> None:
    images = run_of("table4").images
    assert images is not None
    figure = drawn("table4", "gate-scores")
    rows = images.where(defense="r + J, tau 0.7", attack="clean")
    right = rows["clean_prediction"] == rows["label"]
    for axes, name in zip(figure.axes, ("r", "J", "score"), strict=True):
        level = float(np.percentile(rows[name][right], 95))
        assert any(np.allclose(line.get_ydata(), level) and len(line.get_xdata()) == 2 for line in axes.get_lines())


def test_a_method_has_one_colour_everywhere() -> None:
    for run, name in (
        ("table1", "accuracy"),
        ("table1", "cost"),
        ("table1-extended", "beyond"),
        ("step-quarter", "accuracy"),
    ):
        colours = {to_hex(line.get_color()) for axes in drawn(run, name).axes for line in axes.get_lines()}
        for kind in ("undefended", "aom", "defend-clip", "react"):
            assert COLOURS[kind].lower() in colours, (run, name, kind)
        assert colours <= {COLOURS[kind].lower() for kind in ("undefended", "aom", "defend-clip", "react")} | {INK}


@pytest.mark.parametrize(("run", "name"), SINGLE)
def test_words_are_large_enough_inside_and_apart(run: str, name: str) -> None:
    figure = drawn(run, name)
    figure.draw_without_rendering()
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in words) >= SMALL
    assert {to_hex(text.get_color()) for text in words} == {INK}
    sheet = figure.bbox
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]
    for place, (one, box) in enumerate(boxes):
        assert box.x0 >= sheet.x0 - 1
        assert box.x1 <= sheet.x1 + 1, one
        assert sheet.y0 - 1 <= box.y0 <= box.y1 <= sheet.y1 + 1, one
        for other, second in boxes[place + 1 :]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            high = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert wide <= 1 or high <= 0.12 * min(box.height, second.height), (one, other)


def test_files_are_written_and_drawings_are_reproducible(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    run = run_of("anchor-scale")
    written = write_figures(run, tmp_path / "one")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    write_figures(run, tmp_path / "two")
    first, second = (tmp_path / folder / "anchor-scale.svg" for folder in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert "<dc:date>" not in first.read_text()
    assert dict(matplotlib.rcParams) == before


def test_neutral_parts_are_ink_and_paper_alone(tmp_path: Path) -> None:
    save_figure(figure_of("table1", "accuracy").make(), tmp_path / "accuracy")
    save_figure(figure_of("table4", "gate-scores").make(), tmp_path / "gate-scores")
    known = {colour.lower() for colour in COLOURS.values()} | {INK, PAPER}
    known |= {budget_colour(eps / 255).lower() for eps in (0, 1, 4, 8, 16)}
    for path in tmp_path.glob("*.svg"):
        text = path.read_text()
        assert set(re.findall(r"#[0-9a-f]{6}\b", text)) <= known
        assert INK in text
        # The sheet itself is left to the page.
        sheet = text.split('id="patch_1"')[1].split("</g>")[0]
        assert "fill: none" in sheet


def test_calibration_is_drawn_when_it_is_given(tmp_path: Path) -> None:
    calibration = Calibration.load(CALIBRATION)
    figures = {figure.name: figure for figure in all_figures(run_of("table1"), calibration=calibration)}
    assert figures["calibration"].paper == "Figure 5"
    assert {"scales-per-set-logistic", "scales-per-set-power-law"} <= set(figures)
    axes = calibration_figure(calibration).axes[0]
    stars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"]
    assert np.allclose(stars, [(point.mean_drift, point.best_sigma) for point in calibration.points])
    words = {text.get_text() for text in axes.texts}
    assert {"linear (used)", "logistic", "power law", "1/255", "16/255"} <= words
