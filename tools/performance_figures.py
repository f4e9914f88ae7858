"""Figures of the defence's cost from files of ``react-clip bench``: bars per contender, sweeps, a roofline."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from react_clip.bench import BARE, OURS, PLAIN, PUBLISHED
from react_clip.choices import SWEEPS
from react_clip.report.figures.plot import label_ends
from react_clip.report.style import (
    COLOURS,
    DASHED,
    DOTTED,
    INK,
    SMALL,
    label_of,
    legend,
    line_of,
    name_axes,
    new_figure,
    style_axes,
)

Report = dict[str, Any]
"""One JSON file of the benchmark, and what it is about: ``file``, ``machine``, ``tower`` and ``part``."""

LOOK = "second_look"
"""SecondLook's name in the result files."""
DEVICES = ("gpu", "cpu")
MODELS = {"vit-b-16": "ViT-B/16", "vit-b-32": "ViT-B/32"}
TABLES = {"table-clean": "clean photos", "table-attacked": "attacked photos"}
_ORDER = (BARE, OURS, PLAIN, PUBLISHED)
_BARS = {BARE: "undefended", OURS: "react", PLAIN: "aom", PUBLISHED: "defend-clip"}
_LINES = {"vit-b-16": line_of(COLOURS["react"], "o"), "vit-b-32": line_of(COLOURS["ttc"], "s", DASHED)}


def read_reports(folder: Path) -> list[Report]:
    """The benchmark's files ``MACHINE-TOWER-PART.json`` of a folder."""
    reports = []
    parts = (*TABLES, "table-clean-large", *(f"sweep-{axis}" for axis in SWEEPS))
    for machine, tower, part in product(DEVICES, MODELS, parts):
        path = folder / f"{machine}-{tower}-{part}.json"
        if path.is_file():
            about = {"file": path.name, "machine": machine, "tower": tower, "part": part}
            reports.append({**json.loads(path.read_text(encoding="utf-8")), **about})
    return reports


def select(reports: Sequence[Report], machine: str, *parts: str) -> list[Report]:
    """The reports of one machine about some parts."""
    return [report for report in reports if report["machine"] == machine and report["part"] in parts]


def performance_figures(reports: Sequence[Report]) -> dict[str, Callable[[], Figure]]:
    """Functions that draw the figures which these reports have data for, by name."""
    figures: dict[str, Callable[[], Figure]] = {}
    for machine in DEVICES:
        if tables := select(reports, machine, *TABLES):
            figures[f"cost-{machine}"] = partial(_cost, tables)
        if sweeps := select(reports, machine, *(f"sweep-{axis}" for axis in SWEEPS)):
            figures[f"sweeps-{machine}"] = partial(_sweeps, sweeps)
        if batches := select(reports, machine, "sweep-batch"):
            figures[f"roofline-{machine}"] = partial(_roofline, batches)
    return figures


def look_reports(folder: Path) -> list[Report]:
    """Measurements of SecondLook beside plain CLIP: one per device, precision, batch size, traffic and class list."""
    files = [
        json.loads(path.read_text(encoding="utf-8")) | {"file": path.name}
        for path in folder.glob("*-second-look-*.json")
    ]
    points = [
        report | {"batch": round(point["value"]), "contenders": point["contenders"]}
        for report in files
        for point in report["sweeps"].get("batch", [])
    ]
    # A table has more contenders than a point of a sweep, and takes its place.
    reports = {
        (report["device"] == "cpu", place_of(report), report["batch"], report["attacked"], -report["classes"]): report
        for report in [*points, *files]
        if report["contenders"]
    }
    return [reports[key] for key in sorted(reports)]


def ratio(report: Report, one: str, other: str) -> float:
    """Time of one contender over that of another: the median over rounds, in which they take turns."""
    times = [contender(report, label)["round_milliseconds"] for label in (one, other)]
    return statistics.median(a / b for a, b in zip(*times, strict=True))


def look_figure(reports: Sequence[Report]) -> Figure:
    """Time per photo of SecondLook and ReACT in times that of plain CLIP, one row per machine, precision and batch."""
    first: dict[tuple[str, int, float], Report] = {}
    for report in reports:  # those with most classes come first
        first.setdefault((place_of(report), report["batch"], report["attacked"]), report)
    rows = list(dict.fromkeys((place, batch) for place, batch, _ in first))
    figure = new_figure(height=0.9 + 0.26 * len(rows), width=6.8)
    axes = style_axes(figure.add_subplot())
    axes.invert_yaxis()
    axes.set_yticks(range(len(rows)), [f"{place}, batch {batch}" for place, batch in rows])
    axes.axvline(1.0, color=INK, linewidth=0.9)
    for label, kind, marker in ((LOOK, LOOK, "D"), (OURS, "react", "o")):
        for attacked in (False, True):
            found = [(row, first.get((*key, attacked))) for row, key in enumerate(rows)]
            points = [(ratio(report, label, BARE), row) for row, report in found if report is not None]
            words = f"{label_of(kind)}, {'attacked' if attacked else 'clean'} photos"
            line = line_of(COLOURS[kind], marker, filled=not attacked) | {"linestyle": "none", "zorder": 3 - attacked}
            axes.plot(*zip(*points, strict=True), label=words, **line)
    axes.set_xlim(left=0)
    legend(figure, *axes.get_legend_handles_labels(), columns=2)
    name_axes(axes, "time per photo, in times that of plain CLIP (line)")
    return figure


