"""Checks that the attacks of a run are strong enough for robust accuracy to mean something.

The self-check: PGD-10 at 1/255 must leave undefended CLIP almost no accuracy. If it leaves much, the attack or the
model is broken (normalisation twice, eps in the wrong unit, gradients that vanish in half precision, the wrong class
features), and no robust accuracy could be trusted, so the run stops before it starts.

The sanity checks of attacks that know the defence (Carlini et al., 2019, "On Evaluating Adversarial Robustness"):
accuracy must fall with the budget, go to about 0 at a huge budget, not be lower without gradients than with them, not
be higher than under an attacker who does not know the defence, and hardly change with twice the steps and draws. A
check fails only if the 95 % intervals exclude that it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from react_clip import intervals
from react_clip.attacks import PGD, Adaptive, Attack, Queries, Suite
from react_clip.attacks.base import ADAPTIVE, TRANSFER
from react_clip.defenses import Defense
from react_clip.errors import ReactClipError
from react_clip.evaluation.numbers import AttackRow, Row
from react_clip.evaluation.recipe import CLEAN, LabelledDefense, Recipe, format_eps, title_of
from react_clip.evaluation.results import Check, EvaluationResult, SelfCheck
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.store import ShardStore, Tensors, log

if TYPE_CHECKING:
    import pandas as pd

# ---------------------------------------------------------------------- self-check

_PGD = PGD(eps=1 / 255, steps=10)
_SELF_CHECK_LIMIT = 0.3
"""Largest fraction of its clean accuracy that undefended CLIP may keep."""
_SELF_CHECK_IMAGES = 32

NO_SELF_CHECK = SelfCheck(False, "", 0, math.nan, math.nan, _SELF_CHECK_LIMIT)
"""The result if the check was switched off, as for towers that were finetuned to be robust."""


def self_check(recipe: Recipe, subject: EvaluationSet, store: ShardStore) -> SelfCheck:
    """The self-check on a few images of the first set, spread over it, before the run; raises if the attack fails."""
    if not recipe.self_check:
        return NO_SELF_CHECK
    # Images made for another model need not break this one, but must break the one that they were made for.
    victim = subject.attack_clf if recipe.threat == TRANSFER else subject.clf
    rows = torch.linspace(0, len(subject) - 1, min(len(subject), _SELF_CHECK_IMAGES)).long().tolist()

    def right_answers() -> Tensors:
        log.info("self-check: PGD-10 at 1/255 on %d images of %s", len(rows), subject.name)
        x = subject.batch(rows)
        y = subject.labels[rows].to(x.device)
        adversarial = _PGD(subject.attack_clf, x, y, seed=recipe.seed).images
        with torch.no_grad():
            return {"right": torch.stack([victim(images).argmax(-1) == y for images in (x, adversarial)])}

    about = {"attack": repr(_PGD), "seed": recipe.seed, "threat": recipe.threat, "rows": rows}
    about |= {"code": subject.code(_PGD), **subject.identity}
    stored = store.get((subject.name, "checks", "self-check"), about, right_answers).tensors["right"]
    clean, robust = stored.double().mean(1).tolist()
    check = SelfCheck(True, subject.name, len(rows), clean, robust, _SELF_CHECK_LIMIT)
    if not clean:
        raise ReactClipError(
            f"undefended CLIP gets no clean image of {check.dataset} right, so there is nothing to attack and nothing "
            "to report; check that the class features belong to this model and these classes"
        )
    if robust > check.limit * clean:
        raise ReactClipError(
            f"PGD-10 at 1/255 leaves undefended CLIP {100 * robust / clean:.0f} % of its clean accuracy on "
            f"{check.dataset} ({100 * clean:.1f} % to {100 * robust:.1f} %), the limit is {100 * check.limit:.0f} %: "
            "the attack or the model is broken, so nothing is reported; check pixel range, normalisation, attack_dtype "
            "and class features, or set self_check: false for a tower finetuned to be robust"
        )
    return check


# ---------------------------------------------------------------------- do the defences repeat their answers?

_REPEATED = 5
"""Images of which a defence is asked again."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest change of a unit feature that counts as rounding; 0.05 in half precision."""


