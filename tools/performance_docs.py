"""Sections of docs/performance.md, each made from the files that ``benchmarks/bench_all.sh`` wrote.

A section whose files are not there is empty, heading and all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from doc_tables import table
from performance_figures import (
    DEVICES,
    MODELS,
    TABLES,
    Report,
    attained,
    contender,
    growth,
    read_reports,
    select,
    series,
    where,
)

from react_clip.bench import BARE, OURS, PLAIN, PUBLISHED
from react_clip.choices import SWEEPS

Row = dict[str, Any]
FULL_BATCH = {"gpu": 256, "cpu": 1}
"""Batches from which the aims for the overhead hold."""
OVERHEAD = {"gpu": 1.10, "cpu": 1.15}
FASTER = {PLAIN: 3.0, PUBLISHED: 6.0}
FLAT = 1.05
"""Largest ratio of two times that counts as equal: timings are noisy."""


def performance(name: str, folder: Path) -> str:
    """One section: cost, aims, sweeps, roofline, compilation, sequential or tried."""
    sections: dict[str, Callable[[Path], str]] = {
        "cost": lambda folder: cost(read_reports(folder)),
        "aims": lambda folder: aims(read_reports(folder)),
        "sweeps": lambda folder: sweeps(read_reports(folder)),
        "roofline": lambda folder: roofline(read_reports(folder)),
        "compilation": compilation,
        "sequential": sequential,
        "tried": tried,
    }
    return sections[name](folder)


def compilation(folder: Path) -> str:
    """Times on a GPU with and without ``compile=True``."""
    paths = [folder / f"gpu-{name}.json" for name in ("first-call", *(f"{m}-table-clean-uncompiled" for m in MODELS))]
    if not all(path.is_file() for path in paths):
        return ""
    first, *plain = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    rows = [
        [f"{text}, seconds", *(f"{case[key]:.2f}" for case in first["seconds"])]
        for text, key in (
            ("first defended call, 256 photos", "first_call"),
            ("second call", "second_call"),
            ("twenty batch sizes for the first time", "twenty_sizes"),
            ("the same sizes again", "twenty_sizes_again"),
        )
    ]
    compiled = select(read_reports(folder), "gpu", "table-clean")
    for text, key in (("overhead, batch 256, clean", "overhead"), ("one image alone, p50 ms", "latency_p50")):
        for *both, model in zip(plain, compiled, MODELS.values(), strict=True):
            rows.append([f"{model}: {text}", *(f"{contender(report, OURS)[key]:.2f}" for report in both)])
    note = f"*{first['device']}, {first['dtype']}; `benchmarks/results/bench/gpu-first-call.json`, made by"
    note += f" `{first['command']}`, and `gpu-*-table-clean*.json`.*"
    return "\n".join([*table(["", "without", "with `compile=True`"], rows), "", note])


def source(report: Report) -> str:
    """The notes of a report, its file and the command that made it."""
    return f"{notes(report)} `benchmarks/results/bench/{report['file']}`, made by `{report['command']}`."


def notes(report: Report) -> str:
    """The notes of a report as sentences."""
    return "".join(f" {note[0].upper()}{note[1:]}." for note in report.get("notes", []))


def figure(name: str, words: str) -> list[str]:
    """A picture that tools/draw_figures.py draws."""
    return ["", f"![{words}](figures/performance/{name}.svg)"]


# ---------------------------------------------------------------------- tables


def cost(reports: Sequence[Report]) -> str:
    """Every contender on every machine and model."""
    lines: list[str] = []
    for device in DEVICES:
        tables = select(reports, device, *TABLES)
        if tables:
            lines += ["", f"### On {_machine(tables[0])}"]
            lines += figure(f"cost-{device}", "Time per image of each contender, in passes of the bare encoder")
        for report in tables:
            lines += ["", *_cost_table(report), "", f"*{_setting(report)}.{source(report)}*"]
    return "\n".join(lines[1:]) + "\n" if lines else ""


def _cost_table(report: Report) -> list[str]:
    head = ["", "images/s", "passes", "overhead", "p50 ms", "p99 ms", "memory MiB", "ReACT's speed relative to it"]
    rows = []
    for label in (BARE, OURS, PLAIN, PUBLISHED):
        item = contender(report, label)
        speed = item["images_per_second"]
        cells = [f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}", f"{item['passes']:.2f}", _overhead(item)]
        # Older files timed too few single images to speak of percentiles.
        latencies = [item["latency_p50"], item["latency_p99"]] if "singles" in report else []
        cells += [f"{milliseconds:,.1f}" for milliseconds in latencies] or ["", ""]
        cells.append(_memory(item))
        cells.append("" if label == OURS else f"{speedup(report, label):.2f} x")
        rows.append([label, *cells])
    return table(head, rows)


def _overhead(item: Row) -> str:
    if "overhead_range" not in item:
        return f"{item['overhead']:.2f}"
    low, high = item["overhead_range"]
    return f"{item['overhead']:.2f} ({low:.2f} to {high:.2f})"


def _memory(item: Row) -> str:
    """Beyond weights and waiting images; older files counted those too."""
    return (
        "" if item["peak_bytes"] is None or "round_milliseconds" not in item else f"{item['peak_bytes'] / 2**20:,.0f}"
    )


def speedup(report: Report, other: str) -> float:
    """ReACT's speed divided by another contender's, round by round where rounds are known (their median)."""
    ours, theirs = contender(report, OURS), contender(report, other)
    if "round_milliseconds" not in ours:
        return float(theirs["milliseconds"] / ours["milliseconds"])
    pairs = zip(ours["round_milliseconds"], theirs["round_milliseconds"], strict=True)
    return median(b / a for a, b in pairs)


def _setting(report: Report) -> str:
    single = f", latency over {report['singles']} single images" if "singles" in report else ""
    return (
        f"{MODELS[report['tower']]}, {report['images']} {TABLES[report['part']]} in batches of {report['batch']}, "
        f"{report['dtype']}, {report['classes']:,} classes, {report['rounds']} rounds{single}"
    )


# ---------------------------------------------------------------------- aims


def aims(reports: Sequence[Report]) -> str:
    """Each aim with the measured value on every machine, marked where it is missed."""
    places: list[str] = []
    cells: dict[str, dict[str, str]] = {}
    for report in reports:
        place = f"{MODELS[report['tower']]}, {where(report)}"
        for words, value, reached in _aims_of(report):
            places += [] if place in places else [place]
            cells.setdefault(words, {})[place] = f"{value:.2f}" if reached else f"{value:.2f}, missed"
    if not cells:
        return ""
    rows = [[words, *(found.get(place, "") for place in places)] for words, found in cells.items()]
    return "\n".join(["## What we aim at, and where we are", "", *table(["", *places], rows)]) + "\n"


def _aims_of(report: Report) -> Iterator[tuple[str, float, bool]]:
    device, part = report["machine"], report["part"]
    if part in TABLES:
        overhead = contender(report, OURS)["overhead"]
        if report["batch"] >= FULL_BATCH[device]:
            limits = f"{OVERHEAD['gpu']:.2f} on a GPU at batch {FULL_BATCH['gpu']}, {OVERHEAD['cpu']:.2f} on a CPU"
            yield f"overhead on {TABLES[part]} at most {limits}", overhead, overhead <= OVERHEAD[device]
        for other, least in FASTER.items() if part == "table-clean" else ():
            ratio = speedup(report, other)
            yield f"on clean photos at least {least:g} x as fast as {other}", ratio, ratio >= least
    elif part == "sweep-images":
        points = series(report, "images", OURS)
        change = growth(report, "images")[-1][1]
        yield "8 x as many images: overhead within 5 %", change, change <= FLAT
        peaks = [item["peak_bytes"] for _, item in points]
        if None not in peaks and peaks[0]:
            yield "8 x as many images: memory within 5 %", peaks[-1] / peaks[0], peaks[-1] <= FLAT * peaks[0]
    elif part == "sweep-classes":
        points = series(report, "classes", OURS)
        change = growth(report, "classes")[-1][1]
        words = f"{points[-1][0]:,.0f} classes instead of {points[0][0]:,.0f}: less than 5 % more time"
        yield words, change, change < FLAT


# ---------------------------------------------------------------------- sweeps


def sweeps(reports: Sequence[Report]) -> str:
    """ReACT's cost against batch, images, classes and share of attacked images."""
    lines: list[str] = []
    for device in DEVICES:
        swept = select(reports, device, *(f"sweep-{axis}" for axis in SWEEPS))
        if swept:
            lines += ["", f"### On {_machine(swept[0])}"]
            words = "Cost of ReACT along batch, images, classes and share of attacked images"
            lines += figure(f"sweeps-{device}", words)
        for _, same in groupby(swept, key=lambda report: report["tower"]):
            lines += _sweep_table(list(same))
    if not lines:
        return ""
    words = (
        "One thing changes, the rest stays. Classes are copies of the first ten, which leave the gate as it is. Apart "
        "from the passes that an image needs, cost should follow none of these."
    )
    return "\n".join(["## Along one axis", "", words, *lines]) + "\n"


