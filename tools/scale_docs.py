"""Sections of docs/scale.md, made from what ``benchmarks/scale_overhead.py`` and ``scale_model.py`` wrote.

A section whose files are not there is empty, heading and all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RUNS = {"scale-overhead.json": "a small CLIP", "scale-overhead-tower.json": "the real ViT-B/16"}
"""The smaller the model, the more the engine weighs."""


def scale(name: str, folder: Path) -> str:
    """One section: overhead or model."""
    return {"overhead": overhead, "model": model}[name](folder)


def overhead(folder: Path) -> str:
    """Local engine and Ray, side by side."""
    runs = {what: json.loads((folder / file).read_text()) for file, what in RUNS.items() if (folder / file).exists()}
    if not runs:
        return ""
    lines = ["|  | " + " | ".join(runs) + " |", "|---|" + "---:|" * len(runs)]

    def row(label: str, cells: list[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    each = list(runs.values())
    row("images", [f"{run['images']:,}" for run in each])
    for side in each[0]["images_per_second"]:
        row(f"images/s, {side}", [f"{run['images_per_second'][side]:.2f}" for run in each])
    row("one Ray worker against the local engine, time", [f"{run['overhead']:.2f} x" for run in each])
    row("efficiency of the second worker", [f"{100 * run['efficiency_two_workers']:.0f} %" for run in each])
    row("decoding, ms an image", [f"{1000 * run['decode_seconds_per_image']:.2f}" for run in each])
    row("through the object store, KB an image", [_kb(run["object_store_bytes_per_image"]) for run in each])
    row("read and written, KB an image", [_traffic(run) for run in each])
    row("peak memory of a worker, all images / a quarter", [_memory(run) for run in each])
    lines += [""]
    for file, what in RUNS.items():
        if what in runs:
            run = runs[what]
            lines.append(
                f"*{what[0].upper() + what[1:]}: {run['cores']} cores ({run['device']}), parcels of {run['parcel']}, "
                f"seed {run['seed']}. `benchmarks/results/{file}`, made by `{run['command']}`.*"
            )
            lines.append("")
    return "\n".join(lines)


def model(folder: Path) -> str:
    """The forecast, what it assumes, and how wrong it was where it could be checked."""
    place = folder / "scale-model.json"
    if not place.exists():
        return ""
    found = json.loads(place.read_text())
    lines = ["| GPUs | images/s | hours | dollars a million | limited by |", "|---:|---:|---:|---:|---|"]
    lines += [
        f"| {row['gpus']} | {row['images_per_second']:,} | {row['hours']:.1f} | "
        f"{row['dollars_per_million_images']:.2f} | {row['limited_by']} |"
        for row in found["forecast"]
    ]
    names = list(found["forecast"][0]["capacities"])
    lines += ["", "| images/s that each allows | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    lines += [
        f"| {row['gpus']} GPUs | "
        + " | ".join(f"{row['capacities'][name]:,} ({100 * row['used'][name]:.0f} %)" for name in names)
        + " |"
        for row in found["forecast"]
    ]
    shared = ", ".join(f"{name} at {gpus:,} GPUs" for name, gpus in found["saturates_at_gpus"].items())
    lines += [
        "",
        f"In brackets: how much of it is used. What all GPUs share becomes the limit: {shared}.",
        "",
        *_measured(found["measured"], found["speed_files"], found["driver_share_by_actors"]),
        *_assumed(found["assumed"]),
        *_checked(found["checks"]),
        *_before(found["before"], found["measured"], found["images"]),
        *_batches(found["batches"]),
        f"*`benchmarks/results/scale-model.json`, made by `{found['command']}` from `scale-overhead.json`, "
        "`scale-driver.json` and `scale-batches.json` beside it.*",
    ]
    return "\n".join(lines) + "\n"


def _measured(numbers: dict[str, float], files: dict[str, str], actors: dict[str, float]) -> list[str]:
    seen = ", ".join(f"{100 * share:.1f} % with {count}" for count, share in actors.items())
    where = " and ".join(f"`bench/{name}`" for name in files.values())
    return [
        f"**Measured**: {numbers['clean_per_second']:,.0f} clean and {numbers['attacked_per_second']:,.0f} attacked "
        f"images/s on one GPU ({where}), taken {numbers['overhead']:.2f} times as long for the engine; "
        f"{1000 * numbers['decode_seconds']:.1f} ms of a core to decode an image; {_kb(numbers['read_bytes'])} KB of "
        f"it read, {_kb(numbers['stored_bytes'])} KB decoded, {_kb(numbers['written_bytes'])} KB written; of the "
        f"driver's core {100 * numbers['driver_share']:.1f} % for Ray Data's loop, "
        f"{100 * numbers['driver_share_per_actor']:.3f} % more for every actor (at one pace {seen}), and "
        f"{1000 * numbers['driver_seconds_per_parcel']:.1f} ms a parcel.",
        "",
    ]


def _assumed(numbers: dict[str, float]) -> list[str]:
    return [
        f"**Assumed**: {numbers['cores_per_gpu']:g} cores a GPU, as fast as the one that was measured; "
        f"{numbers['gpus_per_node']} GPUs and {numbers['node_bytes_per_second'] * 8 / 1e9:g} Gbit/s either way a node; "
        f"{100 * numbers['crossing']:g} % of the decoded pixels cross from one node to another; storage of "
        f"{numbers['storage_bytes_per_second'] / 1e9:g} GB/s for all; parcels of {numbers['parcel']:,}; "
        f"{100 * numbers['attacked']:g} % of the images attacked; {numbers['dollars_per_gpu_hour']:g} dollars a GPU "
        "and hour.",
        "",
    ]


def _checked(checks: dict[str, dict[str, float]]) -> list[str]:
    workers, driver, fit = checks["two workers"], checks["driver"], checks["fit"]
    return [
        f"**Checked**: from the run with one worker the same arithmetic predicts {workers['predicted']:.2f} images/s "
        f"for two; {workers['measured']:.2f} were measured ({100 * workers['error']:+.0f} %). For the driver of the "
        f"run of {driver['images']:,} images it predicts {driver['predicted']:.3f} CPU seconds a parcel; "
        f"{driver['measured']:.3f} were measured ({100 * driver['error']:+.0f} %), nearly all of "
        "them for the loop while a parcel took its time. In the runs that the driver's cost was fitted to, it is wrong "
        f"by {100 * fit['least']:+.0f} to {100 * fit['most']:+.0f} %. With actors that take no time a driver sent "
        f"{fit['parcels_per_second']:.0f} parcels a second ({100 * fit['share']:.0f} % of a core).",
        "",
    ]


def _before(numbers: dict[str, float], measured: dict[str, float], images: int) -> list[str]:
    return [
        f"**Before the first image**, one driver with {images:,} images in {numbers['parcels']:,} parcels: "
        f"{60 * numbers['parcel_hours']:.0f} minutes to make the blocks, at least "
        f"{numbers['memory_bytes'] / 1e9:.1f} GB of memory for them, {numbers['plan_bytes'] / 1e6:.0f} MB of plan. "
        f"Tar shards also have a header an image to be read, {1e6 * measured['tar_seconds']:.0f} µs each: "
        f"{numbers['tar_hours']:.0f} hours.",
        "",
    ]


def _batches(parcels: list[dict[str, Any]]) -> list[str]:
    lines = ["| images in a parcel | gates open | encoder calls | views | batches are full to |", "|" + "---:|" * 5]
    lines += [
        f"| {row['parcel']:,} | {row['opened']} | {row['calls']} | {row['views']:,} | {100 * row['fill']:.1f} % |"
        for row in parcels
    ]
    return [*lines, ""]


def _kb(number: float) -> str:
    return f"{number / 1000:.1f}"


def _traffic(run: dict[str, Any]) -> str:
    return f"{_kb(run['read_bytes_per_image'])} / {_kb(run['written_bytes_per_image'])}"


def _memory(run: dict[str, Any]) -> str:
    side = "ray, 2 workers"
    return " / ".join(f"{run[key][side]['worker'] / 1e6:,.0f} MB" for key in ("peak_bytes_all", "peak_bytes_quarter"))
