"""Put the numbers of ``benchmarks/results`` into the documents, so that none of them is typed by hand.

    python tools/fill_docs.py          # rewrite README.md and docs/*.md
    python tools/fill_docs.py --check  # fail if a document does not say what the result files say

A document marks a place with ``<!-- table: RUN NAME -->`` (a table of a run: accuracy, per_dataset, detection, ...),
``<!-- drift: RUN -->`` (mean r per set and budget), ``<!-- paper: TABLE -->`` (the paper's own values),
``<!-- methods: RUN ... -->`` (joined runs with their cost), ``<!-- leakage: RUN -->``,
``<!-- calibration: FILE -->``, ``<!-- look: SECTION -->`` (SecondLook), ``<!-- ranking: RUN ... -->``,
``<!-- standard: SECTION RUN ... -->``, ``<!-- threats: SECTION -->``, ``<!-- fields: SECTION -->`` (of a recipe, from
its schema), ``<!-- memory: SECTION -->`` and ``<!-- speed: SECTION -->`` (of the service),
``<!-- performance: SECTION -->`` or ``<!-- scale: SECTION -->`` (these two are empty while their measurements are not
there); everything up to ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from doc_tables import table
from look_docs import look
from memory_docs import memory
from performance_docs import performance
from recipe_fields import fields
from scale_docs import overhead
from serve_docs import speed
from standard_docs import standard
from threat_docs import threats

from react_clip.config import pop_kind
from react_clip.evaluation import EvaluationResult
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.evaluation.result import merge
from react_clip.report.ranking import rank
from react_clip.report.run import read_run
from react_clip.report.tables import all_tables, caption

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = (
    "table|drift|paper|calibration|methods|leakage|performance|scale|threats|look|ranking|standard|fields|memory|speed"
)
MARK = re.compile(rf"(<!-- ({KINDS}): ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def run_table(run: str, name: str) -> str:
    """A table of a finished run, its caption below it and the file it came from."""
    result = EvaluationResult.load(RESULTS / run / "result.json")
    found = next(item for item in all_tables(result) if item.name == name)
    caption, _, body = found.markdown().partition("\n\n")
    device = f"{result.device}, towers in {result.dtype}"
    return f"{body}\n*{caption} {device}; `benchmarks/results/{run}/result.json`, made by `{result.command}`.*\n"


def ranking_table(*runs: str) -> str:
    """The ranking of the defences of several runs."""
    timings = [run for run in runs if run.endswith(".json")]
    folders = [run for run in runs if run not in timings]
    ranking = rank([RESULTS / run for run in folders], [RESULTS / run for run in timings])
    caption, _, body = ranking.table.markdown().partition("\n\n")
    words = [*folders, *(["--timings"] if timings else []), *timings]
    command = " ".join(
        ["react-clip rank", *(word if word[0] == "-" else f"benchmarks/results/{word}" for word in words)]
    )
    return f"{body}\n*{caption} Made by `{command}`.*\n"


def paper_table(name: str) -> str:
    """Values printed in the paper."""
    values = dict(json.loads((ROOT / "benchmarks" / "paper.json").read_text(encoding="utf-8"))[name])
    columns = [column if column == "clean" else f"{column}/255" for column in values.pop("columns")]
    rows = [[row, *(f"{value:.1f}" for value in numbers)] for row, numbers in values.items()]
    return "\n".join(table(["the paper, ViT-B/32", *columns], rows)) + "\n"


def calibration_table(file: str) -> str:
    """The points of a calibration, and the mapping and threshold that follow from them."""
    data = json.loads((ROOT / file).read_text(encoding="utf-8"))
    rows = []
    for point in data["points"]:
        best = 100 * point["accuracy"][f"{point['best_sigma']:g}"]
        rows.append(
            [format_eps(point["eps"]), f"{point['mean_drift']:.2f}", f"{point['best_sigma']:.2f}", f"{best:.1f}"]
        )
    mapping, tau, source = data["config"]["mapping"], data["config"]["tau"], data["provenance"]
    lines = table(["budget", "mean r", "best sigma", "accuracy there"], rows)
    lines += ["", f"sigma = {mapping['a']:.4f} + {mapping['b']:.4f} r, tau = {tau:.4f}."]
    lines += ["", f"*{source['device']}, {source['dtype']}; `{file}`, made by `{source['command']}`.*"]
    return "\n".join(lines) + "\n"


def drift_table(run: str) -> str:
    """Mean drift of the images that undefended CLIP gets right, clean and attacked, per set."""
    images = read_run(RESULTS / run).images
    assert images is not None
    measured = images[images["r"].notna() & (images["label"] == images["clean_prediction"])]
    measured = measured[measured["attacked"] | (measured["eps"] == 0)]
    first = measured[measured["defense"] == measured["defense"].iloc[0]]
    means = first.pivot_table(index="dataset", columns="eps", values="r", sort=False).sort_index(axis="columns")
    titles = ["clean" if eps == 0 else format_eps(eps) for eps in means.columns]
    rows = [[str(name), *(f"{mean:.2f}" for mean in values)] for name, *values in means.itertuples()]
    note = f"*Images that undefended CLIP gets right; `benchmarks/results/{run}/per_image.parquet`.*"
    return "\n".join([*table(["mean r", *titles], rows), "", note]) + "\n"


def methods_table(*runs: str) -> str:
    """Every method of several runs over the same photos: accuracy, encoder passes, and milliseconds measured apart."""
    result = merge([EvaluationResult.load(RESULTS / run / "result.json") for run in runs])
    times = {state: _milliseconds(f"bench/rivals-{state}.json") for state in ("clean", "attacked")}
    kinds = {item["label"]: item for item in result.recipe["defenses"]}
    budgets = sorted({row.eps for row in result.rows})
    titles = ["clean" if eps == 0 else format_eps(eps) for eps in budgets]
    head = ["method", *titles, "passes", "backward", "ms clean", "ms attacked"]
    lines = []
    for label, config in kinds.items():
        rows = {row.eps: row for row in result.select(dataset=MEAN, defense=label)}
        clean, attacked = rows[0.0], rows[4 / 255] if 4 / 255 in rows else rows[max(rows)]
        cells = [f"{100 * row.accuracy:.1f} ± {50 * (row.high - row.low):.1f}" for _, row in sorted(rows.items())]
        cells += [f"{clean.passes:.1f} / {attacked.passes:.1f}"]
        cells += [f"{clean.backward_passes:.1f} / {attacked.backward_passes:.1f}"]
        # The benchmark times every kind with its default constants, which the calibrated one has not.
        timed = "" if "calibrated" in label else str(pop_kind(dict(config)))
        cells += [f"{times[state][timed]:.2f}" if timed else "–" for state in ("clean", "attacked")]
        lines.append([label, *cells])
    note = (
        f"{caption(result, 'accuracy in %, mean over sets')} Passes: clean images / images attacked with 4/255. "
        "Milliseconds per image at batch 256 in bf16 on 256 clean or attacked photos, all methods in turns in one run: "
        "`benchmarks/results/bench/rivals-clean.json` and `rivals-attacked.json`. Accuracies: "
        + ", ".join(f"`benchmarks/results/{run}`" for run in runs)
    )
    return "\n".join(table(head, lines)) + f"\n\n*{note}.*\n"


def _milliseconds(file: str) -> dict[str, float]:
    contenders = json.loads((RESULTS / file).read_text(encoding="utf-8"))["contenders"]
    return {item["label"]: item["milliseconds"] for item in contenders}


def leakage_table(run: str) -> str:
    """The highest accuracy of each method with leaked answers counted, and the same without them."""
    whole = read_run(RESULTS / run)
    assert whole.result is not None
    assert whole.images is not None
    result, images = whole.result, whole.images
    clean = images[(images["attack"] == "clean") & (images["defense"] == "CLIP")]
    wrong_clean = clean[clean["clean_prediction"] != clean["label"]]
    budgets = sorted({row.eps for row in result.rows if row.eps})
    rows = []
    for method in ("AOM", "Defend-CLIP"):
        names = [item["label"] for item in result.recipe["defenses"] if item["family"] == method]
        cells, honest, configs = [], [], []
        for eps in budgets:
            best = max(
                (row for name in names for row in result.select(dataset=MEAN, eps=eps, defense=name)),
                key=lambda row: row.accuracy,
            )
            parts = [row for row in result.select(eps=eps, defense=best.defense) if row.dataset != MEAN]
            kept = sum(row.accuracy - row.leakage_share for row in parts) / len(parts)
            cells.append(f"{100 * best.accuracy:.1f}")
            honest.append(f"{100 * kept:.1f}")
            configs.append(best.defense.removeprefix(f"{method} ") + f" ({best.leakage:.0f} leaked)")
        rows += [
            [f"{method}, as reported", *cells],
            [f"{method}, leaked answers not counted", *honest],
            ["at", *configs],
        ]
    lines = table(["largest reported accuracy", *map(format_eps, budgets)], rows)
    ceiling = 100 * result.select(dataset=MEAN, attack="clean", defense="CLIP")[0].accuracy
    total = sum(info.images for info in result.sets)
    lines += ["", f"Clean accuracy of undefended CLIP: {ceiling:.1f} %. It gets {len(wrong_clean)} of {total:,} wrong."]
    lines += [
        "",
        f"*{caption(result, 'accuracy in %, mean over sets')} `benchmarks/results/{run}`, made by `{result.command}`.*",
    ]
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A document with every marked place up to date."""

    def fill(match: re.Match[str]) -> str:
        kind, arguments = match[2], match[3].split()
        makers: dict[str, Callable[..., str]] = {
            "table": run_table,
            "drift": drift_table,
            "paper": paper_table,
            "calibration": calibration_table,
            "methods": methods_table,
            "leakage": leakage_table,
            "performance": lambda section: performance(section, RESULTS / "bench"),
            "scale": lambda _: overhead(RESULTS),
            "threats": lambda section: threats(section, RESULTS),
            "look": lambda section: look(section, RESULTS),
            "ranking": ranking_table,
            "standard": partial(standard, RESULTS),
            "fields": fields,
            "memory": lambda _: memory(RESULTS),
            "speed": lambda _: speed(RESULTS),
        }
        make = makers[kind]
        return f"{match[1]}{make(*arguments)}{match[4]}"

    return MARK.sub(fill, text)


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description="Put the numbers of benchmarks/results into the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = path.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'updated'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