def unrepeatable(recipe: Recipe, subject: EvaluationSet, store: ShardStore) -> list[str]:
    """One line for each defence that answers a few images differently when it is asked again with the same seed."""
    clf, images = subject.clf, subject.batch(slice(_REPEATED))

    def asked_again(defense: Defense) -> Tensors:
        """Changes of the features: asked for the same batch again, and for the images in two parts.

        Of the parts it is the median: a gate may open or shut by rounding for an image or two.
        """
        batches = (images, images, *images.chunk(2))
        first, again, *parts = (defense(clf, batch, seed=recipe.seed).features.detach().float() for batch in batches)
        apart = torch.cat(parts)
        return {"again": (first - again).norm(dim=1).max(), "apart": (first - apart).norm(dim=1).median()}

    lines = []
    for chosen in recipe.defenses:
        about = {"defense": chosen.defense.to_dict(), "code": subject.code(chosen.defense), **subject.identity}
        path = (subject.name, "checks", chosen.label, "repeats")
        changes = store.get(path, about, partial(asked_again, chosen.defense)).tensors
        tolerance = _TOLERANCE.get(clf.encoder.dtype, 0.05)
        if changes["again"] > tolerance:
            why = "when it is asked again with the same seed: it draws from a global generator"
        elif changes["apart"] > tolerance:
            why = "in another batch: they depend on the other images, or on a global generator"
        else:
            continue
        lines.append(f"{chosen.label} gives other answers {why}; its numbers cannot be repeated")
        log.warning("%s", lines[-1])
    return lines


# ---------------------------------------------------------------------- sanity checks of attacks that know the defence

_HUGE = 64 / 255
_HUGE_LIMIT = 0.1
"""Largest accuracy that may be left at the huge budget."""
_IMAGES = 48
_STEPS = 20
"""Steps of the extra attacks at a huge budget and on undefended CLIP."""


def _wanted(recipe: Recipe) -> bool:
    return recipe.self_check and recipe.threat == ADAPTIVE and bool(recipe.attacks)


def sanity_by_attacks(recipe: Recipe, subject: EvaluationSet, images: pd.DataFrame, store: ShardStore) -> list[Check]:
    """Sanity checks by extra attacks on the first few images of a set that undefended CLIP gets right."""
    if not _wanted(recipe):
        return []
    eps = min(item.eps for item in recipe.attacks)
    attacks = {item.label: item.attack for item in recipe.attacks if item.eps == eps}
    members = itertools.chain(*map(_members, attacks.values()))
    # Not one that evades a gate: a defence may have none.
    gradient = next((one for one in members if isinstance(one, Adaptive) and one.objective != "evade"), None)
    plain = PGD(eps=eps, steps=_STEPS, step_size="eps/4")
    checks: list[Check] = []
    for chosen in recipe.defenses:
        answers = images[(images["defense"] == chosen.label) & (images["eps"] == eps) & (images["attack"] != CLEAN)]
        answers = answers[answers["attacked"] & (answers["clean_prediction"] == answers["label"])]
        if answers.empty:
            continue
        rows = sorted(set(answers["index"].tolist()))[:_IMAGES]
        left = answers[answers["index"].isin(rows)].groupby("attack", observed=True)["correct"].mean()
        under = partial(_accuracy_under, recipe, subject, store, chosen, rows)
        about, least = (chosen.label, title_of(str(left.idxmin()), eps)), float(left.min())
        once = intervals.wilson(least, len(rows))
        slack = (once.high - once.low) / 2
        expected = "twice the steps and draws leave less by at most half the interval"
        doubled = under(_doubled(attacks[str(left.idxmin())]))
        checks.append(Check("convergence", *about, expected, least, doubled, slack, least - doubled <= slack))
        expected = f"it leaves no more than {plain.name} on undefended CLIP"
        checks.append(_compare("oblivious", *about, expected, under(plain), least, len(rows)))
        if gradient is not None:
            huge, budget = under(gradient.replace(eps=_HUGE, steps=_STEPS)), format_eps(_HUGE)
            title, expected = f"{gradient.name} {budget}", f"next to nothing is left at {budget}"
            checks.append(
                Check("huge budget", chosen.label, title, expected, _HUGE_LIMIT, huge, 0.0, huge <= _HUGE_LIMIT)
            )
    return checks


