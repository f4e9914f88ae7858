"""From per-image outcomes to the rows of a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import MEAN, LabelledAttack, Recipe
from react_clip.evaluation.result import AttackRow, Row
from react_clip.evaluation.runner import PART, Block


def set_rows(recipe: Recipe, blocks: Sequence[Block]) -> list[Row]:
    """One row per attack and defence of one set; a defence's draws are taken together."""
    return [
        _row(recipe, [block for block in blocks if block.attack == item and block.defense == defense.label])
        for item in recipe.all_attacks
        for defense in recipe.defenses
    ]


def _row(recipe: Recipe, draws: list[Block]) -> Row:
    first = draws[0]
    label, clean, attacked = (first.columns[name].numpy() for name in ("label", "clean_prediction", "attacked"))
    correct, gated = (np.stack([block.columns[name].numpy() for block in draws]) for name in ("prediction", "gated"))
    correct = correct == label
    clean_correct = clean == label
    estimate = metrics.wilson(metrics.accuracy(correct), len(label))
    leaked = metrics.leakage(clean_correct, attacked, correct)
    # Under attack only attacked images count; all of these are right clean unless everything was attacked.
    counted = clean_correct if first.attack.attack is None else clean_correct & attacked
    return Row(
        dataset=first.dataset,
        attack=first.attack.label,
        eps=first.attack.eps,
        defense=first.defense,
        threat=recipe.threat,
        scoring=recipe.scoring,
        n=len(label),
        attacked=int(attacked.sum()),
        accuracy=estimate.value,
        low=estimate.low,
        high=estimate.high,
        worst=metrics.worst_of(correct),
        majority=metrics.majority(correct),
        leakage=leaked,
        leakage_share=leaked / len(label),
        gate_rate=metrics.gate_rate(gated, counted),
        passes=_mean(draws, "passes"),
        backward_passes=_mean(draws, "backward_passes"),
    )


def _mean(draws: list[Block], name: str) -> float:
    return float(np.mean([block.columns[name].numpy().mean() for block in draws]))


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """The unweighted mean over sets of every attack and defence; counts are summed."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.attack, row.eps, row.defense), []).append(row)
    return [_mean_row(group) for group in groups.values()]


def _mean_row(group: list[Row]) -> Row:
    def mean(name: str) -> float:
        return metrics.mean_of_measured([getattr(row, name) for row in group])

    estimate = metrics.mean_over_sets([row.accuracy for row in group], [row.n for row in group])
    first, images = group[0], sum(row.n for row in group)
    leaked = math.fsum(row.leakage for row in group)
    return Row(
        dataset=MEAN,
        attack=first.attack,
        eps=first.eps,
        defense=first.defense,
        threat=first.threat,
        scoring=first.scoring,
        n=images,
        attacked=sum(row.attacked for row in group),
        accuracy=estimate.value,
        low=estimate.low,
        high=estimate.high,
        worst=mean("worst"),
        majority=mean("majority"),
        leakage=leaked,
        leakage_share=leaked / images,
        gate_rate=mean("gate_rate"),
        passes=mean("passes"),
        backward_passes=mean("backward_passes"),
    )


def attack_rows(blocks: Sequence[Block]) -> list[AttackRow]:
    """One row per attack of one set; attacks that know the defence have one per defence, and one per suite member."""
    groups: dict[tuple[LabelledAttack, str], list[Block]] = {}
    for block in blocks:
        if block.attack.attack is not None:
            # Where every defence met the same images, the first one's block tells all.
            groups.setdefault((block.attack, block.defense if block.attack.adaptive else ""), []).append(block)
    rows = []
    for (item, defense), draws in groups.items():
        columns = {name: tensor.numpy() for name, tensor in draws[0].columns.items()}
        attacked, success, found, queries = (
            columns[name] for name in ("attacked", "attack_success", "found", "queries")
        )
        count, share = int(attacked.sum()), success.astype(float)
        if defense:
            share = np.mean([(d.columns["prediction"] != d.columns["label"]).numpy() for d in draws], axis=0)
            success = share > 0.5
        row = AttackRow(
            dataset=draws[0].dataset,
            attack=item.label,
            eps=item.eps,
            config=repr(item.attack),
            attacked=count,
            success_rate=float(share[attacked].mean()) if count else math.nan,
            lost_to_rounding=int((found & ~success).sum()),
            queries=float(queries[attacked].mean()) if count else math.nan,
            defense=defense,
        )
        rows.append(row)
        rows += [_part_row(row, name, values[attacked]) for name, values in columns.items() if name.startswith(PART)]
    return rows


def _part_row(suite: AttackRow, name: str, shares: npt.NDArray[np.float32]) -> AttackRow:
    """What one member of a suite achieved on the images that were left to it."""
    tried = shares[~np.isnan(shares)]
    return replace(
        suite,
        part=name.removeprefix(PART),
        attacked=len(tried),
        success_rate=float(tried.mean()) if len(tried) else math.nan,
        lost_to_rounding=0,
        queries=math.nan,
    )
