"""Tables of the documents, from the runs and files of ``benchmarks/results``; see :mod:`fill_docs` for their names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from react_clip.evaluation.numbers import Row, attacks_of
from react_clip.evaluation.recipe import format_eps, title_of
from react_clip.evaluation.results import EvaluationResult, join
from react_clip.intervals import interval
from react_clip.report.compare import Pair, pair
from react_clip.report.ranking import ALL, informed_table, rank
from react_clip.report.tables import all_tables, caption, over

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PERCENT = ("accuracy", "paper_accuracy", "gate_rate", "leakage_fraction", "worst")
_PERCENT += ("low", "high", "paper_low", "paper_high")


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
    for defense in result.defenses:
        rows = [found for at in attacks for found in result.means if is_at(found, at) and found.defense == defense]
        cells = [_paper_cell(row) for row in rows]
        passes = [f"{rows[0].passes:.1f} / {rows[-1].passes:.1f}"]
        passes += [f"{rows[0].backward_passes:.1f} / {rows[-1].backward_passes:.1f}"]
        lines.append([defense, *cells, *passes])
    words = "accuracy in %, scored as in the paper, with 95 % intervals, and the strict score in round brackets, "
    words += f"{over(result)}; passes clean / under the last attack"
    return with_source(markdown(header, lines), caption(result, words), ", ".join(runs), result)


def _paper_cell(row: Row) -> str:
    text = interval(100 * row.paper_accuracy, 100 * row.paper_low, 100 * row.paper_high)
    return text if row.eps == 0 else f"{text} ({100 * row.accuracy:.1f})"


def attacks(run: str, defenses: str, column: str = "accuracy", only: str = "") -> str:
    """Means over data sets, one row per attack or kind of damage, all or ``only`` some; one column per defence."""
    result, labels = load(run), defenses.split("|")
    cells = {(row.attack, row.eps, row.defense): cell(row, column) for row in result.means}
    titles = dict.fromkeys(key[:2] for key in cells)
    lines = [[title_of(*title), *(cells.get((*title, label), "–") for label in labels)] for title in titles]
    lines = [line for line in lines if not only or line[0] in only.split("|")]
    words = f"{column.replace('_', ' ')}{' in %' if column in _PERCENT else ''}, {over(result)}"
    return with_source(markdown(["photos", *labels], lines), caption(result, words), run, result)


def pairs(run: str, first: str, second: str, column: str = "robust", only: str = "") -> str:
    """Two defences on the same photos, one row per attack."""
    result, lines = load(run), []
    for title in only.split("|") if only else dict.fromkeys(title_of(row.attack, row.eps) for row in result.means):
        one = compared(run, first, second, title, column)
        counts = [f"{one.photos:,}", *(f"{100 * value:.1f}" for value in (one.first, one.second))]
        lines.append([title, *counts, difference(one), f"{one.lost}", f"{one.won}", p_of(one)])
    words = f"{second} beside {first} on the same photos: accuracy in %{' as the paper scores' * (column == 'correct')}"
    words += (
        "; the difference has a bootstrap interval, p is McNemar's exact test of the photos that only one gets right"
    )
    header = ["photos", "n", first, second, "difference", f"only {first}", f"only {second}", "p"]
    return with_source(markdown(header, lines), caption(result, words), run, result)


def harm(run: str, first: str, second: str) -> str:
    """Two defences on honest photos, one row per data set: accuracy, changed answers, right ones that become wrong."""
    result, lines = load(run), []
    for name, images in result.images.groupby("dataset", observed=True):
        photo = ["attack", "eps", "index"]
        right = images.pivot(index=photo, columns="defense", values="correct")[[first, second]].astype(float)
        answers = images.pivot(index=photo, columns="defense", values="prediction").loc["clean"]
        clean, means = right.loc["clean"], right.groupby(["attack", "eps"], observed=True).mean()
        difference = (means[second] - means[first]).drop("clean")
        lost = ((clean[first] - clean[second]) > 0).sum() / clean[first].sum()
        shares = (*clean.mean(), (answers[first] != answers[second]).mean(), lost)
        worst = f"{100 * difference.min():+.1f} ({title_of(*difference.idxmin())})"
        lines.append([str(name), f"{len(clean):,}", *(f"{100 * each:.1f}" for each in shares), worst])
    header = ["data set", "photos", first, second, "answers changed", "right become wrong", "worst damage"]
    words = "clean accuracy, changed answers, right answers that become wrong in %; accuracy lost to damage in points"
    return with_source(markdown(header, lines), caption(result, words), run, result)


def difference(one: Pair) -> str:
    """The difference with its interval, in points."""
    value, low, high = (100 * bound for bound in one.difference)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def p_of(one: Pair) -> str:
    """The p-value."""
    return "< 0.0001" if one.p < 1e-4 else f"{one.p:.2g}"


def suites(*runs: str) -> str:
    """How many photos each AutoAttack broke with its first attack alone, with later ones, or not at all."""
    lines = []
    for run in runs:
        images = load(run).images
        images = images[images["attack"].astype(str).str.startswith("autoattack") & images["attacked"]]
        images = images.drop_duplicates(["dataset", "attack", "eps", "index"])
        for (attack, eps), each in images.groupby(["attack", "eps"], observed=True):
            first = each["attack_success"] & (each["queries"] <= FIRST_ATTACK)
            later = each["attack_success"] & ~first
            counts = (len(each), first.sum(), later.sum(), (~each["attack_success"]).sum())
            lines.append([f"{title_of(attack, eps)} (`{run}`)", *map(str, counts)])
    header = ["on plain CLIP", "photos attacked", "broken by APGD-CE alone", "by a later attack", "not broken"]
    return f"{markdown(header, lines)}\n*`benchmarks/results`: {', '.join(runs)}.*\n"


FIRST_ATTACK = 110
"""Most queries per photo if the suite ended after its first attack: APGD's 100 steps and a few answers."""


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


