"""Put the numbers of ``benchmarks/results`` into the documents, so that none of them is typed by hand.

    python tools/fill_docs.py          # rewrite README.md and docs/*.md
    python tools/fill_docs.py --check  # fail if a document does not say what the result files say

A document has two kinds of mark; what stands between a mark and ``<!-- end -->`` is replaced:

    <!-- number: FILE.json PATH [FORMAT] -->4,965<!-- end -->        such as: serve.json gpu-12.ratio .2f
    <!-- number: RUN DEFENCE ATTACK [COLUMN] -->61.0<!-- end -->     such as: table1 "ReACT (paper)" "pgd-10 4/255"
    <!-- table: NAME ARGUMENTS -->...<!-- end -->                    on lines of their own

Arguments with spaces stand in quotes; lists are separated by ``|``. The tables:

    run RUN TABLE                    a table of a run: accuracy, accuracy_as_in_the_paper, per_dataset, detection, ...
    scores RUN ...                   joined runs: the paper's score with the strict one in brackets, and passes
    attacks RUN DEFENCES [COLUMN]    one row per attack or kind of damage; accuracy, gate_rate, passes, ... in columns
    sets RUN ATTACKS DEFENCES        accuracy on each data set, defences side by side
    mean RUN DEFENCE COLUMN          mean of a column of images.parquet per data set and budget
    parts RUN                        success of each member of a suite of attacks on each defence
    leakage RUN                      highest accuracy of each method with and without leaked answers
    ranking RUN ... [FILE.json ...] [only=TITLES]   the ranking, with files of `react-clip bench`
    paper TABLE                      values printed in the paper
    rows FILE.json PATH|. [KEY=VALUE ...] COLUMN[:TITLE[:FORMAT]] ...   a list of records, filtered
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from react_clip.evaluation.numbers import Row
from react_clip.evaluation.recipe import format_eps, title_of
from react_clip.evaluation.results import EvaluationResult, join
from react_clip.report.ranking import rank
from react_clip.report.tables import all_tables, caption, defenses_of, over

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- (number|table): ([^\n]+?) -->\n?).*?(<!-- end -->)", re.DOTALL)
_PERCENT = ("accuracy", "paper_accuracy", "gate_rate", "worst", "low", "high")


# ---------------------------------------------------------------------- tables


def run_table(run: str, name: str) -> str:
    """A table of a finished run."""
    result = load(run)
    found = {table.name: table for table in all_tables(result)}[name]
    return with_source(markdown(found.header, found.texts), found.caption, run, result)


def scores(*runs: str) -> str:
    """Accuracy as in the paper with the strict one in brackets, the half interval, and passes clean and attacked."""
    result = join([load(run) for run in runs])
    attacks = [row for row in result.means if row.defense == result.means[0].defense]
    header = ["method", *(title_of(row.attack, row.eps) for row in attacks), "passes", "backward passes"]
    lines = []
    for defense in defenses_of(result):
        rows = [found for at in attacks for found in result.means if is_at(found, at) and found.defense == defense]
        cells = [_paper_cell(row) for row in rows]
        passes = [f"{rows[0].passes:.1f} / {rows[-1].passes:.1f}"]
        passes += [f"{rows[0].backward_passes:.1f} / {rows[-1].backward_passes:.1f}"]
        lines.append([defense, *cells, *passes])
    words = "accuracy in %, scored as in the paper, ± half of a 95 % interval, and the strict score in brackets, "
    words += f"{over(result)}; passes clean / under the last attack"
    return with_source(markdown(header, lines), caption(result, words), ", ".join(runs), result)


def _paper_cell(row: Row) -> str:
    text = f"{100 * row.paper_accuracy:.1f} ± {50 * (row.paper_high - row.paper_low):.1f}"
    return text if row.eps == 0 else f"{text} ({100 * row.accuracy:.1f})"


def attacks(run: str, defenses: str, column: str = "accuracy") -> str:
    """Means over data sets, one row per attack or kind of damage, one column per defence."""
    result, labels = load(run), defenses.split("|")
    cells = {(row.attack, row.eps, row.defense): cell(row, column) for row in result.means}
    titles = dict.fromkeys(key[:2] for key in cells)
    lines = [[title_of(*title), *(cells.get((*title, label), "–") for label in labels)] for title in titles]
    words = f"{column.replace('_', ' ')}{' in %' if column in _PERCENT else ''}, {over(result)}"
    return with_source(markdown(["photos", *labels], lines), caption(result, words), run, result)


def sets(run: str, attacks: str, defenses: str) -> str:
    """Accuracy on each data set; every cell has the defences in their order."""
    result, titles, labels = load(run), attacks.split("|"), defenses.split("|")
    cells = {(row.dataset, title_of(row.attack, row.eps), row.defense): cell(row, "accuracy") for row in result.rows}
    lines = [
        [info.name, *(" → ".join(cells[info.name, title, label] for label in labels) for title in titles)]
        for info in result.sets
    ]
    header = [" → ".join(labels), *titles]
    return with_source(markdown(header, lines), caption(result, "accuracy in % on each data set"), run, result)


def mean(run: str, defense: str, column: str) -> str:
    """Mean of a measured column on the images that undefended CLIP gets right, per data set and budget."""
    result = load(run)
    images = result.images[(result.images["defense"] == defense) & result.images[column].notna()]
    images = images[images["label"] == images["clean_prediction"]]
    images = images[images["attacked"] | (images["attack"] == "clean")]
    means = images.pivot_table(index="dataset", columns="eps", values=column, observed=True)
    lines = [[str(name), *(f"{value:.2f}" for value in values)] for name, *values in means.itertuples()]
    words = caption(result, f"mean {column} of {defense} on images that undefended CLIP gets right")
    header = ["data set", *("clean" if eps == 0 else format_eps(eps) for eps in means.columns)]
    return with_source(markdown(header, lines), words, run, result)


def parts(run: str) -> str:
    """Success in % of each member of a suite on each defence and at each budget, over all photos that it met."""
    result = load(run)
    met: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in result.attacks:
        if row.part and row.attacked:
            column = f"{row.defense}, {format_eps(row.eps)}"
            met.setdefault((row.part, column), []).append((row.attacked, row.success_rate))
    columns = list(dict.fromkeys(column for _, column in met))
    members = dict.fromkeys(part for part, _ in met)
    lines = [[f"`{part}`", *(_success(met.get((part, column))) for column in columns)] for part in members]
    words = caption(result, "part of the judging draws that are wrong, in %")
    return with_source(markdown(["attack", *columns], lines), words, run, result)


def _success(found: list[tuple[int, float]] | None) -> str:
    if not found:
        return "–"
    return f"{100 * sum(count * share for count, share in found) / sum(count for count, _ in found):.0f}"


def leakage(run: str) -> str:
    """The highest accuracy of each method with leaked answers counted, and the same without them."""
    result = load(run)
    families = {label: str(entry["family"]) for label, entry in defenses_of(result).items() if entry.get("params")}
    budgets = sorted({row.eps for row in result.means if row.eps})
    lines = []
    for family in dict.fromkeys(families.values()):
        rows = [row for row in result.means if families.get(row.defense) == family]
        best = [max((row for row in rows if row.eps == eps), key=lambda row: row.paper_accuracy) for eps in budgets]
        kept = [row.paper_accuracy - row.leakage_fraction for row in best]
        lines += [
            [f"{family}, as reported", *(cell(row, "paper_accuracy") for row in best)],
            [f"{family}, leaked answers not counted", *(f"{100 * value:.1f}" for value in kept)],
            ["at", *(f"{row.defense.removeprefix(family).strip()} ({row.leakage:.0f} leaked)" for row in best)],
        ]
    words = caption(result, f"largest reported accuracy in %, {over(result)}")
    return with_source(markdown(["method", *map(format_eps, budgets)], lines), words, run, result)


def ranking(*words: str) -> str:
    """The ranking of the defences of several runs, or some of its columns."""
    only = next((word.removeprefix("only=").split("|") for word in words if word.startswith("only=")), None)
    files = [word for word in words if not word.startswith("only=")]
    folders = [RESULTS / word for word in files if not word.endswith(".json")]
    timings = [RESULTS / word for word in files if word.endswith(".json")]
    table = rank(folders, timings).table
    chosen = [place for place, title in enumerate(table.header) if only is None or not place or title in only]
    lines = [[line[place] for place in chosen] for line in table.texts]
    command = ["react-clip rank", *(f"benchmarks/results/{folder.name}" for folder in folders)]
    command += (
        ["--timings", *(f"benchmarks/results/{path.relative_to(RESULTS)}" for path in timings)] if timings else []
    )
    head = [table.header[place] for place in chosen]
    return f"{markdown(head, lines)}\n*{table.caption} Made by `{' '.join(command)}`.*\n"


def paper(name: str) -> str:
    """Values printed in the paper."""
    values = json.loads((ROOT / "benchmarks" / "paper.json").read_text(encoding="utf-8"))[name]
    titles = [column if column == "clean" else f"{column}/255" for column in values.pop("columns")]
    lines = [[method, *(f"{value:.1f}" for value in numbers)] for method, numbers in values.items()]
    return markdown(["the paper, ViT-B/32", *titles], lines)


def rows(file: str, path: str, *words: str) -> str:
    """A list of records of a JSON file, filtered by KEY=VALUE; columns are COLUMN:TITLE:FORMAT."""
    data = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    records = data if path == "." else value_at(data, path)
    if isinstance(records, dict):
        records = [{"name": name, **record} for name, record in records.items()]
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            records = [record for record in records if str(record.get(key)) in value.split("|")]
    columns = [[*word.split(":"), "", ""][:3] for word in words if "=" not in word]
    lines = [[formatted(value_at(record, name, None), form) for name, _, form in columns] for record in records]
    return f"{markdown([title or name for name, title, _ in columns], lines)}\n*`benchmarks/results/{file}`.*\n"


TABLES: dict[str, Callable[..., str]] = {
    **{"run": run_table, "scores": scores, "attacks": attacks, "sets": sets, "mean": mean, "parts": parts},
    **{"leakage": leakage, "ranking": ranking, "paper": paper, "rows": rows},
}


# ---------------------------------------------------------------------- parts of tables


@cache
def load(run: str) -> EvaluationResult:
    """A finished run of the repository."""
    return EvaluationResult.load(RESULTS / run)


def is_at(row: Row, other: Row) -> bool:
    """Whether two rows are about the same attack."""
    return (row.attack, row.eps) == (other.attack, other.eps)


def cell(row: Row, column: str) -> str:
    """A number of a row; fractions in per cent."""
    return f"{(100 if column in _PERCENT else 1) * getattr(row, column):.1f}"


def value_at(values: Any, path: str, *default: Any) -> Any:
    """The value at a path such as ``gpu.rows.0.ms``."""
    for key in path.split("."):
        try:
            values = values[int(key)] if isinstance(values, list) else values[key]
        except (KeyError, IndexError):
            if default:
                return default[0]
            raise
    return values


def formatted(value: Any, form: str) -> str:
    """A value in a format of Python; a dash where there is none."""
    if value is None:
        return "–"
    return format(value, form or (".3g" if isinstance(value, float) else ""))


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; its first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    escaped = ([text.replace("|", "\\|") for text in line] for line in (header, rule, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def with_source(table: str, words: str, runs: str, result: EvaluationResult) -> str:
    """A table with its caption, device, folders and command."""
    return f"{table}\n*{words} {result.device}; `benchmarks/results`: {runs}; made by `{result.command}`.*\n"


def number(file: str, *where: str) -> str:
    """A number of a JSON file, or a mean of a run."""
    if file.endswith(".json"):
        path, form = (*where, "")[:2]
        return formatted(value_at(json.loads((RESULTS / file).read_text(encoding="utf-8")), path), form)
    defense, attack, column = (*where, "accuracy")[:3]
    [row] = [row for row in load(file).means if (row.defense, title_of(row.attack, row.eps)) == (defense, attack)]
    return cell(row, column)


# ---------------------------------------------------------------------- documents


def filled(text: str) -> str:
    """A document with every marked place up to date."""

    def fill(match: re.Match[str]) -> str:
        kind, words = match[2], shlex.split(match[3])
        content = number(*words) if kind == "number" else TABLES[words[0]](*words[1:])
        return f"{match[1]}{content}{match[4]}"

    return MARK.sub(fill, text)


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = path.read_text(encoding="utf-8")
        try:
            after = filled(before)
        except (KeyError, ValueError, TypeError, OSError) as error:
            sys.exit(f"{path.relative_to(ROOT)}: a mark cannot be filled ({type(error).__name__}: {error})")
        if after != before:
            stale.append(path)
            if not check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'updated'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