def _sweep_table(reports: list[Report]) -> list[str]:
    """All sweeps of one model on one machine."""
    rows = []
    for report in reports:
        axis = report["part"].removeprefix("sweep-")
        for value, item in series(report, axis, OURS):
            shown = f"{100 * value:g} % attacked" if axis == "attacked" else f"{axis} {value:,.0f}"
            cells = [f"{item['milliseconds']:,.3f}", f"{item['passes']:.2f}", _overhead(item), _memory(item)]
            rows.append([shown, *cells])
    head = ["", "ms per image", "passes", "overhead", "memory MiB"]
    files = ", ".join(f"`{report['file']}`" for report in reports)
    setting = f"{MODELS[reports[0]['tower']]}, {reports[0]['dtype']}.{notes(reports[0])}"
    return ["", *table(head, rows), "", f"*{setting} {files}.*"]


# ---------------------------------------------------------------------- roofline, tried


def roofline(reports: Sequence[Report]) -> str:
    """Speed of encoder passes beside the speed of large matrix products and of memory."""
    lines, rows = [], []
    for device in DEVICES:
        batches = select(reports, device, "sweep-batch")
        if batches:
            lines += figure(f"roofline-{device}", "Operations a second of encoder passes by batch, below their roof")
        for report in batches:
            limits = report["roofline"]
            shares = []
            for label in (BARE, OURS):
                best = max(attained(report, item) for _, item in series(report, "batch", label))
                shares.append(f"{best / 1e12:.3g} ({best / limits['matmul_flops']:.0%})")
            numbers = [f"{limits['pass_flops'] / 1e9:.2f}", f"{limits['weight_bytes'] / 2**20:.0f}"]
            numbers += [f"{limits['matmul_flops'] / 1e12:.3g}", f"{limits['memory_bytes'] / 1e9:,.0f}", *shares]
            rows.append([f"{MODELS[report['tower']]}, {where(report)}, {report['dtype']}", *numbers])
    if not rows:
        return ""
    head = ["", "GFLOP a pass", "weights MiB", "matrix products TFLOP/s", "memory GB/s", "bare encoder TFLOP/s"]
    head.append("ReACT TFLOP/s")
    words = (
        "An encoder call can be no faster than its operations at the speed of large matrix products, nor than reading "
        "its weights once. Both speeds were measured on the same machine; a multiply-add counts as two operations. The "
        "last two columns are the best over all batches, and their share of the matrix products."
    )
    files = "*`benchmarks/results/bench/*-sweep-batch.json`.*"
    return "\n".join(["## Roofline", "", words, *lines, "", *table(head, rows), "", files]) + "\n"


