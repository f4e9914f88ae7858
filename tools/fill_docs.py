"""Put the numbers of ``benchmarks/results`` into the documents, so that none of them is typed by hand.

    python tools/fill_docs.py          # rewrite README.md and docs/*.md
    python tools/fill_docs.py --check  # fail if a document does not say what the result files say

A document has three kinds of mark; what stands between a mark and ``<!-- end -->`` is replaced:

    <!-- number: FILE.json PATH [FORMAT] -->4,965<!-- end -->             such as: serve.json gpu-12.ratio .2f
    <!-- number: RUN DEFENCE ATTACK [COLUMN [FORMAT]] -->61<!-- end -->   such as: table1 "ReACT (paper)" "pgd-10 4/255"
    <!-- paired: RUN FIRST SECOND ATTACK FIELD [COLUMN] -->9<!-- end -->  FIELD: won, lost, photos, difference, p
    <!-- table: NAME ARGUMENTS -->...<!-- end -->                         on lines of their own

Arguments with spaces stand in quotes; lists are separated by ``|``. The tables:

    run RUN TABLE                    a table of a run: accuracy, accuracy_as_in_the_paper, per_dataset, detection, ...
    scores RUN ...                   joined runs: the paper's score with the strict one in brackets, and passes
    attacks RUN DEFENCES [COLUMN [ATTACKS]]     one row per attack or kind of damage; accuracy, gate_rate, passes, ...
    pairs RUN FIRST SECOND [COLUMN [ATTACKS]]   two defences on the same photos, one row per attack
    harm RUN FIRST SECOND            what the second does to honest photos, one row per set
    suites RUN ...                   photos that each AutoAttack broke with its first attack, later, or not at all
    claims                           the sentences of all documents with a marked number, and its file
    mean RUN DEFENCE COLUMN          mean of a column of images.parquet per data set and budget
    units RUN DEFENCE                gate rate of ReACT with J in nats, in bits, and without J
    parts RUN                        success of each member of a suite of attacks on each defence
    leakage RUN                      highest accuracy of each method with and without leaked answers
    ranking RUN ... [FILE.json ...] [only=TITLES]   the ranking, with files of `react-clip bench`
    informed RUN                     what attackers who know the defences found
    paper TABLE                      values printed in the paper
    rows FILE.json PATH|. [KEY=VALUE ...] COLUMN[:TITLE[:FORMAT]] ...   a list of records, filtered
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import run_tables
from run_tables import ROOT, cell, compared, difference, formatted, load, markdown, means_of, p_of, value_at

MARK = re.compile(r"(<!-- (number|paired|table): ([^\n]+?) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)
CLAIMS = "claims.md"


# ---------------------------------------------------------------------- numbers and claims


def number(file: str, *where: str) -> str:
    """A number of a JSON file, or a mean of a run."""
    if file.endswith(".json"):
        path, form = (*where, "")[:2]
        return formatted(value_at(json.loads((run_tables.RESULTS / file).read_text(encoding="utf-8")), path), form)
    column, form = (*where[2:], *("accuracy", ".1f")[len(where) - 2 :])
    return cell(means_of(file)[where[0], where[1]], column, form)


def paired(run: str, first: str, second: str, title: str, field: str, column: str = "robust") -> str:
    """A number of a paired comparison."""
    one = compared(run, first, second, title, column)
    texts = {"difference": difference, "p": p_of}
    return texts[field](one) if field in texts else str(getattr(one, field))


def claims() -> str:
    """One row per sentence of README and docs with marked numbers, then the command of each run that has one."""
    lines, runs = [], dict[str, str]()
    for path in documents():
        if path.name == CLAIMS:
            continue
        text = re.sub(r"<!-- table: .*?<!-- end -->", "\n\n", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for sentence in re.split(r"\n\s*\n|\n(?=[-*|#] )|(?<=[.:;])\s+(?=[*A-Z])", text):
            marks = list(MARK.finditer(sentence))
            if marks:
                plain = re.sub(r"\s+", " ", MARK.sub(lambda match: evidence(match)[0], sentence)).strip(" -|*")
                shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).replace("**", "").replace(" | ", " · ")
                _, *columns = zip(*map(evidence, marks), strict=True)
                lines.append(
                    [shown, *("; ".join(dict.fromkeys(column)) for column in columns), str(path.relative_to(ROOT))]
                )
                runs |= {run: _command(run) for run in (shlex.split(match[3])[0] for match in marks)}
    table = markdown(["sentence", "95 % interval", "n", "paired", "file", "page"], lines, numbers=False)
    commands = [[f"`{run}`", f"`{command}`"] for run, command in runs.items() if command]
    return f"{table}\n{markdown(['file', 'command'], commands, numbers=False)}\n"


def evidence(match: re.Match[str]) -> tuple[str, str, str, str, str]:
    """Of a mark: the number, its interval, the photos behind it, whether it is paired, and the file."""
    kind, (file, *where) = match[2], shlex.split(match[3])
    if kind == "paired":
        one = compared(file, *where[:3], *where[4:])
        return paired(file, *where), f"{difference(one)}, p {p_of(one)}", f"{one.photos:,}", "yes", f"`{file}`"
    if file.endswith(".json"):
        return number(file, *where), "–", "–", "–", f"`{file}`"
    row, column = means_of(file)[where[0], where[1]], (*where[2:], "accuracy")[0]
    prefix = {"accuracy": "", "paper_accuracy": "paper_"}.get(column)
    bounds = "–" if prefix is None else " to ".join(cell(row, prefix + end) for end in ("low", "high"))
    return number(file, *where), bounds, f"{row.n:,}", "no", f"`{file}`"


def _command(file: str) -> str:
    return "" if file.endswith(".json") else load(file).command.partition("; ")[0]


TABLES: dict[str, Callable[..., str]] = {**run_tables.TABLES, "claims": claims}


# ---------------------------------------------------------------------- documents


def documents() -> list[Path]:
    """README and docs; the page of claims comes last, because it is made of the others."""
    pages = sorted((ROOT / "docs").glob("*.md"), key=lambda path: (path.name == CLAIMS, path.name))
    return [ROOT / "README.md", *pages]


def filled(text: str) -> str:
    """A document with every marked place up to date."""

    def fill(match: re.Match[str]) -> str:
        kind, words = match[2], shlex.split(match[3])
        inline = {"number": number, "paired": paired}
        content = inline[kind](*words) if kind in inline else TABLES[words[0]](*words[1:])
        return f"{match[1]}{content}{match[5]}"

    return MARK.sub(fill, text)


def main() -> int:
    """Rewrite or check the documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    stale = []
    for path in documents():
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