def _accuracy_under(
    recipe: Recipe, subject: EvaluationSet, store: ShardStore, chosen: LabelledDefense, rows: list[int], attack: Attack
) -> float:
    """Accuracy of a defence on attacked images, mean over the recipe's draws; stored in a shard."""
    clf, defense = subject.clf, chosen.defense
    about = {"attack": repr(attack), "defense": defense.to_dict(), "seeds": recipe.seeds, "rows": rows}
    about |= {"code": subject.code(attack, defense), **subject.identity}

    def wrong_answers() -> Tensors:
        target, wrong = attack.target(subject.attack_clf, defense), []
        for at in range(0, len(rows), recipe.batch):
            x = subject.batch(rows[at : at + recipe.batch])
            y = subject.labels[rows[at : at + recipe.batch]].to(x.device)
            images = attack(target, x, y, seed=recipe.seed).images
            wrong.append(torch.stack([defense(clf, images, seed=s).labels != y for s in recipe.seeds]))
        return {"wrong": torch.cat(wrong, dim=1)}

    path = (subject.name, "checks", chosen.label, f"{attack.name} {format_eps(attack.eps)}")
    return 1.0 - float(store.get(path, about, wrong_answers).tensors["wrong"].double().mean())


def _members(attack: Attack) -> tuple[Attack, ...]:
    return attack.members if isinstance(attack, Suite) else (attack,)


def _doubled(attack: Attack) -> Attack:
    """The attack with twice the steps or queries, and twice the draws of the noise for each."""
    if isinstance(attack, Suite):
        return attack.replace(members=tuple(map(_doubled, attack.members)))
    numbers = {name: getattr(attack, name, None) for name in ("steps", "queries", "eot")}
    return attack.replace(**{name: 2 * number for name, number in numbers.items() if number is not None})


def sanity_by_numbers(recipe: Recipe, result: EvaluationResult) -> list[Check]:
    """Sanity checks of the run's numbers: accuracy falls with the budget, and queries do not beat gradients."""
    return [*budget_checks(result.rows), *query_checks(result.attacks)] if _wanted(recipe) else []


def raise_if_failed(checks: Sequence[Check]) -> None:
    """Refuse to report if a sanity check failed."""
    for check in checks:
        if not check.passed:
            raise ReactClipError(
                f"sanity check {check.name!r} failed for {check.attack} on {check.defense!r}: {check.expected}, but "
                f"{100 * check.second:.1f} % are left against {100 * check.first:.1f} %; the attack is too weak or "
                "broken, so nothing is reported; give it more steps, draws (eot) or members, or set self_check: false "
                "(finished work is kept)"
            )


def budget_checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Of two budgets of one attack, the larger must leave no more."""
    attacked = sorted((row for row in rows if row.eps), key=lambda row: (row.dataset, row.attack, row.defense, row.eps))
    for small, large in itertools.pairwise(attacked):
        if (small.dataset, small.attack, small.defense) == (large.dataset, large.attack, large.defense):
            title = f"{title_of(large.attack, large.eps)} on {large.dataset}"
            expected = f"it leaves no more than {format_eps(small.eps)}"
            one, two = small.paper_accuracy, large.paper_accuracy
            yield _compare("budget", large.defense, title, expected, one, two, small.n)


def query_checks(attacks: Sequence[AttackRow]) -> Iterator[Check]:
    """Square, which asks the defence without gradients, must not be stronger than the best attack with gradients."""
    whole = {(row.dataset, row.attack, row.eps, row.defense) for row in attacks if row.part}
    # A suite mixes gradients and queries, so its members are compared instead of the whole.
    single = [row for row in attacks if row.part or (row.dataset, row.attack, row.eps, row.defense) not in whole]
    for query in single:
        if not (query.part or query.attack).startswith(Queries.kind) or not query.attacked:
            continue
        about = (query.dataset, query.eps, query.defense, query.attacked)
        # With members in turn, Square attacked only what gradients had left: there is nothing to compare.
        others = [row for row in single if (row.dataset, row.eps, row.defense, row.attacked) == about and row != query]
        if others:
            title = f"the best gradient attack {format_eps(query.eps)} on {query.dataset}"
            expected = "it leaves no more than Square, which needs no gradients"
            best = max(row.success_rate for row in others)
            left = 1.0 - query.success_rate, 1.0 - best
            yield _compare("queries", query.defense, title, expected, *left, query.attacked)


def _compare(name: str, defense: str, attack: str, expected: str, first: float, second: float, n: int) -> Check:
    """The check that accuracy ``second`` is at most ``first``, as far as ``n`` images can tell.

    >>> [_compare("steps", "react", "both", "", 0.2, more, n=16).passed for more in (0.1, 0.4, 0.9)]
    [True, True, False]
    """
    # Rounding may leave [0, 1] by a bit.
    one, two = (intervals.wilson(min(1.0, max(0.0, value)), n) for value in (first, second))
    slack = one.high - one.value + two.value - two.low
    return Check(name, defense, attack, expected, one.value, two.value, slack, two.low <= one.high)
