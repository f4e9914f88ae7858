"""Figures show the numbers of the run, and for kinds without data one line says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from react_clip.defenses import Defense, ReACT
from react_clip.evaluation.results import EvaluationResult
from react_clip.report.figures import (
    KINDS,
    MissingDataError,
    accuracy_over_budget,
    accuracy_over_passes,
    diagnostics_of,
    draw_all,
    gate_over_budget,
    leakage,
    scores_clean_and_attacked,
    sets_as_heat_map,
    sigma_over_drift,
)
from react_clip.report.style import lines_of, new_figure, save_figure
from synthetic_runs import CLIP, DEFENSES, REACT, SECOND, SETS, synthetic_run


@pytest.fixture(scope="module")
def run() -> EvaluationResult:
    return synthetic_run(attacks={"pgd-10": (1 / 255, 4 / 255), "fab": (4 / 255,)})


def points(axes: Axes) -> dict[str, Any]:
    """The points ``[N, 2]`` of every labelled line."""
    lines = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.get_lines()}
    return {label: xy for label, xy in lines.items() if not label.startswith("_")}


def near(*rows: tuple[float, float]) -> Any:
    return pytest.approx(np.array(rows))


def mean(run: EvaluationResult, defense: str, attack: str = "clean", eps: float = 0.0) -> Any:
    [row] = run.select(dataset="mean", defense=defense, attack=attack, eps=eps)
    return row


def test_there_are_seven_kinds_and_each_is_drawn_or_says_why_not(run: EvaluationResult, tmp_path: Path) -> None:
    assert len(KINDS) == 7
    drawn, missing = draw_all(run, tmp_path, False)
    assert [item.name for item in drawn] == [name for name in KINDS if name != "leakage"]
    assert {path.name for path in tmp_path.iterdir()} == {f"{d.name}.{kind}" for d in drawn for kind in ("svg", "png")}
    assert missing == [
        "Label leakage: only images that undefended CLIP gets right were attacked; use `scoring: attack_all`"
    ]
    assert all("100 images; toy; threat model oblivious, scoring leakage_free." in item.caption for item in drawn)


def test_a_run_without_attacks_or_defences_has_reasons(tmp_path: Path) -> None:
    drawn, missing = draw_all(synthetic_run([CLIP], sets={"pets": 9}, attacks={}), tmp_path, False)
    assert drawn == []
    text = "\n".join(missing)
    for words in ("attacked no image", "one data set", "no defence of it measured", "has a gate that opened"):
        assert words in text


def test_accuracy_is_strict_and_has_the_budgets_of_its_attack(run: EvaluationResult) -> None:
    [axes] = accuracy_over_budget(run).axes
    assert axes.get_title(loc="left") == "pgd-10", "an attack with one budget draws no line"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["clean", "1", "4"]
    gates = points(gate_over_budget(run).axes[0])
    for label, line in points(axes).items():
        rows = [mean(run, label), *(mean(run, label, "pgd-10", eps) for eps in (1 / 255, 4 / 255))]
        assert line == near(*((place, 100 * row.accuracy) for place, row in enumerate(rows)))
        assert gates[label] == near(*((place, 100 * row.gate_rate) for place, row in enumerate(rows)))
    assert mean(run, "ReACT", "pgd-10", 4 / 255).accuracy < mean(run, "ReACT", "pgd-10", 4 / 255).paper_accuracy


def test_accuracy_over_passes_takes_the_worst_attack_and_a_backward_pass_counts_as_two() -> None:
    run = synthetic_run([CLIP, {"kind": "ttc", "label": "TTC"}])
    axes, bar = accuracy_over_passes(run).axes
    worst = min(mean(run, "TTC", "pgd-10", eps).accuracy for eps in (1 / 255, 4 / 255))
    assert points(axes)["TTC"] == near((2 + 2 * 2, 100 * worst))
    clean = run.images[run.images["attack"] == "clean"]
    plain = (clean["clean_prediction"] == clean["label"]).groupby(clean["dataset"]).mean().mean()
    colours = {line.get_label(): line.get_markerfacecolor() for line in axes.get_lines()}
    scale = ScalarMappable(Normalize(*bar.get_ylim()), "Reds")
    assert colours["TTC"] == pytest.approx(scale.to_rgba(100 * (plain - mean(run, "TTC").accuracy)), abs=0.01)


def test_the_heat_map_holds_every_set_and_defence(run: EvaluationResult) -> None:
    [axes] = sets_as_heat_map(run).axes
    cells = np.asarray(axes.images[0].get_array())
    assert cells.shape == (len(SETS), len(DEFENSES))
    attack, _, budget = axes.get_title(loc="left").removeprefix("accuracy in %, ").rpartition(" ")
    eps = float(budget.removesuffix("/255")) / 255
    for row, dataset in enumerate(SETS):
        for column, entry in enumerate(DEFENSES):
            [found] = run.select(dataset=dataset, defense=entry["label"], attack=attack, eps=eps)
            assert cells[row, column] == pytest.approx(100 * found.accuracy)


# ---------------------------------------------------------------------- diagnostics under their own names


def test_a_defence_shows_its_own_diagnostics_under_its_own_names(run: EvaluationResult) -> None:
    titles = [axes.get_title(loc="left") for axes in scores_clean_and_attacked(run).axes]
    react = [f"ReACT: {name}" for name in ("drift", "instability", "score")]
    assert titles == [*react, "SecondLook: distance", "SecondLook: score"], "no drift is drawn for it"


def test_what_the_gate_skipped_is_not_drawn_and_kinds_appear_once() -> None:
    run = synthetic_run([REACT, {**REACT, "label": "again"}])
    images = run.images
    images.loc[images.sample(frac=0.3, random_state=0).index, "instability"] = np.nan
    assert diagnostics_of(run) == [("ReACT", "drift"), ("ReACT", "score")]


def test_boxes_have_the_median_and_the_threshold_of_the_score() -> None:
    run = synthetic_run([SECOND])
    clean = run.images[(run.images["attack"] == "clean") & (run.images["clean_prediction"] == run.images["label"])]
    for axes, threshold in zip(scores_clean_and_attacked(run).axes, (False, True), strict=True):
        heights = {float(line.get_ydata()[0]) for line in axes.get_lines() if len(line.get_xdata()) == 2}
        assert (0.4 in heights) == threshold
        assert clean["score"].median() in heights


def test_sigma_is_drawn_over_drift(run: EvaluationResult) -> None:
    [axes] = sigma_over_drift(run).axes
    assert list(points(axes)) == ["ReACT"]
    assert all(y == pytest.approx(0.03 + 0.04 * x) for x, y in points(axes)["ReACT"])
    with pytest.raises(MissingDataError, match="maps a drift to an anchor scale"):
        sigma_over_drift(synthetic_run([SECOND]))


def test_leakage_shows_the_best_reported_configuration_of_each_method() -> None:
    grid = [
        {"kind": "aom", "label": f"AOM alpha={alpha}", "family": "AOM", "params": {"alpha": alpha}, "alpha": alpha}
        for alpha in (0.6, 1.2, 2.4)
    ]

    def leaky(stream: Any, entry: Any, eps: float, right: Any) -> Any:
        return stream.random(len(right)) < np.where(right, 0.9, 0.3 * entry.get("alpha", 0) if eps else 0.0)

    run = synthetic_run([CLIP, *grid], outcome=leaky, scoring="attack_all")
    panels = {axes.get_title(loc="left"): axes for axes in leakage(run).axes}
    assert list(panels) == ["CLIP", "AOM"]
    heights = [bar.get_height() for bar in panels["AOM"].patches]
    for place, eps in enumerate((1 / 255, 4 / 255)):
        rows = [row for row in run.means if row.eps == eps and row.defense != "CLIP"]
        best = max(rows, key=lambda row: row.paper_accuracy)
        assert heights[place] == pytest.approx(100 * best.paper_accuracy)
        assert heights[2 + place] == pytest.approx(100 * (best.paper_accuracy - best.leakage_fraction))
        assert best.leakage > 0


# ---------------------------------------------------------------------- style


def test_every_defence_has_a_line_of_its_own() -> None:
    kinds = [*Defense.registry.names(), "undefended", "a:B", "react", "react", "react", "react"]
    entries = {str(place): {"kind": kind} for place, kind in enumerate(kinds)}
    lines = lines_of(entries)
    looks = [(line["color"], line["marker"], line["linestyle"]) for line in lines.values()]
    assert len(set(looks)) == len(looks)
    assert lines[str(kinds.index("react"))]["color"] == ReACT.colour


def test_the_same_figure_is_the_same_file_and_an_old_one_stays_until_it_is_complete(tmp_path: Path) -> None:
    for name in ("one", "two"):
        figure = new_figure()
        figure.add_subplot().plot([0, 1], label="µ")
        save_figure(figure, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 4