def units(run: str, defense: str) -> str:
    """How often ReACT's gate opens if J is taken in nats, in bits, or not at all."""
    result = load(run)
    tau = result.defenses[defense]["tau"]
    images = result.images[
        (result.images["defense"] == defense) & (result.images["label"] == result.images["clean_prediction"])
    ]
    images = images[images["attacked"] | (images["attack"] == "clean")]
    j = images["instability"].fillna(0.0)
    scores = {
        "r + J, nats": images["drift"] + j,
        "r + J, bits": images["drift"] + j / math.log(2),
        "r": images["drift"],
    }
    opens = pd.DataFrame({name: 100.0 * (score >= tau) for name, score in scores.items()})
    rates = opens.groupby([images["eps"], images["dataset"]], observed=True).mean().groupby("eps").mean()
    lines = [
        ["clean" if eps == 0 else format_eps(eps), *(f"{rate:.1f}" for rate in row)] for eps, *row in rates.itertuples()
    ]
    words = f"gate of {defense} open, in % of what undefended CLIP gets right, {over(result)}"
    return with_source(markdown(["photos", *scores], lines), caption(result, words), run, result)


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
    families = {label: str(entry["family"]) for label, entry in result.defenses.items() if entry.get("params")}
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
    names = {entry["label"]: label_of(entry) for entry in EvaluationResult.load(folders[0]).recipe["defenses"]}
    lines = [[names.get(line[0], line[0]), *(line[place] for place in chosen[1:])] for line in table.texts]
    command = ["react-clip rank", *(f"benchmarks/results/{folder.name}" for folder in folders)]
    command += (
        ["--timings", *(f"benchmarks/results/{path.relative_to(RESULTS)}" for path in timings)] if timings else []
    )
    head = [table.header[place] for place in chosen]
    return f"{markdown(head, lines)}\n*{table.caption} Made by `{' '.join(command)}`.*\n"


def informed(run: str) -> str:
    """What attackers who know the defences found, by defence and budget."""
    result = load(run)
    table = informed_table(result, result.images)
    return with_source(markdown(table.header, table.texts), table.caption, run, result)


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


TABLES = {
    **{"run": run_table, "scores": scores, "attacks": attacks, "mean": mean, "parts": parts},
    **{"leakage": leakage, "ranking": ranking, "informed": informed, "paper": paper, "rows": rows},
    **{"units": units, "pairs": pairs, "harm": harm, "suites": suites},
}


# ---------------------------------------------------------------------- parts of tables


@cache
def load(run: str) -> EvaluationResult:
    """A finished run of the repository; SecondLook is called by its older rule if that is what ran."""
    result = EvaluationResult.load(RESULTS / run)
    entries = [{**entry, "label": label_of(entry)} for entry in result.recipe["defenses"]]
    images = result.images.astype({"defense": str})
    images["defense"] = images["defense"].replace(
        {entry["label"]: label_of(entry) for entry in result.recipe["defenses"]}
    )
    return dataclasses.replace(result, recipe={**result.recipe, "defenses": entries}, images=images)


@cache
def means_of(run: str) -> dict[tuple[str, str], Row]:
    """The means over data sets of a run by defence and title of the attack."""
    return {(row.defense, title_of(row.attack, row.eps)): row for row in load(run).means}


@cache
def compared(run: str, first: str, second: str, title: str, column: str = "robust") -> Pair:
    """Two defences of a run on the same photos, under one attack or in the worst case over all.

    The column is ``robust`` (right clean and attacked) or ``correct`` (the paper's score).
    """
    images = load(run).images
    images = images[images["defense"].isin([first, second])].astype({column: float})
    titles = {at: title_of(*at) for at in attacks_of(images)}
    chosen = [at for at, name in titles.items() if name == title or (title == ALL and at[1])]
    images = images[pd.MultiIndex.from_frame(images[["attack", "eps"]]).isin(chosen)]
    if set(images["defense"]) != {first, second}:
        raise ValueError(f"the run has no answers of {first!r} and {second!r} under {title!r}")
    photo = ["dataset", "index", "defense"]
    draws = images.groupby([*photo, "attack", "eps"], observed=True)[column].mean()
    right = draws.groupby(photo, observed=True).min().unstack("defense")
    return pair(right[[first, second]].dropna())


def label_of(entry: dict[str, Any]) -> str:
    """The label of a defence; that of SecondLook says so where its configuration is of the older rule."""
    older = entry["kind"] == "second_look" and entry.keys() & {"look", "moved_look", "moved_copy_size", "blend"}
    return f"{entry['label']} (older rule)" if older else str(entry["label"])


def is_at(row: Row, other: Row) -> bool:
    """Whether two rows are about the same attack."""
    return (row.attack, row.eps) == (other.attack, other.eps)


def cell(row: Row, column: str, form: str = ".1f") -> str:
    """A number of a row; fractions in per cent."""
    return format((100 if column in _PERCENT else 1) * getattr(row, column), form)


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


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; its first column is text, the others are numbers."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    escaped = ([text.replace("|", "\\|") for text in line] for line in (header, rule, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def with_source(table: str, words: str, runs: str, result: EvaluationResult) -> str:
    """A table with its caption, device, folders and command."""
    return f"{table}\n*{words} {result.device}; `benchmarks/results`: {runs}; made by `{result.command}`.*\n"
