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
COLUMNS = ["", "library, images/s", "service, images/s", "ratio", "images a batch", "HTTP alone, requests/s"]


def speed(results: Path) -> str:
    """Service and library, side by side: ViT-B/16 on a GPU, and a tower that costs next to nothing on a CPU."""
    gpu = [json.loads((results / f"serve-throughput-gpu{part}.json").read_text()) for part in GPU]
    small = {name: json.loads((results / name).read_text()) for name in SMALL}
    rows = [_row(f"ViT-B/16, {run['device']}, {service_setting(run)}", run) for run in gpu]
    for name, run in small.items():
        callers = f"{run['concurrency']} caller{'s' if run['concurrency'] > 1 else ''}"
        for version, values in zip(SMALL[name], (run["before"], run), strict=True):
            rows += [_row(f"tower of one layer, {run['device']}, {callers}, {version}", values)]
    commands = ", ".join(f"`{run['command']}`" for run in (*gpu, *small.values()))
    one = small["serve-overhead.json"]
    sizes = "; ".join(f"{service_setting(run)}: {_latency_and_memory(run)}" for run in gpu)
    notes = [
        f"GPU, {gpu[0]['cores']} cores: median latency, memory of the host and, where one version ran alone, of the",
        f"GPU with {sizes}.",
        f"Tower of one layer: {one['cores']} cores, medians of {len(one['rounds'])} rounds; the",
        f"callers take {one['callers_processor_ms']:.2f} ms of processor time a request. HTTP alone: forms of the same",
        f"length that are refused by their first bytes. Made by {commands}.",
    ]
    return "\n".join([*table(COLUMNS, rows), "", f"*{' '.join(notes)}*", ""])


def service_setting(run: dict[str, Any]) -> str:
    """Callers and processes of a measured service, and the batches of the library beside it."""
    processes = re.search(r"--processes (\d+)", run["server"])
    several = f"{processes[1]} processes" if processes else "1 process"
    words = f"{run['concurrency']} callers, {several}, library in batches of {run['batch']}"
    return f"{words} ({run['note']})" if "note" in run else words


def _latency_and_memory(run: dict[str, Any]) -> str:
    known = [key for key in ("server_memory", "server_gpu_memory") if key in run]
    memory = " and ".join(f"{run[key] / 1e6:,.0f} MB" for key in known)
    return f"{1000 * run['latency_seconds']['median']:.0f} ms, {memory}"


def _row(name: str, values: dict[str, Any]) -> list[str]:
    http = values.get("http_requests_per_second")
    return [
        name,
        *(f"{values[key]:,.0f}" for key in ("library_images_per_second", "server_images_per_second")),
        f"{values['ratio']:.2f}",
        f"{values['images_per_batch']:.1f}",
        f"{http:,.0f}" if http else "–",
    ]
