"""From per-image outcomes to the rows of a result, and to the Parquet file from which all of them can be recomputed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from react_clip import storage
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import MEAN, LabelledAttack, Recipe
from react_clip.evaluation.result import AttackRow, Row
from react_clip.evaluation.runner import PART, Block
from react_clip.optional import require


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
    # Under attack, gates are counted on attacked images that CLIP gets right clean.
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
            # Other attacks made the same images for all defences, so one group holds them.
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
    """The row of one member of a suite, over the images that it attacked."""
    tried = shares[~np.isnan(shares)]
    return replace(
        suite,
        part=name.removeprefix(PART),
        attacked=len(tried),
        success_rate=float(tried.mean()) if len(tried) else math.nan,
        lost_to_rounding=0,
        queries=math.nan,
    )


# ---------------------------------------------------------------------- per-image results


def per_image_table(recipe: Recipe, blocks: Sequence[Block]) -> Any:
    """The blocks of one set as a pyarrow table, one row per image, attack, defence and draw."""
    pa = require("pyarrow", "writing per-image results", extra="eval")
    return pa.concat_tables([_block_table(pa, recipe, block) for block in blocks]).combine_chunks()


def _block_table(pa: Any, recipe: Recipe, block: Block) -> Any:
    values = {name: tensor.numpy() for name, tensor in block.columns.items()}
    count = len(values["index"])

    def same(text: str) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))

    def number(name: str, kind: Any) -> Any:
        return pa.array(values[name], type=kind)

    columns = {
        "dataset": same(block.dataset),
        "index": number("index", pa.int32()),
        "label": number("label", pa.int32()),
        "attack": same(block.attack.label),
        "eps": pa.array(np.full(count, block.attack.eps)),
        "scoring": same(recipe.scoring),
        "threat": same(recipe.threat),
        "attacked": number("attacked", pa.bool_()),
        "attack_success": number("attack_success", pa.bool_()),
        "defense": same(block.defense),
        "draw": pa.array(np.full(count, block.draw, np.int32)),
        "clean_prediction": number("clean_prediction", pa.int32()),
        "plain_prediction": number("plain_prediction", pa.int32()),
        "prediction": number("prediction", pa.int32()),
        "correct": pa.array(values["prediction"] == values["label"]),
        "d_low": number("d_low", pa.float32()),
        "d_high": number("d_high", pa.float32()),
        "r": number("r", pa.float32()),
        "J": number("J", pa.float32()),
        "score": number("score", pa.float32()),
        "gated": number("gated", pa.bool_()),
        "sigma": number("sigma", pa.float32()),
        "passes": number("passes", pa.float32()),
        "backward_passes": number("backward_passes", pa.int32()),
        "queries": number("queries", pa.int64()),
        "seed": pa.array(np.full(count, block.seed, np.int64)),
        "attack_seed": pa.array(np.full(count, recipe.seed, np.int64)),
    }
    return pa.table(columns)


def write_per_image(path: Path, tables: Sequence[Any]) -> None:
    """Write one compressed Parquet file atomically."""
    pa = require("pyarrow", "writing per-image results", extra="eval")
    parquet = require("pyarrow.parquet", "writing per-image results", extra="eval")
    merged = pa.concat_tables(tables).unify_dictionaries()
    sink = pa.BufferOutputStream()
    parquet.write_table(merged, sink, compression="zstd")
    with storage.atomic_path(path) as temporary:
        # Written by Python, so that a full disk is an OSError with a reason.
        temporary.write_bytes(sink.getvalue())