def sequential(folder: Path) -> str:
    """Rules that stop drawing views, beside all M of them: accuracy at every budget, and passes of attacked images."""
    place = folder.parent / "sequential" / "rules.json"
    if not place.exists():
        return ""
    found = json.loads(place.read_text(encoding="utf-8"))
    rules: dict[str, Any] = found["rules"]
    whole = rules[next(iter(rules))]["budgets"]
    head = ["rule", *("clean" if budget == "0/255" else budget for budget in whole), "passes, attacked", "changed"]
    rows = []
    for rule, values in rules.items():
        points = [values["budgets"][budget]["accuracy"] - whole[budget]["accuracy"] for budget in whole]
        accuracy = [f"{100 * point:+.2f}" for point in points]
        if values["budgets"] is whole:
            accuracy = [f"{100 * values['budgets'][budget]['accuracy']:.2f}" for budget in whole]
        attacked = values["attacked"]
        rows.append([rule, *accuracy, f"{attacked['passes']:.2f}", f"{100 * attacked['changed']:.2f} %"])
    photos = sum(one["photos"] for one in found["sets"].values())
    note = (
        f"Accuracy in % with all views, and the difference of every other rule to it in points; mean over "
        f"{len(found['sets'])} data sets ({photos:,} photos), {found['attack']}, {found['model']}, {found['dtype']}; "
        f"views encoded on {found['encoded_on']}, kept in half precision, replayed in {found['orders']} orders. "
        f"`benchmarks/results/sequential/rules.json`, made by `{found['command']}`."
    )
    return "\n".join([*table(head, rows), "", f"*{note}*"]) + "\n"


