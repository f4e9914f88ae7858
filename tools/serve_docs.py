"""The table of docs/serve.md about the service's speed, from results of benchmarks/serve_throughput.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from doc_tables import table

GPU = ("-one", "-12", "-12-128", "-12-256")
"""Results on a GPU, ``serve-throughput-gpu*.json``."""
SMALL = {
    "serve-overhead.json": ("before", "after"),
    "serve-overhead-one.json": ("before", "after"),
    "serve-uvloop.json": ("without uvloop", "with uvloop"),
}
"""Results with a tower of one layer: names of the versions that a run compares."""
NUMBERS = {
    "library_images_per_second": "library, images/s",
    "server_images_per_second": "service, images/s",
    "ratio": "ratio",
    "images_per_batch": "images a batch",
    "latency": "median latency, ms",
    "memory": "memory of the host, MB",
    "http_requests_per_second": "HTTP alone, requests/s",
}
"""Columns of the table."""


def speed(results: Path) -> str:
    """Service and library, side by side: ViT-B/16 on a GPU, and a tower that costs next to nothing on a CPU."""
    gpu = [json.loads((results / f"serve-throughput-gpu{part}.json").read_text()) for part in GPU]
    small = {name: json.loads((results / name).read_text()) for name in SMALL}
    rows = [_row(f"ViT-B/16, {run['device']}, {service_setting(run)}", run) for run in gpu]
    for name, run in small.items():
        callers = f"{run['concurrency']} caller{'s' if run['concurrency'] > 1 else ''}"
        for version, values in zip(SMALL[name], (run["before"], run), strict=True):
            rows += [_row(f"tower of one layer, {run['device']}, {callers}, {version}", values)]
    one = small["serve-overhead.json"]
    files = [*(f"`serve-throughput-gpu{part}.json`" for part in GPU), *(f"`{name}`" for name in SMALL)]
    notes = [
        f"GPU: {gpu[0]['cores']} cores. Tower of one layer: {one['cores']} cores, medians of {len(one['rounds'])}",
        f"rounds; the callers take {one['callers_processor_ms']:.2f} ms of processor time a request. HTTP alone: forms",
        f"of the same length that are refused by their first bytes. `benchmarks/results`: {', '.join(files)}; each",
        "holds the command that made it.",
    ]
    return "\n".join([*table(["", *NUMBERS.values()], rows), "", f"*{' '.join(notes)}*", ""])


def service_setting(run: dict[str, Any]) -> str:
    """Callers and processes of a measured service, and the batches of the library beside it."""
    processes = re.search(r"--processes (\d+)", run["server"])
    several = f"{processes[1]} processes" if processes else "1 process"
    words = f"{run['concurrency']} callers, {several}, library in batches of {run['batch']}"
    return f"{words} ({run['note']})" if "note" in run else words


def _row(name: str, values: dict[str, Any]) -> list[str]:
    found = dict(values)
    if "latency_seconds" in values:
        found["latency"] = 1000 * values["latency_seconds"]["median"]
    if "server_memory" in values:
        found["memory"] = values["server_memory"] / 1e6
    return [name, *(_digits(key, found.get(key)) for key in NUMBERS)]


def _digits(key: str, value: float | None) -> str:
    if not value:
        return "–"
    return f"{value:,.{ {'ratio': 2, 'images_per_batch': 1}.get(key, 0) }f}"
