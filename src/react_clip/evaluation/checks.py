"""Checks that the attacks of a run are strong enough for robust accuracy to mean something.

The self-check: PGD-10 at 1/255 must leave undefended CLIP almost no accuracy. If it leaves much, the attack or the
model is broken (normalisation twice, eps in the wrong unit, gradients that vanish in half precision, the wrong class
features), and no robust accuracy could be trusted, so the run stops before it starts.

Attacks that know the defence must have converged: twice the steps and draws must hardly change their success. What the
numbers of a run say without further attacks is a flag, see :mod:`react_clip.evaluation.flags`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from react_clip import intervals
from react_clip.attacks import PGD, Attack, Suite
from react_clip.attacks.base import ADAPTIVE, TRANSFER
from react_clip.defenses import Defense
from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import LabelledDefense, Recipe, format_eps, title_of
from react_clip.evaluation.results import Check, SelfCheck
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
        once = intervals.wilson(float(left.min()), len(rows))
        longer = _accuracy_under(recipe, subject, store, chosen, rows, _doubled(attacks[strongest]))
        about = ("convergence", chosen.label, title_of(strongest, eps), "twice the steps and draws leave as much")
        slack = (once.high - once.low) / 2
        checks.append(Check(*about, once.value, longer, slack, once.value - longer <= slack))
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
        for part in torch.split(torch.tensor(rows), recipe.batch):
            x = subject.batch(part)
            y = subject.labels[part].to(x.device)
            images = attack(target, x, y, seed=recipe.seed).images
            wrong.append(torch.stack([defense(clf, images, seed=s).labels != y for s in recipe.seeds]))
        return {"wrong": torch.cat(wrong, dim=1)}

    path = (subject.name, "checks", chosen.label, f"{attack.name} {format_eps(attack.eps)}")
    return 1.0 - float(store.get(path, about, wrong_answers).tensors["wrong"].double().mean())


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
