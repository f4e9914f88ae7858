"""Sections of docs/performance.md and docs/performance-details.md.

Each is made from files that ``benchmarks/bench_all.sh`` wrote; without its files a section is empty, heading and all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from doc_tables import table
from performance_figures import (
    DEVICES,
    LOOK,
    MODELS,
    TABLES,
    Report,
    attained,
    contender,
    growth,
    look_reports,
    place_of,
    ratio,
    read_reports,
    select,
    series,
    where,
)
from serve_docs import service_setting

from react_clip.bench import BARE, OURS, PLAIN, PUBLISHED
from react_clip.choices import SWEEPS

Row = dict[str, Any]
WORDS = {BARE: "plain CLIP", LOOK: "SecondLook", OURS: "ReACT", PLAIN: "the paper's 14 passes"}
"""Columns of the first table."""
PRECISIONS = {
    "16 bits": "ReACT",
    "bf16": "ReACT",
    "16 bits for SecondLook": "SecondLook",
    "int8 in ONNX Runtime": "SecondLook",
    "int8 in OpenVINO": "SecondLook",
    "int8 on a GPU": "SecondLook",
}
"""Ideas of tried.json that are about the precision of the tower, and the defence whose answers were compared."""
CLASSES = 1223
"""Classes of the label bank, with which most was measured."""
OVERHEADS = {1: 1.3, 8: 1.2, 256: 1.1}
"""Largest overhead of SecondLook on a GPU that we aim at, by batch size."""
RULES = ("all 10 views", "2 views", "5 views", "sequential 0.95", "sequential 0.99, two by two", "sequential 0.99")
"""Rules for stopping early that are shown; the file has more."""
SWEPT = {"images": "8 x as many images", "classes": "20,000 classes instead of 10"}
"""Sweeps along which the time per image should not change."""
FASTEST = {"vit-b-16": 14_000, "vit-b-32": 45_000}
"""Images a second of the plain encoder that we aim at."""
FLAT = 1.05
"""Largest ratio of two times that counts as equal: timings are noisy."""


def performance(name: str, folder: Path) -> str:
    """One section of the document."""
    sections: dict[str, Callable[[Path], str]] = {
        "cost": cost,
        "sets": sets,
        "aims": aims,
        "precision": precision,
        "compilation": compilation,
        "react": lambda folder: react(read_reports(folder)),
        "sequential": sequential,
        "sweeps": lambda folder: sweeps(read_reports(folder)),
        "roofline": lambda folder: roofline(read_reports(folder)),
        "tried": tried,
    }
    return sections[name](folder)


# ---------------------------------------------------------------------- SecondLook


def cost(folder: Path) -> str:
    """Milliseconds per photo of plain CLIP and of the defences, at every batch size that was measured."""
    rows, alone, files = [], [], []
    for report in look_reports(folder):
        found = {item["label"]: item for item in report["contenders"]}
        photos, place = _photos(report), place_of(report)
        times = [_milliseconds(found, label, "milliseconds") for label in WORDS]
        numbers = [f"{ratio(report, LOOK, BARE):.2f}", f"{found[LOOK]['passes']:.2f}", _overhead(found[LOOK])]
        rows.append([f"{place}, batch {report['batch']}", photos, *times, *numbers])
        if len(found) > 3:
            alone.append([f"{place}, one at a time", photos, *(_milliseconds(found, w, "latency_p50") for w in WORDS)])
        files.append(f"`{report['file']}`")
    if not rows:
        return ""
    head = [
        "machine",
        "photos",
        *(f"{words} ms" for words in WORDS.values()),
        "SecondLook / plain",
        "passes",
        "overhead",
    ]
    rows += [[*row, "", "", ""] for row in alone]
    note = (
        f"*ViT-B/16, {CLASSES:,} classes unless the row has others. `benchmarks/results/bench`: "
        f"{', '.join(dict.fromkeys(files))}; each holds the command that made it.*"
    )
    picture = figure("second-look", "Time per photo of SecondLook and ReACT, in times that of plain CLIP")
    return "\n".join([*picture[1:], "", *table(head, rows), "", note]) + "\n"


def sets(folder: Path) -> str:
    """Cost of SecondLook for the clean photos of each data set, with its own classes."""
    runs = _clean_traffic(folder, "clean-traffic*.json")
    if not runs:
        return ""
    found, rows = next(iter(runs.values())), []
    for same in zip(*(run["sets"] for run in runs.values()), strict=True):
        times = [f"{row['second_look_ms'] / row['plain_ms']:.2f}" for row in same]
        rows.append([same[0]["dataset"], f"{same[0]['classes']:,}", f"{same[0]['passes']:.2f}", *times])
    means = [f"{run['mean']['ratio']:.2f}" for run in runs.values()]
    rows.append(["mean", "", f"{found['mean']['passes']:.2f}", *means])
    photos = max(row["photos"] for row in found["sets"])
    place = f"{found['device']}, {found['dtype']}, batch {found['batch']}, {photos} test photos of each set"
    files = " and ".join(f"`{name}`" for name in runs)
    note = f"*{place}. `benchmarks/results/bench`: {files} by `{found['command']}`.*"
    head = ["photos", "classes", "passes", *(f"SecondLook / plain, run {number}" for number in range(1, 1 + len(runs)))]
    return "\n".join([*table(head, rows), "", note]) + "\n"


def _clean_traffic(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    """By file name the runs of benchmarks/clean_traffic.py, each on a machine of its own."""
    paths = sorted(folder.glob(pattern), key=lambda path: len(path.name))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _photos(report: Report) -> str:
    """Clean or attacked photos, and their classes if these are not the usual ones."""
    classes = f", {report['classes']:,} classes" if report["classes"] != CLASSES else ""
    return ("attacked" if report["attacked"] else "clean") + classes


def _milliseconds(found: dict[str, Row], label: str, key: str) -> str:
    return _digits(found[label][key]) if label in found else ""


def _digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def aims(folder: Path) -> str:
    """Each aim beside what was measured."""
    rows = [
        [words, limit, f"{value:,.2f}" if value < 100 else f"{value:,.0f}", "yes" if reached else "no"]
        for words, limit, value, reached in _aims(folder)
    ]
    return "\n".join(table(["ratio", "aim", "measured", "reached"], rows)) + "\n" if rows else ""


def _aims(folder: Path) -> Iterator[tuple[str, str, float, bool]]:
    def at_most(limit: float, value: float) -> tuple[str, float, bool]:
        return f"at most {limit:g}", value, round(value, 2) <= limit

    def at_least(limit: float, value: float) -> tuple[str, float, bool]:
        return f"at least {limit:,g}", value, value >= limit

    for report in look_reports(folder):
        found = {item["label"]: item for item in report["contenders"]}
        place = f"{_photos(report)}, {place_of(report)}, batch {report['batch']}"
        if report["device"] == "cpu":
            yield f"SecondLook / plain CLIP, {place}", *at_most(1.85, ratio(report, LOOK, BARE))
            continue
        if report["batch"] in OVERHEADS:
            yield f"overhead of SecondLook, {place}", *at_most(OVERHEADS[report["batch"]], found[LOOK]["overhead"])
        if PLAIN not in found:
            continue
        if not report["attacked"]:
            yield f"SecondLook / plain CLIP, {place}", *at_most(1.75, ratio(report, LOOK, BARE))
            yield (
                f"images/s of plain ViT-B/16, {place}",
                *at_least(FASTEST["vit-b-16"], found[BARE]["images_per_second"]),
            )
        least = {OURS: 1.7, PLAIN: 4.0} if report["attacked"] else {OURS: 2.3, PLAIN: 7.0}
        for other, limit in least.items():
            yield f"{WORDS[other]} / SecondLook, {place}", *at_least(limit, ratio(report, other, LOOK))
    for pattern, limit in (("clean-traffic*.json", 1.75), ("cpu-clean-traffic*.json", 1.85)):
        for number, traffic in enumerate(_clean_traffic(folder, pattern).values(), 1):
            sets = f"clean, {len(traffic['sets'])} sets, each with its classes"
            place = f"{sets}, {traffic['device']}, batch {traffic['batch']}, run {number}"
            yield f"SecondLook / plain CLIP, {place}", *at_most(limit, traffic["mean"]["ratio"])
    for axis, words in SWEPT.items():
        path = folder / f"gpu-vit-b-16-second-look-{axis}.json"
        if path.is_file():
            report = json.loads(path.read_text(encoding="utf-8"))
            yield f"overhead of SecondLook, {words}", *at_most(FLAT, growth(report, axis, LOOK)[-1][1])
    for report in read_reports(folder):
        if report["machine"] == "gpu" and report["part"] == "table-clean-large":
            speed = contender(report, BARE)["images_per_second"]
            words = f"images/s of plain {MODELS[report['tower']]}, batch {report['batch']}, {where(report)}"
            yield words, *at_least(FASTEST[report["tower"]], speed)
        if report["machine"] == "gpu" and report["part"] in ("sweep-images", "sweep-classes"):
            axis = report["part"].removeprefix("sweep-")
            place = f"{SWEPT[axis]}, {MODELS[report['tower']]}"
            yield f"overhead of ReACT, {place}", *at_most(FLAT, growth(report, axis, OURS)[-1][1])
    services = ("-aarch64", "-x86_64", "-gpu-12", "-gpu-12-128", "-gpu-12-256")
    for path in (folder.parent / f"serve-throughput{part}.json" for part in services):
        if path.is_file():
            report = json.loads(path.read_text(encoding="utf-8"))
            words = f"service / library, time per image, {service_setting(report)}, {report['device']}"
            yield words, *at_most(FLAT, 1 / report["ratio"])


def precision(folder: Path) -> str:
    """Time of towers in fewer bits against fp32, and how often the defence decides and answers alike."""
    path = folder / "tried.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = []
    for idea in found:
        if idea["idea"] not in PRECISIONS:
            continue
        guard = PRECISIONS[idea["idea"]]
        kinds = dict(idea["agreement"])
        # Several precisions in one run: milliseconds and agreement by precision.
        each = kinds if "clean" not in kinds else {idea["idea"]: kinds}
        for name, parts in each.items():
            times = idea.get("milliseconds", {})
            speed = times[name] / times["fp32"] if name in times else idea["ratio"]
            cells = [_agreement(parts.get(kind)) for kind in ("clean", "attacked")]
            device = "CPU" if idea["device"] == "cpu" else idea["device"]
            rows.append([f"{name}, {device}", f"{speed:.2f}", guard, *cells])
    if not rows:
        return ""
    head = ["precision", "time / fp32", "defence", "same decision and answer, clean", "attacked"]
    return "\n".join([*table(head, rows), "", "*`benchmarks/results/bench/tried.json`.*"]) + "\n"


def _agreement(part: Row | None) -> str:
    if part is None:
        return ""
    gate, label = 100 * part["same_gate"], 100 * part["same_label"]
    return f"{gate:.2f} %, {label:.2f} % of {part['photos']:,}"


def compilation(folder: Path) -> str:
    """Times on a GPU with and without ``compile=True``."""
    names = ("gpu-first-call.json", "gpu-vit-b-16-uncompiled.json", "gpu-vit-b-16-second-look-clean.json")
    if not all((folder / name).is_file() for name in names):
        return ""
    first, *both = (json.loads((folder / name).read_text(encoding="utf-8")) for name in names)
    rows = [
        [f"{text}, seconds", *(f"{case[key]:.2f}" for case in first["seconds"])]
        for text, key in (
            ("first defended call, 256 photos", "first_call"),
            ("second call", "second_call"),
            ("twenty batch sizes for the first time", "twenty_sizes"),
            ("the same sizes again", "twenty_sizes_again"),
        )
    ]
    rows += [
        [f"{WORDS[label]}, {text}", *(_digits(contender(report, label)[key]) for report in both)]
        for text, key in (("batch 256, clean, ms per image", "milliseconds"), ("one image alone, ms", "latency_p50"))
        for label in (BARE, LOOK)
    ]
    setting = f"ViT-B/16 and SecondLook, {first['device']}, {first['dtype']}"
    files = ", ".join(f"`{name}`" for name in names)
    note = f"*{setting}. `benchmarks/results/bench`: {files}; each holds the command that made it.*"
    head = ["", "without", "with `compile=True`"]
    return "\n".join([*table(head, rows), "", note]) + "\n"


def figure(name: str, words: str) -> list[str]:
    """A picture that tools/draw_figures.py draws."""
    return ["", f"![{words}](figures/performance/{name}.svg)"]


# ---------------------------------------------------------------------- ReACT


def react(reports: Sequence[Report]) -> str:
    """ReACT beside the bare encoder, all 14 passes and Defend-CLIP, one row per machine, model and traffic."""
    rows, lines = [], []
    for device in DEVICES:
        tables = select(reports, device, *TABLES)
        lines += (
            figure(f"cost-{device}", "Time per image of each contender, in passes of the bare encoder")
            if tables
            else []
        )
        for report in tables:
            item = contender(report, OURS)
            place = f"{MODELS[report['tower']]}, {where(report)}, {report['dtype']}, batch {report['batch']}"
            numbers = [_digits(item["milliseconds"]), f"{item['passes']:.2f}", _overhead(item)]
            numbers += [f"{ratio(report, other, OURS):.2f}" for other in (PLAIN, PUBLISHED)]
            rows.append([place, TABLES[report["part"]].removesuffix(" photos"), *numbers, f"`{report['file']}`"])
    if not rows:
        return ""
    head = ["machine", "photos", "ms", "passes", "overhead", "x as fast as 14 passes", "as Defend-CLIP", "file"]
    note = "*Made by `benchmarks/bench_all.sh`; every file holds its command.*"
    return "\n".join([*table(head, rows), "", note, *lines]) + "\n"


def _overhead(item: Row) -> str:
    if "overhead_range" not in item:
        return f"{item['overhead']:.2f}"
    low, high = item["overhead_range"]
    return f"{item['overhead']:.2f} ({low:.2f} to {high:.2f})"


# ---------------------------------------------------------------------- sweeps


def sweeps(reports: Sequence[Report]) -> str:
    """Figures of ReACT's cost against batch, images, classes and share of attacked images."""
    lines: list[str] = []
    for device in DEVICES:
        if swept := select(reports, device, *(f"sweep-{axis}" for axis in SWEEPS)):
            lines += figure(f"sweeps-{device}", f"Cost of ReACT along four axes on {_machine(swept[0])}")
    return "\n".join([*lines[1:], "", "*`benchmarks/results/bench/*-sweep-*.json`.*"]) + "\n" if lines else ""


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
    return "\n".join([words, *lines, "", *table(head, rows), "", files]) + "\n"


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
        if rule not in RULES:
            continue
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
        if idea["idea"] in PRECISIONS:
            continue
        found.setdefault(idea["idea"], {})[f"{idea['device']}, {idea['dtype']}"] = idea
    devices = sorted({device for measured in found.values() for device in measured})
    words = "Each number is time with the change divided by time without it, of the part that the idea changes."
    lines = [words, ""]
    lines += [f"| idea | {' | '.join(devices)} | kept | why |", "|---|" + "---:|" * len(devices) + "---|---|"]
    for name, measured in found.items():
        idea = next(iter(measured.values()))
        cells = " | ".join(_ratio(measured.get(device)) for device in devices)
        lines.append(f"| {name}: {idea['what']} | {cells} | {'yes' if idea['kept'] else 'no'} | {idea['why']} |")
    lines += ["", "*`benchmarks/results/bench/tried.json`.*"]
    return "\n".join(lines) + "\n"


def _ratio(idea: Row | None) -> str:
    """The ratio; some ideas are about something else than time."""
    return "" if idea is None or idea["ratio"] is None else f"{idea['ratio']:.2f}"


def _machine(report: Report) -> str:
    return f"a CPU with {report['threads']} threads" if report["device"] == "cpu" else f"an {report['device']}"
