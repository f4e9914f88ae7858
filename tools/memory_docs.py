"""The tables and the figure of docs/serve.md about the service's memory, from results of benchmarks/serve_soak.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doc_tables import table
from matplotlib.figure import Figure

from react_clip.report.figures.plot import label_ends
from react_clip.report.style import COLOURS, INK, name_axes, new_figure, style_axes

SOAK, FOLDER = "serve-soak.json", "serve-memory"
ALLOCATORS = {
    "untrimmed": "glibc as it is",
    "shipped": "`malloc_trim` every 10 s (shipped)",
    "mapped": "`M_MMAP_THRESHOLD` 1 MiB",
    "two_arenas": "`M_ARENA_MAX` 2",
}
COLUMNS = {
    "resident": "resident",
    "files": "files",
    "heaps": "heaps of malloc",
    "other": "other",
    "malloc_used": "malloc: in use",
    "malloc_free": "malloc: free",
    "malloc_mapped": "malloc: mapped",
}


def memory(section: str, results: Path) -> str:
    """The section ``parts`` (memory after each stage) or ``allocators`` (ways to bound it, side by side)."""
    runs = {path.stem: json.loads(path.read_text()) for path in (results / FOLDER).glob("*.json")}
    return {"parts": _parts, "allocators": _allocators}[section](runs, json.loads((results / SOAK).read_text()))


def _parts(runs: dict[str, Any], soak: dict[str, Any]) -> str:
    load = runs["untrimmed"]
    stages = {line["stage"]: line for line in load["memory_of_stages"]}
    stages["one request"] = load["memory_after_one_request"]
    for name, run in (("glibc as it is", load), ("shipped", runs["shipped"])):
        stages[f"{run['minutes']:.0f} minutes of {run['callers']} callers, {name}"] = run["memory_of_load"]["last"]
        stages[f"half a minute later, {name}"] = run["memory_after_rest"]
    stages[f"{soak['minutes']:.0f} minutes of {soak['callers']} callers, shipped"] = soak["memory_of_load"]["last"]
    rows = [[name, *(_mib(line[column]) for column in COLUMNS), str(line["arenas"])] for name, line in stages.items()]
    lines = table(["after", *COLUMNS.values(), "arenas"], rows)
    return "\n".join([*lines, "", _source("In MiB", load, FOLDER), ""])


def _allocators(runs: dict[str, Any], _: dict[str, Any]) -> str:
    rows = [
        [
            words,
            _mib(run["memory_of_load"]["mean"]),
            _mib(run["memory_of_load"]["most"]["resident"]),
            _mib(run["memory_after_rest"]["resident"]),
            str(run["images"]),
            f"{run['cpu_seconds_per_image']:.2f}",
        ]
        for name, words in ALLOCATORS.items()
        if (run := runs.get(name))
    ]
    head = ["", "mean under load", "most", "half a minute later", "images", "CPU seconds an image"]
    return "\n".join([*table(head, rows), "", _source("Resident MiB", runs["shipped"], FOLDER), ""])


def _mib(number: float) -> str:
    return f"{number / 2**20:,.0f}"


def _source(unit: str, run: dict[str, Any], file: str) -> str:
    return f"*{unit}; {run['cores']} cores ({run['device']}). `benchmarks/results/{file}`, made by `{run['command']}`.*"


def soak_figure(results: Path) -> Figure:
    """Resident memory, and what malloc has in use, over the time of the soak."""
    soak = json.loads((results / SOAK).read_text())
    over = soak["memory_over_time"]
    minutes = [(second - over["seconds"][0]) / 60 for second in over["seconds"]]
    figure = new_figure(height=2.2, width=6.4)
    axes = style_axes(figure.add_subplot())
    for name, words, colour in (
        ("resident", "resident", COLOURS["react"]),
        ("heaps", "heaps of malloc", COLOURS["ttc"]),
        ("malloc_used", "in use in these heaps", INK),
    ):
        axes.plot(minutes, over[f"{name}_mib"], color=colour, linewidth=1.0, label=words)
    axes.set_ylim(bottom=0)
    name_axes(axes, "minutes", title=f"memory of the service in MiB, {soak['callers']} callers, then none")
    label_ends(figure)
    return figure
