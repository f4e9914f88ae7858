"""The table and the figure of docs/serve.md about the service's memory, from results of benchmarks/serve_soak.py."""

from __future__ import annotations

import json
from pathlib import Path

from doc_tables import table
from matplotlib.figure import Figure

from react_clip.report.figures.plot import label_ends
from react_clip.report.style import COLOURS, INK, name_axes, new_figure, style_axes

SOAK, FOLDER = "serve-soak.json", "serve-memory"
ALLOCATORS = {
    "untrimmed": "without `malloc_trim`",
    "shipped": "with `malloc_trim`",
}
"""Runs in FOLDER, and how they differ."""
COLUMNS = {
    "resident": "resident",
    "files": "files",
    "heaps": "heaps of malloc",
    "other": "other",
    "malloc_used": "malloc: in use",
    "malloc_free": "malloc: free",
    "malloc_mapped": "malloc: mapped",
}


def memory(results: Path) -> str:
    """Memory after each stage of the start, under load, and without requests after it."""
    soak = json.loads((results / SOAK).read_text())
    stages = {line["stage"]: line for line in soak["memory_of_stages"]}
    stages["one request"] = soak["memory_after_one_request"]
    files = [results / FOLDER / f"{name}.json" for name in ALLOCATORS]
    runs = [json.loads(path.read_text()) for path in files if path.is_file()] + [soak]
    for run in runs:
        load, how = run["memory_of_load"], ALLOCATORS[run["allocator"]]
        words = f"{run['minutes']:.0f} minutes of {run['callers']} callers {how}"
        stages |= {f"{words}: most": load["most"], f"{words}: half a minute later": run["memory_after_rest"]}
    rows = [[name, *(_mib(line[key]) for key in COLUMNS), str(line["arenas"])] for name, line in stages.items()]
    lines = [*table(["after", *COLUMNS.values(), "arenas"], rows), ""]
    machines = ", ".join(f"{run['device']} for {run['minutes']:.0f} minutes" for run in (runs[0], soak))
    names = ", ".join(f"`{path.relative_to(results)}`" for path in (*files, results / SOAK) if path.is_file())
    note = f"*In MiB; {soak['cores']} cores ({machines}). `benchmarks/results`: {names}; each holds its command.*"
    lines += [note, ""]
    return "\n".join(lines)


def _mib(number: float) -> str:
    return f"{number / 2**20:,.0f}"


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
