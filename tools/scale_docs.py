"""The table of docs/scale.md, made from the results of ``benchmarks/scale_overhead.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doc_tables import table

RUNS = {"scale-overhead.json": "a small CLIP", "scale-overhead-tower.json": "the real ViT-B/16"}
"""Result files and what was measured; the smaller the model, the larger the share of the engine."""


def overhead(folder: Path) -> str:
    """Local engine and Ray, side by side."""
    runs = {what: json.loads((folder / file).read_text()) for file, what in RUNS.items() if (folder / file).exists()}
    if not runs:
        return ""
    each = list(runs.values())
    rows = [
        ["images", *(f"{run['images']:,}" for run in each)],
        *(
            [f"images/s, {side}", *(f"{run['images_per_second'][side]:.2f}" for run in each)]
            for side in each[0]["images_per_second"]
        ),
        ["one Ray worker against the local engine, time", *(f"{run['overhead']:.2f} x" for run in each)],
        ["efficiency of the second worker", *(f"{100 * run['efficiency_two_workers']:.0f} %" for run in each)],
        ["decoding, ms an image", *(f"{1000 * run['decode_seconds_per_image']:.2f}" for run in each)],
        ["read and written, KB an image", *map(_traffic, each)],
        ["peak memory of a worker, all images / a quarter", *map(_memory, each)],
    ]
    lines = [*table(["", *runs], rows), ""]
    for file, what in RUNS.items():
        if what in runs:
            run = runs[what]
            lines.append(
                f"*{what[0].upper() + what[1:]}: {run['cores']} cores ({run['device']}), chunks of {run['chunk']}, "
                f"seed {run['seed']}. `benchmarks/results/{file}`, made by `{run['command']}`.*"
            )
            lines.append("")
    return "\n".join(lines)


def _kb(number: float) -> str:
    return f"{number / 1000:.1f}"


def _traffic(run: dict[str, Any]) -> str:
    return f"{_kb(run['read_bytes_per_image'])} / {_kb(run['written_bytes_per_image'])}"


def _memory(run: dict[str, Any]) -> str:
    side = "ray, 2 workers"
    return " / ".join(f"{run[key][side]['worker'] / 1e6:,.0f} MB" for key in ("peak_bytes_all", "peak_bytes_quarter"))
