"""Several results over the same photos as one: finetuned towers beside test-time defences, or a sweep run in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from react_clip.errors import ReactClipError
from react_clip.evaluation.result import EvaluationResult


def merge(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """One result with every row of the given ones.

    They must speak of the same photos under the same protocol: sets, attacks, scoring, threat model, seeds. What each
    row's model was, its own file says; here a defence's label must tell them apart.
    """
    if not results:
        raise ReactClipError("there is nothing to join; give at least one result")
    first = results[0]
    for other in results[1:]:
        for what in ("scoring", "threat", "draws", "attack_seed", "defense_seeds"):
            if getattr(other, what) != getattr(first, what):
                raise ReactClipError(
                    f"{first.title!r} and {other.title!r} cannot be joined: {what} is {getattr(first, what)!r} in one "
                    f"and {getattr(other, what)!r} in the other; report them apart"
                )
        if _photos(other) != _photos(first):
            raise ReactClipError(
                f"{first.title!r} and {other.title!r} cannot be joined: they were run on other photos or other "
                "attacks; report them apart"
            )
    labels = [label for result in results for label in dict.fromkeys(row.defense for row in result.rows)]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ReactClipError(f"defence {twice[0]!r} is in several of the results; give one of them another label")
    defenses = [item for result in results for item in result.recipe.get("defenses", [])]
    models = list(dict.fromkeys(result.model for result in results))
    return dataclasses.replace(
        first,
        command="; ".join(result.command for result in results if result.command),
        model=", ".join(models),
        recipe={**first.recipe, "defenses": defenses},
        rows=tuple(row for result in results for row in result.rows),
        # Attacks that know the defence were made for each; the others are the same in all.
        attacks=first.attacks
        if not any(row.defense for row in first.attacks)
        else tuple(row for result in results for row in result.attacks),
        checks=tuple(check for result in results for check in result.checks),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def _photos(result: EvaluationResult) -> tuple[object, ...]:
    """What was looked at: the sets with their photos, and the attacks with their budgets."""
    sets = tuple((info.name, info.images, info.fingerprint) for info in result.sets)
    return sets, tuple(dict.fromkeys((row.attack, round(row.eps, 9)) for row in result.rows))
