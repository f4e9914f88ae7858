"""Figures of made-up runs: fifteen methods, a leakage grid, mappings, and runs with parts missing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from react_clip.evaluation.recipe import MEAN
from react_clip.report.figures import FigureOf, all_figures, sweeps, why_not, write_figures
from react_clip.report.figures.base import View
from react_clip.report.figures.labels import spread
from react_clip.report.figures.leakage import best_scale, genuine, grids_of
from react_clip.report.figures.leakage_checks import flipped
from react_clip.report.run import Run
from react_clip.report.style import COLOURS, INK, LOOKS, PAPER, budget_colour, kind_of, looks_of
from synthetic_runs import METHODS, leakage_grid, many_methods, mapping_run


@pytest.fixture(scope="module")
def many() -> Run:
    return many_methods()


@pytest.fixture(scope="module")
def leaky() -> Run:
    return leakage_grid(draws=2)


def named(run: Run, name: str, **options: Any) -> FigureOf:
    return next(figure for figure in all_figures(run, **options) if figure.name == name)


def drawn_lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Lines with more than one point, as numbers."""
    found = [(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)) for line in axes.get_lines()]
    return [(x.tolist(), y.tolist()) for x, y in found if len(x) > 2]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of words that share more than a sliver of the picture."""
    figure.draw_without_rendering()
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]
    found = []
    for place, (one, box) in enumerate(boxes):
        for other, second in boxes[place + 1 :]:
            wide = min(box.x1, second.x1) - max(box.x0, second.x0)
            high = min(box.y1, second.y1) - max(box.y0, second.y0)
            if wide > 1 and high > 0.12 * min(box.height, second.height):
                found.append((one, other))
    return found


# ---------------------------------------------------------------------- methods


def test_every_method_has_a_look_of_its_own(many: Run) -> None:
    view = View(many, "pgd-10")
    assert view.kinds["TeCoA"] == "tecoa"
    assert view.kinds["PMG-AFT"] == "pmg-aft"
    assert view.kinds["CLIP"] == "undefended"
    colours = [look.colour for look in LOOKS.values()]
    markers = [(look.colour, look.marker) for look in LOOKS.values()]
    assert len(set(colours)) == len(colours) == 16
    assert len(set(markers)) == len(markers)
    assert len({(look.colour, look.marker, look.dashes) for look in view.looks.values()}) == len(METHODS)


def test_variants_share_the_colour_and_differ_in_dashes() -> None:
    looks = looks_of({"paper": "react", "calibrated": "react", "mine": "something new"})
    assert looks["paper"].colour == looks["calibrated"].colour == COLOURS["react"]
    assert looks["paper"].dashes != looks["calibrated"].dashes
    assert looks["mine"].colour not in COLOURS.values()
    assert kind_of("CLIP", {"kind": "undefended"}) == "undefended"
    assert kind_of("software", {"kind": "undefended"}) == "undefended"


def test_fifteen_methods_are_labelled_without_overlap(many: Run) -> None:
    figure = named(many, "accuracy").make()
    assert not overlaps(figure)
    words = {text.get_text() for text in figure.axes[0].texts}
    assert set(METHODS) <= words


def test_lines_are_the_numbers_of_the_result(many: Run) -> None:
    axes = named(many, "accuracy").make().axes[0]
    assert many.result is not None
    lines = drawn_lines(axes)
    for label in METHODS:
        rows = sorted(many.result.select(dataset=MEAN, defense=label), key=lambda row: row.eps)
        wanted = ([255 * row.eps for row in rows], [100 * row.accuracy for row in rows])
        assert any(np.allclose(line, wanted) for line in lines), label


def test_cost_counts_a_backward_pass_twice_and_takes_times_instead(many: Run) -> None:
    assert many.result is not None
    row = many.result.select(dataset=MEAN, defense="TTC", eps=0.0)[0]
    upper = named(many, "cost").make().axes[0]
    marks = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in upper.get_lines()}
    wanted = (row.passes + 2 * row.backward_passes, 100 * row.accuracy)
    assert any(np.allclose(mark, wanted) for mark in marks)
    timed = named(many, "cost", timings={"CLIP": 1.5, "TTC": 40.0})
    assert "milliseconds" in timed.caption
    words = {text.get_text() for text in timed.make().axes[0].texts}
    assert words == {"CLIP", "TTC"}


# ---------------------------------------------------------------------- sweeps


def test_sweeps_are_found_in_configurations() -> None:
    settings: dict[str, dict[str, Any]] = {
        f"no. {place}": {"kind": "react", "alpha": 2.0, "family": "ReACT", "params": {"tau": tau}}
        for place, tau in enumerate((0.9, 0.5, 0.7))
    }
    settings["other"] = {"kind": "react", "alpha": 1.2}
    (sweep,) = sweeps.sweeps(settings)
    assert sweep.alpha == 2.0
    assert (sweep.kind, sweep.field) == ("react", "tau")
    assert sweep.points == ((0.5, "no. 1"), (0.7, "no. 2"), (0.9, "no. 0"))
    assert not sweeps.grids(settings)
    del settings["no. 0"]
    assert not sweeps.sweeps(settings), "two values are no sweep"
    assert not sweeps.sweeps({name: {"family": name, "params": {"tau": place}} for place, name in enumerate("abcd")})


def test_flags_and_words_are_no_numbers() -> None:
    settings = {str(value): {"family": "f", "params": {"field": value}} for value in (True, False, "text", 3)}
    assert not sweeps.sweeps(settings)
    assert not sweeps.grids(settings)


def test_a_grid_keeps_its_lines_to_itself(leaky: Run) -> None:
    view = View(leaky, "pgd-10")
    grids = grids_of(view)
    assert [grid.kind for grid in grids] == ["aom", "defend-clip"]
    assert not sweeps.sweeps(view.settings)
    assert grids[0].values("alpha") == [0.0, 0.6, 1.2, 1.8, 2.4]
    label = dict(grids[0].along("mapping.sigma", 1.2))[0.1]
    assert view.settings[label]["mapping"]["sigma"] == 0.1
    assert view.settings[label]["alpha"] == 1.2


def test_mappings_are_told_apart_by_kind() -> None:
    run = mapping_run()
    (group,) = sweeps.by_mapping(View(run, "pgd-10").settings)
    assert set(group) == {"linear", "logistic", "power_law"}
    names = {figure.name for figure in all_figures(run)}
    assert {"mappings", "scales", "drift", "gate-scores", "scales-per-set-power-law"} <= names
    assert run.result is not None
    axes = named(run, "mappings").make().axes[0]
    for kind, label in group.items():
        rows = sorted(run.result.select(dataset=MEAN, defense=label), key=lambda row: row.eps)
        line = next(
            item for item in axes.get_lines() if item.get_color() == COLOURS[kind] and len(item.get_xdata()) > 2
        )
        assert np.allclose(line.get_ydata(), [100 * row.accuracy for row in rows])
    assert "d_low, d_high, r" in named(run, "drift").caption
    assert len(named(run, "drift").make().axes) == 3


# ---------------------------------------------------------------------- leakage


def slow_counts(run: Run, label: str, eps: float) -> tuple[float, float]:
    """Leaked images per draw and accuracy without them, the mean over sets: image by image."""
    assert run.images is not None
    assert run.result is not None
    columns, draws = run.images.columns, run.result.draws
    leaked, kept, sizes = 0, dict.fromkeys(("a", "b"), 0), dict.fromkeys(("a", "b"), 0)
    for place in range(len(run.images)):
        if columns["defense"][place] != label or not math.isclose(columns["eps"][place], eps, abs_tol=1e-9):
            continue
        was_right = columns["clean_prediction"][place] == columns["label"][place]
        is_right = columns["prediction"][place] == columns["label"][place]
        sizes[columns["dataset"][place]] += 1
        if is_right and not was_right:
            leaked += 1
        elif is_right:
            kept[columns["dataset"][place]] += 1
    return leaked / draws, sum(kept[name] / sizes[name] for name in kept) / 2


def test_leakage_numbers_equal_a_literal_count(leaky: Run) -> None:
    view = View(leaky, "pgd-10")
    grid = grids_of(view)[1]
    points = grid.along("mapping.sigma", 2.4)
    counts = named(leaky, "leakage-counts-sigma").make().axes[1]
    corrected = named(leaky, "leakage-corrected-sigma").make().axes[1]
    eps = 8 / 255
    slow = [slow_counts(leaky, label, eps) for _, label in points]
    for axes, values in ((counts, [count for count, _ in slow]), (corrected, [100 * share for _, share in slow])):
        wanted = ([sigma for sigma, _ in points], values)
        assert any(np.allclose(line, wanted) for line in drawn_lines(axes))
    control = named(leaky, "leakage-control").make().axes[1]
    clean = [slow_counts(leaky, label, 0.0)[0] for _, label in points]
    assert clean == [flipped(view, label) for _, label in points]
    assert any(np.allclose(line[1], clean) for line in drawn_lines(control))


def test_each_budget_is_swept_at_its_own_best_scale(leaky: Run) -> None:
    view = View(leaky, "pgd-10")
    grid = grids_of(view)[0]
    for eps in view.budgets:
        found = {cell: genuine(view, label, eps) for cell, label in grid.cells.items()}
        best = max(item.value for item in found.values() if item is not None)
        scale = best_scale(view, grid, eps)
        place = grid.fields.index("mapping.sigma")
        at_scale = [item.value for cell, item in found.items() if item is not None and cell[place] == scale]
        assert max(at_scale) == best


def test_the_published_configuration_is_found_by_its_numbers(leaky: Run) -> None:
    figure = named(leaky, "leakage-published")
    drawn = figure.make()
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["AOM", "Defend-CLIP"]
    assert leaky.result is not None
    view = View(leaky, "pgd-10")
    label = grids_of(view)[0].cells[1.2, 0.1] if grids_of(view)[0].fields[0] == "alpha" else ""
    label = label or grids_of(view)[0].cells[0.1, 1.2]
    heights = [bar.get_height() for bar in drawn.axes[0].patches]
    wanted = []
    for eps in view.budgets:
        wanted += [100 * leaky.result.select(dataset=MEAN, defense=label, eps=eps)[0].accuracy]
        wanted += [100 * slow_counts(leaky, label, eps)[1]]
    assert np.allclose(heights, wanted)


def test_no_label_of_the_leakage_figures_overlaps(leaky: Run) -> None:
    for name in ("leakage-counts-alpha", "leakage-reported-sigma", "leakage-control"):
        assert not overlaps(named(leaky, name).make()), name


# ---------------------------------------------------------------------- what is not there


def test_a_run_without_anything_gives_reasons() -> None:
    nothing = Run((Path("x"),), None, None, None, ("result.json does not exist",))
    assert all_figures(nothing) == []
    reasons = why_not(nothing)
    assert len(reasons) > 15
    assert all("\n" not in line for line in reasons.values())
    assert "result.json does not exist" in reasons["accuracy"]


def test_without_rows_per_image_the_rest_is_drawn(many: Run) -> None:
    bare = dataclasses.replace(many, images=None)
    assert {figure.name for figure in all_figures(bare)} == {"accuracy", "cost", "accuracy-per-set"}
    assert "per_image.parquet" in why_not(bare)["drift"]


def test_without_configurations_nothing_breaks(many: Run, tmp_path: Path) -> None:
    assert many.result is not None
    lost = dataclasses.replace(many, result=dataclasses.replace(many.result, recipe={}), recipe=None)
    assert "accuracy" in {figure.name for figure in all_figures(lost)}
    named(lost, "accuracy").make()


def test_a_run_without_attacks_gives_reasons(many: Run) -> None:
    assert many.result is not None
    rows = tuple(row for row in many.result.rows if not row.eps)
    calm = dataclasses.replace(many, result=dataclasses.replace(many.result, rows=rows))
    assert all_figures(calm) == []
    assert "attacked no image" in why_not(calm)["accuracy"]


def test_empty_and_unmeasured_parts_never_raise(many: Run, tmp_path: Path) -> None:
    assert many.result is not None
    assert many.images is not None
    empty = dataclasses.replace(many, images=many.images.where(np.zeros(len(many.images), bool)))
    assert "drift" in why_not(empty)
    rows = tuple(
        dataclasses.replace(row, accuracy=math.nan, low=math.nan, high=math.nan, passes=math.nan)
        for row in many.result.rows
    )
    blank = dataclasses.replace(many, result=dataclasses.replace(many.result, rows=rows), images=None)
    assert "encoder passes" in why_not(blank)["cost"]
    for figure in all_figures(blank):
        figure.make()
    hollow = dataclasses.replace(many, result=dataclasses.replace(many.result, rows=()))
    assert all_figures(hollow) == []


def test_several_attacks_have_figures_of_their_own(many: Run) -> None:
    assert many.result is not None
    again = tuple(dataclasses.replace(row, attack="cw-10") for row in many.result.rows if row.eps)
    both = dataclasses.replace(many, result=dataclasses.replace(many.result, rows=(*many.result.rows, *again)))
    names = {figure.name for figure in all_figures(both)}
    assert {"accuracy-pgd-10", "accuracy-cw-10"} <= names
    assert "accuracy" not in names


# ---------------------------------------------------------------------- small parts


@pytest.mark.parametrize("seed", range(20))
def test_spread_keeps_order_gap_and_bounds(seed: int) -> None:
    heights = np.random.default_rng(seed).random(12).tolist()
    placed = spread(heights, 0.06, low=0.0, high=1.0)
    ordered = [placed[index] for index in np.argsort(heights)]
    assert min(np.diff(ordered)) >= 0.06 - 1e-5
    assert min(placed) >= -1e-9
    assert max(placed) <= 1 + 1e-5
    assert spread([0.1, 0.5, 0.9], 0.06) == [0.1, 0.5, 0.9]


def test_budgets_darken_as_they_grow() -> None:
    def light(colour: str) -> float:
        red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    ramp = [light(budget_colour(budget / 255)) for budget in (1, 4, 8, 16, 24, 32)]
    assert ramp == sorted(ramp, reverse=True)
    assert budget_colour(0.0) not in (INK, PAPER)


def test_progress_and_files(leaky: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from react_clip.report import figures

    monkeypatch.setattr(figures, "_FAMILIES", [family for family in figures._FAMILIES if "control" in family.name])
    seen: list[tuple[str, int, int]] = []
    written = write_figures(leaky, tmp_path, lambda name, done, total: seen.append((name, done, total)))
    assert seen == [("leakage-control", 1, 1)]
    assert [path.name for path in written] == ["leakage-control.png", "leakage-control.svg"]
    assert all(path.stat().st_size > 1000 for path in written)
