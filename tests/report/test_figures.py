"""Figures of the repository's runs and of made-up ones: they show the numbers of the result and can be read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import MEAN
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report import style
from react_clip.report.figures import FigureOf, calibration_figure, figures_of
from react_clip.report.figures.base import View
from react_clip.report.figures.leakage import best_scale, corrected, leakage_grids
from react_clip.report.figures.sweeps import Sweep, default_of, sweeps_of
from react_clip.report.run import Run, read_run
from react_clip.report.style import COLOURS, INK, MAPPINGS, PAPER, SMALL, budget_colour, save_figure
from synthetic_runs import METHODS, leakage_grid, many_methods, mapping_run

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MADE_UP = {"many": many_methods, "leaky": lambda: leakage_grid(draws=2), "mapped": mapping_run}
EXPECTED = {
    "table1": {"accuracy", "drift", "scales", "cost", "accuracy-per-set", "drift-per-set"},
    "table1-extended": {"beyond", "cost"},
    "table3": {"sweep-tau", "drift"},
    "table4": {"gate-scores", "gate-scores-per-set", "accuracy"},
    "anchor-scale": {"anchor-scale"},
    "sweep-views": {"sweep-views"},
    "sweep-alpha": {"sweep-alpha"},
    "mapped": {"mappings", "scales", "drift", "gate-scores", "scales-per-set-power-law"},
    "leaky": {"leakage-counts-alpha", "leakage-published", "leakage-control"},
}
READABLE = [
    *(("table1", name) for name in ("accuracy", "cost", "drift", "scales")),
    *(("table1-extended", "beyond"), ("anchor-scale", "anchor-scale"), ("table3", "sweep-tau")),
    *(("sweep-views", "sweep-views"), ("table4", "gate-scores"), ("many", "accuracy")),
    *(("leaky", name) for name in ("leakage-counts-alpha", "leakage-reported-sigma", "leakage-control")),
]


@cache
def run_of(name: str) -> Run:
    return MADE_UP[name]() if name in MADE_UP else read_run(RESULTS / name)


def result_of(name: str) -> EvaluationResult:
    result = run_of(name).result
    assert result is not None
    return result


@cache
def figures_and_reasons(run: str) -> tuple[dict[str, FigureOf], dict[str, str]]:
    found, reasons = figures_of(run_of(run))
    assert len({figure.name for figure in found}) == len(found)
    return {figure.name: figure for figure in found}, reasons


def figures(run: str) -> dict[str, FigureOf]:
    return figures_and_reasons(run)[0]


@cache
def drawn(run: str, name: str) -> Figure:
    return figures(run)[name].make()


def lines_of(axes: Axes) -> list[tuple[list[float], list[float], str]]:
    """Lines with more than two points: x, y and colour."""
    found = [(line.get_xdata(), line.get_ydata(), to_hex(line.get_color())) for line in axes.get_lines()]
    return [(np.asarray(x).tolist(), np.asarray(y).tolist(), colour) for x, y, colour in found if len(x) > 2]


def has_line(axes: Axes, x: list[float], y: list[float], colour: str | None = None) -> bool:
    lines = [line[:2] for line in lines_of(axes) if colour is None or line[2] == colour.lower()]
    return any(np.shape(line) == np.shape((x, y)) and np.allclose(line, (x, y)) for line in lines)


# ---------------------------------------------------------------------- which figures a run has


@pytest.mark.parametrize("name", EXPECTED)
def test_each_run_has_its_figures_and_reasons_for_the_rest(name: str) -> None:
    assert EXPECTED[name] <= set(figures(name))
    reasons = figures_and_reasons(name)[1]
    assert not set(reasons) & set(figures(name))
    assert all(line and "\n" not in line for line in reasons.values())
    images = sum(info.images for info in result_of(name).sets)
    for figure in figures(name).values():
        assert f"{images:,} images" in figure.caption
        assert "Threat model: oblivious" in figure.caption
        assert f"Scoring: {result_of(name).scoring} (" in figure.caption


def test_reasons_name_what_is_missing_and_the_recipe_that_has_it() -> None:
    reasons = figures_and_reasons("table1")[1]
    assert re.search(r"\d+ % of the rows .*lazy: false", reasons["gate-scores"])
    assert "attack_all" in reasons["leakage-counts"]
    assert "react-clip calibrate" in reasons["calibration"]
    recipes = {name for line in reasons.values() for name in re.findall(r"recipes/[\w-]+\.yaml", line)}
    assert recipes >= {"recipes/anchor-scale.yaml", "recipes/table1-extended.yaml"}
    assert all((RESULTS.parents[1] / name).exists() for name in recipes)


def many_with(rows: Iterable[Row] | None = None, **changes: Any) -> tuple[dict[str, FigureOf], dict[str, str]]:
    """Figures and reasons of the run with many methods, parts of it replaced."""
    run = dataclasses.replace(run_of("many"), **changes)
    if rows is not None:
        run = dataclasses.replace(run, result=dataclasses.replace(result_of("many"), rows=tuple(rows)))
    found, reasons = figures_of(run)
    return {figure.name: figure for figure in found}, reasons


def test_runs_with_parts_missing_give_reasons() -> None:
    rows, images = result_of("many").rows, run_of("many").images
    assert images is not None
    found, reasons = many_with(result=None, missing=("result.json does not exist",))
    assert (found, len(reasons)) == ({}, 22)
    assert "result.json does not exist" in reasons["accuracy"]
    found, reasons = many_with(images=None)
    assert set(found) == {"accuracy", "cost", "accuracy-per-set"}
    assert "per_image.parquet" in reasons["drift"]
    found, reasons = many_with(row for row in rows if not row.eps)
    assert not found
    assert "attacked no image" in reasons["accuracy"]
    assert many_with(rows=()) == ({}, reasons)
    many_with(recipe={})[0]["accuracy"].make()
    assert "drift" in many_with(images=images.iloc[:0])[1]
    unknown = dict.fromkeys(("accuracy", "low", "high", "passes"), math.nan)
    found, reasons = many_with((dataclasses.replace(row, **unknown) for row in rows), images=None)
    assert "encoder passes" in reasons["cost"]
    for figure in found.values():
        figure.make()


def test_several_attacks_have_figures_of_their_own() -> None:
    rows = result_of("many").rows
    found, _ = many_with((*rows, *(dataclasses.replace(row, attack="cw-10") for row in rows if row.eps)))
    assert {"accuracy-pgd-10", "accuracy-cw-10"} <= set(found)
    assert "accuracy" not in found


# ---------------------------------------------------------------------- the numbers of the result


@pytest.mark.parametrize("run", ["table1", "many"])
def test_accuracy_shows_the_results_numbers(run: str) -> None:
    result, axes = result_of(run), drawn(run, "accuracy").axes[0]
    labels = {row.defense for row in result.rows}
    assert labels <= {text.get_text() for text in axes.texts}
    for label in labels:
        rows = sorted(result.select(dataset=MEAN, defense=label), key=lambda row: row.eps)
        assert has_line(axes, [255 * row.eps for row in rows], [100 * row.accuracy for row in rows]), label
    clean = result.select(dataset=MEAN, defense="CLIP", attack="clean")[0].accuracy
    assert any(f"{100 * clean:.1f} %" in text.get_text() for text in axes.texts)
    # Bands, or bars where there are many methods, are the intervals.
    paths = [path.vertices for collection in axes.collections for path in collection.get_paths()]
    row = result.select(dataset=MEAN, defense="AOM", eps=16 / 255)[0]
    for bound in (row.low, row.high):
        assert any(np.isclose(points, [16.0, 100 * bound]).all(axis=1).any() for points in paths)


def test_cost_counts_a_backward_pass_twice() -> None:
    row = result_of("many").select(dataset=MEAN, defense="TTC", eps=0.0)[0]
    upper = drawn("many", "cost").axes[0]
    marks = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in upper.get_lines()}
    wanted = (row.passes + 2 * row.backward_passes, 100 * row.accuracy)
    assert any(np.allclose(mark, wanted) for mark in marks)


@pytest.mark.parametrize("run", ["anchor-scale", "sweep-views"])
def test_sweeps_show_the_results_numbers(run: str) -> None:
    result, axes = result_of(run), drawn(run, run).axes[0]
    entries = [entry for entry in result.recipe["defenses"] if entry["params"]]
    points = sorted(
        (*entry["params"].values(), 100 * result.select(dataset=MEAN, defense=entry["label"], eps=4 / 255)[0].accuracy)
        for entry in entries
    )
    assert has_line(axes, *map(list, zip(*points, strict=True)), budget_colour(4))
    stars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"]
    best = max(points, key=lambda point: point[1])
    assert any(np.allclose(star, best) for star in stars) == (run == "anchor-scale")


def test_mappings_show_the_results_numbers() -> None:
    (sweep,) = sweeps_of(View(run_of("mapped"), "pgd-10").settings)
    assert set(sweep.cells) == {("linear",), ("logistic",), ("power_law",)}
    for (kind,), label in sweep.cells.items():
        rows = sorted(result_of("mapped").select(dataset=MEAN, defense=label), key=lambda row: row.eps)
        x, y = [255 * row.eps for row in rows], [100 * row.accuracy for row in rows]
        assert has_line(drawn("mapped", "mappings").axes[0], x, y, MAPPINGS[kind])


def test_drift_is_the_mean_over_images_that_clip_gets_right() -> None:
    images = run_of("table1").images
    assert images is not None
    rows = images[(images["defense"] == "ReACT (paper)") & np.isclose(images["eps"], 8 / 255)]
    rows = rows[rows["attacked"] & (rows["clean_prediction"] == rows["label"])]
    for axes, name in zip(drawn("table1", "drift").axes, ("d_low", "d_high", "r"), strict=True):
        (x, y, _), *_ = lines_of(axes)
        assert math.isclose(y[x.index(8.0)], rows[name].mean(), rel_tol=1e-6)


def test_drift_is_drawn_alone_where_a_run_has_no_distances() -> None:
    assert len(drawn("step-quarter", "drift").axes) == 1
    assert "so r is drawn alone" in figures("step-quarter")["drift"].caption


def test_violins_mark_the_clean_percentile() -> None:
    images = run_of("table4").images
    assert images is not None
    rows = images[(images["defense"] == "r + J, tau 0.7") & (images["attack"] == "clean")]
    rows = rows[rows["clean_prediction"] == rows["label"]]
    for axes, name in zip(drawn("table4", "gate-scores").axes, ("r", "J", "score"), strict=True):
        level = float(np.percentile(rows[name], 95))
        assert any(np.allclose(line.get_ydata(), level) and len(line.get_xdata()) == 2 for line in axes.get_lines())


def test_calibration_is_drawn_when_it_is_given() -> None:
    calibration = Calibration.load(RESULTS / "calibration" / "clip-vit-b-16.json")
    found = {figure.name: figure for figure in figures_of(run_of("table1"), calibration=calibration)[0]}
    assert found["calibration"].paper == "Figure 5"
    assert {"scales-per-set-logistic", "scales-per-set-power-law"} <= set(found)
    axes = calibration_figure(calibration).axes[0]
    stars = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines() if line.get_marker() == "*"]
    assert np.allclose(stars, [(point.mean_drift, point.best_sigma) for point in calibration.points])
    words = {text.get_text() for text in axes.texts}
    assert {"linear (used)", "logistic", "power law", "1/255", "16/255"} <= words


# ---------------------------------------------------------------------- leakage


def literal_count(run: Run, label: str, eps: float) -> tuple[float, float]:
    """Leaked images per draw, and accuracy without them as the mean over sets, counted image by image."""
    assert run.images is not None
    assert run.result is not None
    leaked, kept, sizes = 0, dict.fromkeys(("a", "b"), 0), dict.fromkeys(("a", "b"), 0)
    rows = run.images[(run.images["defense"] == label) & np.isclose(run.images["eps"], eps, atol=1e-9)]
    for row in rows.itertuples():
        sizes[row.dataset] += 1
        if row.prediction == row.label and row.clean_prediction != row.label:
            leaked += 1
        elif row.prediction == row.label:
            kept[row.dataset] += 1
    return leaked / run.result.draws, sum(kept[name] / sizes[name] for name in kept) / 2


def test_leakage_numbers_equal_a_literal_count() -> None:
    view = View(run_of("leaky"), "pgd-10")
    points = leakage_grids(view)[1].along("mapping.sigma", 2.4)
    scales = [sigma for sigma, _ in points]
    counted = [literal_count(run_of("leaky"), label, 8 / 255) for _, label in points]
    for name, values in (
        ("leakage-counts-sigma", [count for count, _ in counted]),
        ("leakage-corrected-sigma", [100 * share for _, share in counted]),
    ):
        assert has_line(drawn("leaky", name).axes[1], scales, values)
    clean = [literal_count(run_of("leaky"), label, 0.0)[0] for _, label in points]
    assert has_line(drawn("leaky", "leakage-control").axes[1], scales, clean)


def test_curves_over_alpha_begin_with_undefended_clip() -> None:
    view = View(run_of("leaky"), "pgd-10")
    scale = best_scale(corrected(view), leakage_grids(view)[1], 8)
    alphas, labels = zip(*leakage_grids(view)[1].along("alpha", scale), strict=True)
    assert (alphas[0], labels[0]) == (0.0, "CLIP")
    counted = [100 * literal_count(run_of("leaky"), label, 8 / 255)[1] for label in labels]
    assert has_line(drawn("leaky", "leakage-corrected-alpha").axes[1], list(alphas), counted)


def test_each_budget_is_swept_at_its_own_best_scale() -> None:
    view = View(run_of("leaky"), "pgd-10")
    grid = leakage_grids(view)[0]
    for eps in view.budgets:
        counted = {cell: literal_count(view.run, label, eps / 255)[1] for cell, label in grid.cells.items()}
        scale = best_scale(corrected(view), grid, eps)
        best = max(value for cell, value in counted.items() if cell[0] == scale)
        assert math.isclose(best, max(counted.values()))


def test_the_published_configuration_is_found_by_its_numbers() -> None:
    figure = drawn("leaky", "leakage-published")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["AOM", "Defend-CLIP"]
    view = View(run_of("leaky"), "pgd-10")
    label = leakage_grids(view)[0].cells[0.1, 1.2]
    wanted = []
    for eps in view.budgets:
        wanted += [100 * result_of("leaky").select(dataset=MEAN, defense=label, eps=eps / 255)[0].accuracy]
        wanted += [100 * literal_count(run_of("leaky"), label, eps / 255)[1]]
    assert np.allclose([bar.get_height() for bar in figure.axes[0].patches], wanted)


# ---------------------------------------------------------------------- sweeps


def test_sweeps_are_read_from_their_coordinates() -> None:
    def swept(*values: object) -> list[Sweep]:
        entries = {
            f"no. {number}": {"kind": "react", "family": "a", "params": {"tau": v}} for number, v in enumerate(values)
        }
        return sweeps_of({**entries, "other": {"kind": "react", "alpha": 1.2}})

    (sweep,) = swept(0.9, 0.5, 0.7)
    assert sweep.along("tau") == [(0.5, "no. 1"), (0.7, "no. 2"), (0.9, "no. 0")]
    assert not swept(0.5, 0.7), "two values are no sweep"
    assert not swept(True, False, "text", 3), "flags and words are no numbers"
    settings = View(run_of("leaky"), "pgd-10").settings
    first, second = sweeps_of(settings)
    assert (first.kind, second.kind) == ("aom", "defend-clip")
    entry = settings[dict(first.along("mapping.sigma", 1.2))[0.1]]
    assert (entry["mapping"]["sigma"], entry["alpha"]) == (0.1, 1.2)


# ---------------------------------------------------------------------- how they look


def test_every_method_has_a_look_of_its_own() -> None:
    view = View(run_of("many"), "pgd-10")
    assert [view.kinds[label] for label in ("TeCoA", "PMG-AFT", "CLIP")] == ["tecoa", "pmg-aft", "undefended"]
    assert len(set(COLOURS.values())) == len(COLOURS)
    looks = {tuple(line[part] for part in ("color", "marker", "linestyle")) for line in view.lines.values()}
    assert len(looks) == len(METHODS)
    assert view.lines["ReACT"]["color"] == view.lines["ReACT (calibrated)"]["color"] == COLOURS["react"]
    assert style.lines_of({"mine": "something new"})["mine"]["color"] not in COLOURS.values()


def test_a_result_file_does_not_decide_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_by_a_file.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    kind = "named_by_a_file:Guard"
    assert (style.label_of(kind), style.colour_of(kind), default_of(kind, "alpha")) == (kind, None, None)


@pytest.mark.parametrize(("run", "name"), READABLE)
def test_words_are_large_enough_inside_and_apart(run: str, name: str) -> None:
    figure = drawn(run, name)
    figure.draw_without_rendering()
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in words) >= SMALL
    assert {to_hex(text.get_color()) for text in words} == {INK}
    sheet = figure.bbox.padded(1)
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]
    for number, (one, box) in enumerate(boxes):
        assert sheet.count_contains(box.corners()) == 4, one
        for other, second in boxes[number + 1 :]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            high = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert wide <= 1 or high <= 0.12 * min(box.height, second.height), (one, other)


def test_files_are_reproducible_and_neutral_parts_are_ink_and_paper(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    known = {colour.lower() for colour in COLOURS.values()} | {INK, PAPER}
    known |= {budget_colour(eps).lower() for eps in (0, 1, 4, 8, 16)}
    for run, name in (("anchor-scale", "anchor-scale"), ("table4", "gate-scores")):
        for copy in ("one", "two"):
            save_figure(figures(run)[name].make(), tmp_path / copy)
        text = (tmp_path / "one.svg").read_text()
        assert text == (tmp_path / "two.svg").read_text()
        assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
        assert "<dc:date>" not in text
        assert set(re.findall(r"#[0-9a-f]{6}\b", text)) <= known
        assert INK in text
        assert "fill: none" in text.split('id="patch_1"')[1].split("</g>")[0], "the page's background shows through"
    assert dict(matplotlib.rcParams) == before
