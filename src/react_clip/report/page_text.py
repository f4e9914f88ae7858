"""What a report's page says in words and tables, as pieces of HTML. Every text is escaped here."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence

from react_clip.calibration import Calibration
from react_clip.evaluation.recipe import CLEAN, MEAN, format_eps
from react_clip.evaluation.result import EvaluationResult, Row
from react_clip.report.run import Run, defense_settings
from react_clip.report.tables import Cell, Table, all_tables

_SCORINGS = {
    "leakage_free": "only images that undefended CLIP gets right are attacked, the others pass through the defence "
    "as they are; accuracy counts all images",
    "attack_all": "every image is attacked; right answers on images that undefended CLIP gets wrong clean are leaked "
    "by the attack and are counted beside the accuracy",
}


def escaped(value: object) -> str:
    """Any value as text that HTML shows as it is, also where it stands in an attribute."""
    # A path may hold bytes that are no text; they must not keep the page from being written.
    return html.escape(str(value).encode("utf-8", "replace").decode())


def summary(run: Run) -> str:
    """One paragraph computed from the numbers: what holds best, what holds worst, and what it costs."""
    result = run.result
    means = result.select(dataset=MEAN) if result is not None else []
    if result is None or not means:
        return "<p>There are no finished numbers in this folder yet; what is missing stands below.</p>"
    plain = _undefended(run)
    images = sum(info.images for info in result.sets)
    where = f"the mean over {len(result.sets)} data sets" if len(result.sets) > 1 else result.sets[0].name
    sentences = [f"{result.model} on {where} ({images:,} images)."]
    clean = {row.defense: row for row in means if row.attack == CLEAN.label}
    attacked = [row for row in means if row.eps]
    if attacked:
        hardest = max(attacked, key=lambda row: (row.eps, -row.accuracy))
        rows = [row for row in attacked if (row.attack, row.eps) == (hardest.attack, hardest.eps)]
        sentences += _ranking(rows, clean, plain)
    elif clean:
        best = max(clean.values(), key=lambda row: row.accuracy)
        sentences.append(f"No attack was run; on clean images {best.defense} is right most often: {_share(best)}.")
    sentences.append(
        f"Threat model: {result.threat} ({result.threat_meaning}). Scoring: {result.scoring} "
        f"({_SCORINGS.get(result.scoring, 'unknown to this version')}). Brackets hold 95 % intervals."
    )
    return f"<p>{escaped(' '.join(sentences))}</p>"


def _ranking(rows: Sequence[Row], clean: Mapping[str, Row], plain: str) -> list[str]:
    """Best and worst under one attack, and the price on clean images."""
    title = f"{rows[0].attack} {format_eps(rows[0].eps)}"
    found = []
    if undefended := next((row for row in rows if row.defense == plain), None):
        before = f" of {_share(clean[plain])} on clean images" if plain in clean else ""
        found.append(f"The strongest attack, {title}, leaves undefended CLIP {_share(undefended)}{before}.")
    ranked = sorted((row for row in rows if row.defense != plain), key=lambda row: -row.accuracy)
    if not ranked:
        return found
    best, worst = ranked[0], ranked[-1]
    sentence = f"Under {title} the best defence is {best.defense} with {_share(best)}"
    if len(ranked) > 1:
        sentence += f", the worst {worst.defense} with {_share(worst)}"
        if best.low <= ranked[1].high:
            sentence += f"; the interval of {best.defense} overlaps that of {ranked[1].defense}, the runner-up"
    found.append(sentence + ".")
    if plain in clean and all(row.defense in clean for row in ranked):
        costs = {row.defense: 100 * (clean[plain].accuracy - clean[row.defense].accuracy) for row in ranked}
        least, most = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
        parts = [f"{best.defense} {_cost(costs[best.defense])}"]
        if len(ranked) > 1:
            parts += [f"the dearest is {most} ({_cost(costs[most])})", f"the cheapest {least} ({_cost(costs[least])})"]
        found.append(f"On clean images {'; '.join(parts)}.")
    return found


def _undefended(run: Run) -> str:
    """What undefended CLIP is called; empty where the run has no row of it."""
    settings = defense_settings(run)
    return next((label for label, item in settings.items() if item.get("kind") == "undefended"), "")


def _share(row: Row) -> str:
    interval = "" if math.isnan(row.low) else f" [{100 * row.low:.1f}, {100 * row.high:.1f}]"
    return f"{100 * row.accuracy:.1f} %{interval}"


def _cost(points: float) -> str:
    if abs(points) < 0.05:
        return "costs nothing"
    return f"costs {points:.1f} points" if points > 0 else f"gains {-points:.1f} points"


def tables(result: EvaluationResult) -> str:
    """Every table of the result."""
    return "\n".join(html_table(table) for table in all_tables(result) if table.rows)


def html_table(table: Table) -> str:
    """A sortable table under its caption, which names threat model and scoring."""
    names = len(table.header) - len(table.rows[0][1])
    best = _best(table, names)
    body = []
    for labels, cells in table.rows:
        row = [f'<th scope="row">{escaped(label)}</th>' for label in labels]
        row += [_number(cell, cell.value == top) for cell, top in zip(cells, best, strict=True)]
        body.append("<tr>" + "".join(row) + "</tr>")
    head = "".join(
        f'<th scope="col" class="{"word" if place < names else "number"}">{escaped(title)}</th>'
        for place, title in enumerate(table.header)
    )
    return (
        f'<div class="sheet" id="table-{escaped(table.name)}"><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escaped(table.name)}"><table class="sortable"><caption>{escaped(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></div>"
    )


def _best(table: Table, names: int) -> list[float]:
    """The highest number of each column of accuracies, to be set in bold; of other tables nothing is best."""
    if table.name != "accuracy" or len(table.rows) < 2:
        return [math.nan] * (len(table.header) - names)
    columns = zip(*(cells for _, cells in table.rows), strict=True)
    return [max((cell.value for cell in column if cell.value == cell.value), default=math.nan) for column in columns]


def _number(cell: Cell, best: bool) -> str:
    interval = f' title="95 % interval: {cell.low:.2f} to {cell.high:.2f}"' if not math.isnan(cell.low) else ""
    value = "" if math.isnan(cell.value) else f"{cell.value:.6g}"
    # The half-width has an element of its own, so that it can stand back behind its number.
    number, plus_minus, rest = cell.text().partition(" ± ")
    text = escaped(number) + (f"<small> ± {escaped(rest)}</small>" if plus_minus else "")
    return f'<td data-value="{value}"{interval}>{f"<b>{text}</b>" if best else text}</td>'


def about(run: Run) -> str:
    """What was run, on what, and how it can be repeated."""
    result = run.result
    folders = ", ".join(str(folder) for folder in run.folders)
    if result is None:
        return _facts({"folder": folders, "recipe": "see below" if run.recipe else "not readable"}) + _recipe(run)
    precision = result.dtype
    if result.attack_dtype != result.dtype:
        precision += f" (attacks crafted in {result.attack_dtype})"
    facts = {
        "model": result.model,
        "precision": precision,
        "device": result.device,
        "threat model": f"{result.threat}: {result.threat_meaning}",
        "scoring": f"{result.scoring}: {_SCORINGS.get(result.scoring, 'unknown to this version')}",
        "draws of the noise": result.draws,
        "seeds": f"attacks {result.attack_seed}; defences {', '.join(map(str, result.defense_seeds))}",
        "paper": result.paper or "\u2013",
        "created": result.created,
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "command": result.command or "called from Python",
        "recipe's SHA-256": result.recipe_hash,
        "folder": folders,
    }
    notes = "".join(f"<li>{escaped(note)}</li>" for note in result.notes)
    return _facts(facts) + (f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "") + _sets(result) + _recipe(run)


def self_check(result: EvaluationResult) -> str:
    """Whether the attack was shown to work, in words and numbers."""
    check = result.self_check
    if not check.enabled:
        return (
            '<p class="warning">The self-check was switched off: nothing shows that the attacks of this run work.</p>'
        )
    left = check.robust_accuracy / check.clean_accuracy if check.clean_accuracy else math.nan
    passed = left <= check.limit
    return (
        f'<p class="{"passed" if passed else "warning"}"><b>{"Passed" if passed else "Failed"}.</b> PGD-10 at 1/255 '
        f"against undefended CLIP on {check.images:,} images ({escaped(check.dataset)}): accuracy falls from "
        f"{100 * check.clean_accuracy:.1f} % to {100 * check.robust_accuracy:.1f} %, which is {100 * left:.1f} % of "
        f"it; at most {100 * check.limit:g} % may be left. Threat model: {escaped(result.threat)}; scoring: "
        f"{escaped(result.scoring)}.</p>"
    )


def _facts(facts: Mapping[str, object]) -> str:
    items = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _sets(result: EvaluationResult) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escaped(info.name)}</th><td data-value="{info.images}">{info.images:,}</td>'
        f'<td data-value="{info.classes}">{info.classes:,}</td><td class="word">{escaped(info.class_source)}</td>'
        f'<td class="word">{escaped("; ".join(info.notes))}</td>'
        f'<td class="word"><code>{escaped(info.fingerprint)}</code><br><code>{escaped(info.model_fingerprint)}</code>'
        "</td></tr>"
        for info in result.sets
    )
    head = "".join(
        f'<th scope="col" class="{kind}">{title}</th>'
        for title, kind in (
            ("data set", "word"),
            ("images", "number"),
            ("classes", "number"),
            ("class features from", "word"),
            ("notes", "word"),
            ("SHA-256 of photos, of model and classes", "word"),
        )
    )
    return (
        '<h3>Data sets</h3><div class="sheet"><div class="scroll" tabindex="0" role="region" aria-label="Data sets">'
        f'<table class="sortable sets"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>'
    )


def _recipe(run: Run) -> str:
    recipe = run.result.recipe if run.result is not None else run.recipe
    if not recipe:
        return ""
    text = json.dumps(recipe, indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>The recipe in full</summary><pre>{escaped(text)}</pre></details>"


def calibration_table(calibration: Calibration) -> str:
    """What was measured at each budget, and the threshold that follows."""
    rows = tuple(
        (
            (format_eps(point.eps),),
            (
                Cell(point.mean_drift, digits=3),
                Cell(point.best_sigma, digits=3),
                Cell(100 * point.accuracy.get(f"{point.best_sigma:g}", math.nan)),
                Cell(point.images, digits=0),
            ),
        )
        for point in calibration.points
    )
    tau = f"tau is {calibration.config.tau:g}"
    if calibration.clean_pass is not None:
        tau += f", which leaves {100 * calibration.clean_pass:g} % of {calibration.clean_images:,} clean photos alone"
    words = (
        f"Calibration of {calibration.provenance.get('model', 'a model')} on "
        f"{calibration.provenance.get('data', {}).get('name', 'photos')}: the drift r, the anchor scale sigma with "
        f"the highest defended accuracy, and that accuracy in % of the attacked photos; {tau}. Threat model: oblivious "
        "(PGD against plain CLIP, which knows no defence). Scoring: only photos that plain CLIP gets right."
    )
    header = ("budget", "mean r", "best sigma", "accuracy there", "photos")
    return html_table(Table("calibration", words, header, rows, "oblivious", "leakage_free"))


def missing_lists(missing: Sequence[str], not_drawn: Sequence[str]) -> str:
    """One line for each thing that is not there, and for each figure that needs another run."""
    if not missing and not not_drawn:
        return "<p>Nothing: the run is complete, and every figure could be drawn.</p>"
    found = _lines(missing) or "<p>Nothing of the run itself.</p>"
    return found + (f"<h3>Figures that are not here</h3>{_lines(not_drawn)}" if not_drawn else "")


def _lines(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>" if lines else ""


def rows_caption(run: Run) -> str:
    """Conditions of the per-image rows, as in every other table."""
    source, recipe = run.result, run.recipe or {}
    threat = source.threat if source else recipe.get("threat", "unknown")
    scoring = source.scoring if source else recipe.get("scoring", "unknown")
    meaning = f" ({source.threat_meaning})" if source else ""
    return escaped(f"Threat model: {threat}{meaning}. Scoring: {scoring} ({_SCORINGS.get(scoring, 'not known')}).")