def contender(report: Report, label: str) -> dict[str, Any]:
    """One contender of a table."""
    return next(dict(item) for item in report["contenders"] if item["label"] == label)


def relative_time(report: Report, label: str) -> float:
    """Time per image in passes of the bare encoder: overhead times work."""
    item = contender(report, label)
    return float(item["overhead"] * (item["passes"] + 2 * item["backward_passes"]))


def series(report: Report, axis: str, label: str) -> list[tuple[float, dict[str, Any]]]:
    """One contender along a sweep."""
    return [(point["value"], contender(point, label)) for point in report["sweeps"][axis]]


def growth(report: Report, axis: str, label: str) -> list[tuple[float, float]]:
    """A contender's overhead at each value, relative to the first: the median over rounds, in which values take turns.

    The bare encoder is measured beside it on every batch, and the same batch of another point some time later.
    """
    overheads = [_round_overheads(point, label) for point in report["sweeps"][axis]]
    ratios = [[here / there for here, there in zip(mine, overheads[0], strict=True)] for mine in overheads]
    values = [point["value"] for point in report["sweeps"][axis]]
    return [(value, statistics.median(mine)) for value, mine in zip(values, ratios, strict=True)]


def _round_overheads(point: Report, label: str) -> list[float]:
    ours, bare = contender(point, label), contender(point, BARE)
    pairs = zip(ours["round_milliseconds"], bare["round_milliseconds"], strict=True)
    return [mine / (floor * ours["passes"]) for mine, floor in pairs]


# ---------------------------------------------------------------------- bars


def _cost(tables: Sequence[Report]) -> Figure:
    figure = new_figure(height=0.3 + 1.35 * len(tables), width=6.4)
    longest = max(relative_time(report, label) for report in tables for label in _ORDER)
    for number, report in enumerate(tables):
        axes = style_axes(figure.add_subplot(len(tables), 1, number + 1))
        _bars(axes, report)
        axes.set_xlim(0, 1.42 * longest)
        name_axes(axes, title=_title(report))
        if number + 1 == len(tables):
            name_axes(axes, "time per image, in passes of the bare encoder; filled: the passes themselves")
    return figure


def _bars(axes: Axes, report: Report) -> None:
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_yticks(range(len(_ORDER)), _ORDER)
    axes.tick_params(axis="y", length=0)
    for place, label in enumerate(_ORDER):
        item, whole, colour = contender(report, label), relative_time(report, label), COLOURS[_BARS[label]]
        axes.barh(place, item["passes"], color=colour, height=0.62)
        if whole > item["passes"]:
            beyond: dict[str, Any] = {"color": "none", "edgecolor": colour, "hatch": "//////", "linewidth": 0.8}
            axes.barh(place, whole - item["passes"], left=item["passes"], height=0.62, **beyond)
        words = (
            f" {whole:.1f}"
            if label == BARE
            else f" {whole:.1f}  ({item['passes']:.1f} passes × {item['overhead']:.2f})"
        )
        axes.text(max(whole, item["passes"]), place, words, va="center", fontsize=SMALL, color=INK)


def _title(report: Report) -> str:
    photos = f"{MODELS[report['tower']]}, {TABLES[report['part']]}"
    return f"{photos}, {report['dtype']}, batch {report['batch']}, {where(report)}"


def where(report: Report) -> str:
    """The machine in a few words; older reports, of x86_64, do not have the architecture."""
    if report["device"] != "cpu":
        return str(report["device"])
    return f"{report.get('architecture', 'x86_64')} CPU, {report['threads']} threads"


def place_of(report: Report) -> str:
    """The machine and the precision."""
    return f"{where(report)}, {report['dtype']}"


# ---------------------------------------------------------------------- sweeps


