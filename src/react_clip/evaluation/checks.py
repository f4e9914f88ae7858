"""Checks that the attacks of a run are strong enough for robust accuracy to mean something.

The self-check: PGD-10 at 1/255 must leave undefended CLIP almost no accuracy. If it leaves much, the attack or the
model is broken (normalisation twice, eps in the wrong unit, gradients that vanish in half precision, the wrong class
features), and no robust accuracy could be trusted, so the run stops before it starts.

Attacks that know the defence must have converged: twice the steps and draws must hardly change their success. What the
numbers of a run say without further attacks is a flag, see :mod:`react_clip.evaluation.flags`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from react_clip import intervals
from react_clip.attacks import PGD, Attack, Suite
from react_clip.attacks.base import ADAPTIVE, TRANSFER
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import LabelledAttack, Recipe, title_of
from react_clip.evaluation.results import Check, SelfCheck
from react_clip.evaluation.runner import SetRunner
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


def unrepeatable(recipe: Recipe, subject: EvaluationSet) -> list[str]:
    """One line for each defence that answers a few images differently when it is asked again with the same seed."""
    clf, images, lines = subject.clf, subject.batch(slice(_REPEATED)), []
    tolerance = _TOLERANCE.get(clf.encoder.dtype, 0.05)
    for chosen in recipe.defenses:
        answers = [chosen.defense(clf, batch, seed=recipe.seed) for batch in (images, images, *images.chunk(2))]
        first, again, *parts = (answer.features.detach().float() for answer in answers)
        if (first - again).norm(dim=1).max() > tolerance:
            why = "when it is asked again with the same seed: it draws from a global generator"
        # The median: a gate may open or shut by rounding for an image or two.
        elif (first - torch.cat(parts)).norm(dim=1).median() > tolerance:
            why = "in another batch: they depend on the other images, or on a global generator"
        else:
            continue
        lines.append(f"{chosen.label} gives other answers {why}; its numbers cannot be repeated")
        log.warning("%s", lines[-1])
    return lines


# ---------------------------------------------------------------------- convergence of attacks that know the defence

_IMAGES = 48


def convergence(recipe: Recipe, subject: EvaluationSet, images: pd.DataFrame, store: ShardStore) -> list[Check]:
    """A check of each defence: twice the steps of the attack that leaves it least at the smallest budget.

    It is made on the first few images that undefended CLIP gets right. It fails if half the 95 % interval excludes that
    the longer attack leaves as much.
    """
    if not (recipe.self_check and recipe.threat == ADAPTIVE and recipe.attacks):
        return []
    eps = min(item.eps for item in recipe.attacks)
    attacks = {item.label: item.attack for item in recipe.attacks if item.eps == eps}
    checks: list[Check] = []
    for chosen in recipe.defenses:
        answers = images[(images["defense"] == chosen.label) & (images["eps"] == eps) & images["attacked"]]
        answers = answers[answers["clean_prediction"] == answers["label"]]
        if answers.empty:
            continue
        rows = sorted(set(answers["index"].tolist()))[:_IMAGES]
        left = answers[answers["index"].isin(rows)].groupby("attack", observed=True)["correct"].mean()
        strongest = str(left.idxmin())
        longer = LabelledAttack("longer", _doubled(attacks[strongest]))
        alone = recipe.replace(attacks=(longer,), defenses=(chosen,), worst_of=())
        first = dataclasses.replace(subject, pixels=subject.pixels[rows], labels=subject.labels[rows])
        again = SetRunner(alone, first, ShardStore(store.folder.with_name("convergence"))).run()
        doubled = float(again.loc[again["attack"] == longer.label, "correct"].mean())
        once = intervals.wilson(float(left.min()), len(rows))
        about = ("convergence", chosen.label, title_of(strongest, eps), "twice the steps and draws leave as much")
        slack = (once.high - once.low) / 2
        checks.append(Check(*about, once.value, doubled, slack, once.value - doubled <= slack))
    return checks


def _doubled(attack: Attack) -> Attack:
    """The attack with twice the steps or queries, and twice the draws of the noise for each."""
    if isinstance(attack, Suite):
        return attack.replace(members=tuple(map(_doubled, attack.members)))
    numbers = {name: getattr(attack, name, None) for name in ("steps", "queries", "eot")}
    return attack.replace(**{name: 2 * number for name, number in numbers.items() if number is not None})


def raise_if_failed(checks: Sequence[Check]) -> None:
    """Refuse to report if an attack has not converged."""
    for check in checks:
        if not check.passed:
            raise ReactClipError(
                f"{check.attack} has not converged on {check.defense!r}: twice the steps and draws leave "
                f"{100 * check.second:.1f} % instead of {100 * check.first:.1f} %, so nothing is reported; give it "
                "more steps, draws (eot) or members, or set self_check: false (finished work is kept)"
            )
