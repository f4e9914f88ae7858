"""Self-check of a run: PGD-10 at 1/255 must leave undefended CLIP almost no accuracy.

If it leaves much, the attack or the model is broken (normalisation twice, eps in the wrong unit, gradients that
vanish in half precision, the wrong class features), and no robust accuracy of the run can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from react_clip.errors import ReactClipError
from react_clip.evaluation.recipe import SELF_CHECK_ATTACK, Recipe
from react_clip.evaluation.result import SelfCheck
from react_clip.evaluation.runner import Block
from react_clip.evaluation.sets import EvaluationSet
from react_clip.evaluation.threats import TRANSFER

LIMIT = 0.3
"""Largest share of its clean accuracy that undefended CLIP may keep."""

_IMAGES = 32


def skipped() -> SelfCheck:
    """The result of a check that was switched off, as for towers that were finetuned to be robust."""
    return SelfCheck(False, "", 0, math.nan, math.nan, LIMIT)


def from_blocks(recipe: Recipe, blocks: Sequence[Block]) -> SelfCheck:
    """The check from the recipe's own PGD-10 at 1/255: mean over sets of the undefended accuracy."""
    clean, robust, images, names = [], [], 0, []
    for name in dict.fromkeys(block.dataset for block in blocks):
        columns = next(b.columns for b in blocks if b.dataset == name and b.attack == recipe.own_self_check)
        label = columns["label"]
        clean.append(float((columns["clean_prediction"] == label).double().mean()))
        robust.append(float((columns["plain_prediction"] == label).double().mean()))
        images += len(label)
        names.append(name)
    return SelfCheck(
        True, ", ".join(names), images, math.fsum(clean) / len(clean), math.fsum(robust) / len(robust), LIMIT
    )


def on_few_images(recipe: Recipe, subject: EvaluationSet) -> SelfCheck:
    """The check on the first images of a set that undefended CLIP gets right."""
    attack = SELF_CHECK_ATTACK.attack
    assert attack is not None
    # Images made for another model need not break this one, but the one that they were made for.
    victim = subject.attack_clf if recipe.threat == TRANSFER else subject.clf
    right, seen = 0, 0
    kept = []
    for start in range(0, len(subject), recipe.batch):
        pixels = subject.batch(start, start + recipe.batch)
        labels = subject.labels[start : start + recipe.batch].to(pixels.device)
        with torch.no_grad():
            correct = victim(pixels).argmax(-1) == labels
        right, seen = right + int(correct.sum()), seen + len(labels)
        kept.append((pixels[correct], labels[correct]))
        if right >= _IMAGES:
            break
    if not right:
        return SelfCheck(True, subject.name, 0, 0.0, math.nan, LIMIT)
    x, y = (torch.cat(parts)[:_IMAGES] for parts in zip(*kept, strict=True))
    adversarial = attack(subject.attack_clf, x, y, seed=recipe.seed).images
    with torch.no_grad():
        standing = float((victim(adversarial).argmax(-1) == y).double().mean())
    return SelfCheck(True, subject.name, len(x), right / seen, right / seen * standing, LIMIT)


def insist(check: SelfCheck) -> None:
    """Refuse to report if the attack did not work."""
    if not check.enabled:
        return
    if not check.clean_accuracy:
        raise ReactClipError(
            f"undefended CLIP gets no clean image of {check.dataset} right, so there is nothing to attack and nothing "
            "to report; check that the class features belong to this model and these classes"
        )
    left = check.robust_accuracy / check.clean_accuracy
    if left > check.limit:
        fall = f"{100 * check.clean_accuracy:.1f} % to {100 * check.robust_accuracy:.1f} %"
        raise ReactClipError(
            f"PGD-10 at 1/255 leaves undefended CLIP {100 * left:.0f} % of its clean accuracy on {check.dataset} "
            f"({fall}), the limit is {100 * check.limit:.0f} %: the attack or the model is broken, so nothing is "
            "reported; check pixel range, normalisation, attack_dtype and class features, or set self_check: false for "
            "a tower finetuned to be robust (finished work is kept)"
        )