def _sweeps(reports: Sequence[Report]) -> Figure:
    axes_of = [axis for axis in SWEEPS if any(report["part"] == f"sweep-{axis}" for report in reports)]
    rows = (len(axes_of) + 1) // 2
    figure = new_figure(height=0.3 + 2.1 * rows, width=7.6)
    for number, axis in enumerate(axes_of):
        panel = style_axes(figure.add_subplot(rows, 2, number + 1))
        _DRAW[axis](panel, [report for report in reports if report["part"] == f"sweep-{axis}"])
    label_ends(figure)
    return figure


def _line(axes: Axes, report: Report, points: Sequence[tuple[float, float]], label: str = "") -> None:
    tower = report["tower"]
    axes.plot(*zip(*points, strict=True), label=f"{MODELS[tower]}{label}", **_LINES[tower])


def _batch(axes: Axes, lines: Sequence[Report]) -> None:
    for report in lines:
        points = series(report, "batch", OURS)
        for value, item in points:
            axes.vlines(
                value, *item["overhead_range"], color=_LINES[report["tower"]]["color"], linewidth=1.0, alpha=0.6
            )
        _line(axes, report, [(value, item["overhead"]) for value, item in points])
    _log_ticks(axes, lines, "batch")
    axes.set_ylim(bottom=min(0.9, axes.get_ylim()[0]))
    axes.axhline(1.0, color=INK, linewidth=0.7, alpha=0.6)
    name_axes(axes, "images in a batch", title="overhead: time / (passes × encoder time)")


def _against_first(axis: str, axes: Axes, lines: Sequence[Report]) -> None:
    for report in lines:
        _line(axes, report, growth(report, axis, OURS))
    _log_ticks(axes, lines, axis)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high, 1.2))
    axes.axhline(1.0, color=INK, linewidth=0.7, alpha=0.6)
    name_axes(axes, axis, title=f"overhead, relative to the fewest {axis}")


def _attacked(axes: Axes, lines: Sequence[Report]) -> None:
    for report in lines:
        points = series(report, "attacked", OURS)
        places = range(len(points))
        axes.set_xticks(places, [f"{100 * value:g} %" for value, _ in points])
        times = [item["overhead"] * item["passes"] for _, item in points]
        _line(axes, report, list(zip(places, times, strict=True)))
        floor = [item["passes"] for _, item in points]
        axes.plot(places, floor, color=_LINES[report["tower"]]["color"], linewidth=0.8, linestyle=DOTTED)
    axes.set_ylim(bottom=0)
    name_axes(axes, "attacked images", title="time in encoder passes; dotted: the passes")


def _log_ticks(axes: Axes, lines: Sequence[Report], axis: str) -> None:
    """A logarithmic axis whose ticks are the values that were measured."""
    values = sorted({value for report in lines for value, _ in series(report, axis, OURS)})
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,.0f}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


_DRAW: dict[str, Callable[[Axes, Sequence[Report]], None]] = {
    "batch": _batch,
    "images": partial(_against_first, "images"),
    "classes": partial(_against_first, "classes"),
    "attacked": _attacked,
}


# ---------------------------------------------------------------------- roofline


def attained(report: Report, item: Mapping[str, Any]) -> float:
    """Floating-point operations a second that a contender's passes amount to."""
    return float(report["roofline"]["pass_flops"] * item["passes"] * item["images_per_second"])


def _roofline(batches: Sequence[Report]) -> Figure:
    figure = new_figure(height=3.2, width=6.4)
    axes = style_axes(figure.add_subplot())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _log_ticks(axes, batches, "batch")
    for report in batches:
        for label in (BARE, OURS):
            points = [(value, attained(report, item) / 1e12) for value, item in series(report, "batch", label)]
            _line(axes, report, points, f", {label}")
            if label == BARE:
                axes.lines[-1].set_markerfacecolor("none")
        roof = _roof(report, points[0][0], points[-1][0])
        axes.plot(*zip(*roof, strict=True), color=_LINES[report["tower"]]["color"], linewidth=0.9, linestyle=DOTTED)
    first = batches[0]
    axes.plot(*roof[-1], color=INK, linestyle=DOTTED, label=f"roof: {roof[-1][1]:.3g}")
    name_axes(
        axes, "images in a batch", "TFLOP/s of encoder passes", f"{where(first)}, {first['dtype']}; dotted: the roof"
    )
    label_ends(figure)
    return figure


def _roof(report: Report, low: float, high: float) -> list[tuple[float, float]]:
    """The most TFLOP/s at batches from low to high: each call reads the weights once, then products are the limit."""
    limits = report["roofline"]
    per_image = limits["memory_bytes"] * limits["pass_flops"] / limits["weight_bytes"]
    ridge = limits["matmul_flops"] / per_image
    corners = [low, *([ridge] if low < ridge < high else []), high]
    return [(value, min(limits["matmul_flops"], per_image * value) / 1e12) for value in corners]
