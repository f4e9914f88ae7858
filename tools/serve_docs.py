"""The table of docs/serve.md about the service's speed, from results of benchmarks/serve_throughput.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doc_tables import table

GPU, SMALL = "serve-throughput-gpu.json", ("serve-overhead.json", "serve-overhead-one.json")
COLUMNS = ["", "library, images/s", "service, images/s", "ratio", "images a batch", "HTTP alone, requests/s"]


def speed(results: Path) -> str:
    """Service and library, side by side: ViT-B/16 on a GPU, and a tower that costs next to nothing on a CPU."""
    gpu = json.loads((results / GPU).read_text())
    small = [json.loads((results / name).read_text()) for name in SMALL]
    rows = [
        _row(f"ViT-B/16, {gpu['device']}, {gpu['concurrency']} callers, round {number}, before", one)
        for number, one in enumerate(gpu["rounds"], 1)
    ]
    for run in small:
        callers = f"{run['concurrency']} caller{'s' if run['concurrency'] > 1 else ''}"
        rows += [_row(f"tower of one layer, {callers}, before", run["before"])]
        rows += [_row(f"tower of one layer, {callers}, now", run)]
    commands = ", ".join(f"`{run['command']}`" for run in (gpu, *small))
    one = small[0]
    notes = [
        f"GPU: median latency {1000 * gpu['latency_seconds']['median']:.0f} ms, {gpu['cores']} cores;",
        f"{gpu['server_memory'] / 1e6:,.0f} MB of memory and {gpu['server_gpu_memory'] / 1e6:,.0f} MB of the GPU's.",
        f"Tower of one layer: {one['cores']} cores ({one['device']}), medians of {len(one['rounds'])} rounds; the",
        f"callers take {one['callers_processor_ms']:.2f} ms of processor time a request. HTTP alone: forms of the same",
        f"length that are refused by their first bytes. Made by {commands}.",
    ]
    return "\n".join([*table(COLUMNS, rows), "", f"*{' '.join(notes)}*", ""])


def _row(name: str, values: dict[str, Any]) -> list[str]:
    http = values.get("http_requests_per_second")
    return [
        name,
        *(f"{values[key]:,.0f}" for key in ("library_images_per_second", "server_images_per_second")),
        f"{values['ratio']:.2f}",
        f"{values['images_per_batch']:.1f}",
        f"{http:,.0f}" if http else "–",
    ]
