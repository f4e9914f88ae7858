"""Sections of docs/threat-model.md: what is left of each defence, by what the attacker knows, and which attacks do it.

Runs are ``benchmarks/results/adaptive-*``, over the same photos, and ``transfer``, over more. The first member of a
suite is PGD on undefended CLIP, an attacker who does not know the defence.
"""

from __future__ import annotations

from pathlib import Path

from doc_tables import table

from react_clip.evaluation import EvaluationResult, metrics
from react_clip.evaluation.recipe import MEAN, format_eps
from react_clip.report.run import read_run

_WHOLE = "SecondLook ReACT AOM TTC CLIPure-Cos CSR ET3 AGC Defend-CLIP TTE DOC Anti-Adv"
_COSTLY = "HD MAC DBD"
"""Defences that were attacked by the whole suite, and by two members of it."""
SUITES = tuple(f"adaptive-{name}" for name in f"{_WHOLE} {_COSTLY}".split())
TRANSFER, MEMBERS, QUERIES = "transfer", "adaptive-members", "adaptive-queries"
OBLIVIOUS = "adaptive-transfer"
ATTACKERS = ("does not know it", "knows it", "has another tower")


def threats(name: str, folder: Path) -> str:
    """One section: who, members, convergence."""
    return {"who": who, "members": members, "convergence": convergence}[name](folder)


def who(folder: Path) -> str:
    """Accuracy by defence, attacker and budget."""
    suites, transfer = [_load(folder, run) for run in SUITES], _load(folder, TRANSFER)
    first, budgets = suites[0], sorted({row.eps for row in suites[0].rows if row.eps})
    head = ["defence", "clean", *(f"{attacker}: {format_eps(eps)}" for attacker in ATTACKERS for eps in budgets)]
    rows = []
    for run, result in zip(SUITES, suites, strict=True):
        label = result.rows[0].defense
        rows.append(
            [
                label,
                _accuracy(result, label, 0.0),
                *(_oblivious(folder / run, result, eps) for eps in budgets),
                *(_accuracy(result, label, eps) for eps in budgets),
                *(_accuracy(transfer, label, eps) for eps in budgets),
            ]
        )
    runs = ", ".join(f"`benchmarks/results/{run}`" for run in (*SUITES, TRANSFER))
    caption = (
        f"*Accuracy in %, mean over {_photos(first)}, of the last three columns over {_photos(transfer)}; "
        f"{first.model}, {first.dtype}, {first.device}; leakage-free scoring; mean over ten draws of a defence's "
        f"noise; ± is half of a 95 % interval. {', '.join(_COSTLY.split())}: two members of the suite. {runs}; the "
        f"first made by `{first.command}`, the last two by `{suites[-1].command}` and by `{transfer.command}`.*"
    )
    lines = [*table(head, rows), "", caption]
    return "\n".join(lines) + "\n"


def _photos(result: EvaluationResult) -> str:
    photos = sum(info.images for info in result.sets)
    sets = f"{len(result.sets)} sets" if len(result.sets) > 1 else "one set"
    return f"{sets} ({', '.join(info.name for info in result.sets)}; {photos} photos)"


def _accuracy(result: EvaluationResult, defense: str, eps: float) -> str:
    """Accuracy and interval of the mean over sets; a dash for a defence that is not in the run."""
    rows = [row for row in result.rows if row.defense == defense and row.dataset != MEAN and row.eps == eps]
    return _with_interval([row.accuracy for row in rows], [row.n for row in rows]) if rows else "–"


def _with_interval(accuracies: list[float], sizes: list[int]) -> str:
    estimate = metrics.mean_over_sets(accuracies, sizes)
    return f"{100 * estimate.value:.1f} ± {50 * (estimate.high - estimate.low):.1f}"


def _oblivious(run: Path, result: EvaluationResult, eps: float) -> str:
    """Accuracy under the suite's first member, which met every image that is attacked."""
    images = read_run(run).images
    assert images is not None
    clean = images[images["eps"] == 0.0]
    spared = clean[clean["label"] != clean["clean_prediction"]].groupby("dataset")["correct"].sum() / result.draws
    parts = [part for part in result.attacks if part.eps == eps and part.part.startswith(OBLIVIOUS)]
    sizes = {info.name: info.images for info in result.sets}
    right = [spared.get(part.dataset, 0.0) + part.attacked * (1.0 - part.success_rate) for part in parts]
    left = [count / sizes[part.dataset] for count, part in zip(right, parts, strict=True)]
    return _with_interval(left, [sizes[part.dataset] for part in parts])


def members(folder: Path) -> str:
    """Success of each attack of a suite, all on the same images."""
    result, queries = _load(folder, MEMBERS), _load(folder, QUERIES)
    (eps,), (larger,) = ({row.eps for row in run.rows if row.eps} for run in (result, queries))
    defenses = list(dict.fromkeys(row.defense for row in result.rows))
    head = ["attack", *(f"{defense}, {format_eps(eps)}" for defense in defenses)]
    head += [f"{defense}, {format_eps(larger)}" for defense in dict.fromkeys(row.defense for row in queries.rows)]
    parts = list(dict.fromkeys(row.part for run in (result, queries) for row in run.attacks if row.part))
    rows = []
    for part in parts:
        first = [_success(result, part, defense) for defense in defenses]
        second = [_success(queries, part, defense) for defense in dict.fromkeys(row.defense for row in queries.rows)]
        rows.append([f"`{part}`", *first, *second])
    lines = [
        *table(head, rows),
        "",
        f"*Share in % of the judging draws that are wrong; {_photos(result)} and {_photos(queries)}, of which those "
        f"are attacked that undefended CLIP gets right; {result.device}. `benchmarks/results/{MEMBERS}`, made by "
        f"`{result.command}`, and `benchmarks/results/{QUERIES}`, made by `{queries.command}`.*",
    ]
    return "\n".join(lines) + "\n"


def _success(result: EvaluationResult, part: str, defense: str) -> str:
    rows = [row for row in result.attacks if row.part == part and row.defense == defense]
    met = sum(row.attacked for row in rows)
    return f"{100 * sum(row.attacked * row.success_rate for row in rows) / met:.0f}" if met else ""


def convergence(folder: Path) -> str:
    """Accuracy in % at the smallest budget, under the suite and under the suite with twice the steps and draws."""
    checks = [check for run in SUITES for check in _load(folder, run).checks if check.name == "convergence"]
    head = ["defence", "attack", "left, %", "left with twice the steps and draws, %", "largest difference allowed"]
    rows = [
        [check.defense, check.attack, *(f"{100 * value:.1f}" for value in (check.first, check.second, check.slack))]
        for check in checks
    ]
    return "\n".join([*table(head, rows, words=2), "", "*Photos of the first set; `checks` in the same files.*"]) + "\n"


def _load(folder: Path, run: str) -> EvaluationResult:
    return EvaluationResult.load(folder / run / "result.json")