def tried(folder: Path) -> str:
    """Ideas that were measured, kept or not: one row an idea, one column a device."""
    path = folder / "tried.json"
    if not path.exists():
        return ""
    found: dict[str, dict[str, Row]] = {}
    for idea in json.loads(path.read_text(encoding="utf-8")):
        found.setdefault(idea["idea"], {})[f"{idea['device']}, {idea['dtype']}"] = idea
    devices = sorted({device for measured in found.values() for device in measured})
    words = "Each number is time with the change divided by time without it, of the part that the idea changes."
    lines = ["## What was tried", "", words, ""]
    lines += [f"| idea | {' | '.join(devices)} | kept | why |", "|---|" + "---:|" * len(devices) + "---|---|"]
    for name, measured in found.items():
        idea = next(iter(measured.values()))
        cells = " | ".join(_ratio(measured.get(device)) for device in devices)
        lines.append(f"| {name}: {idea['what']} | {cells} | {'yes' if idea['kept'] else 'no'} | {idea['why']} |")
    lines += ["", "*`benchmarks/results/bench/tried.json`.*"]
    return "\n".join(lines) + "\n"


def _ratio(idea: Row | None) -> str:
    """The ratio; some ideas are about something else than time, and 16 bits are about gates too."""
    if idea is None or idea["ratio"] is None:
        return ""
    gates = ", ".join(_gates(idea.get("agreement", {})))
    return f"{idea['ratio']:.2f}" + (f" (same gate: {gates})" if gates else "")


def _gates(agreement: Row) -> Iterator[str]:
    """Share of photos with the same gate decision, by kind of photos, or by precision and kind."""
    for name, part in agreement.items():
        if isinstance(part, dict) and "same_gate" in part:
            yield f"{100 * part['same_gate']:.2f} % of {part['photos']:,} {name}"
        elif isinstance(part, dict):
            yield from (f"{name} {line}" for line in _gates(part))


def _machine(report: Report) -> str:
    return f"a CPU with {report['threads']} threads" if report["device"] == "cpu" else f"an {report['device']}"
