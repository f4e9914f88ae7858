"""From per-image results to the rows of a result, and to the Parquet file from which all of them can be recomputed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from react_clip import storage
from react_clip.evaluation import metrics
from react_clip.evaluation.recipe import CLEAN, MEAN, LabelledAttack, Recipe
from react_clip.evaluation.result import AttackRow, Row, grouped
from react_clip.evaluation.runner import PART

if TYPE_CHECKING:
    import pandas as pd

_GROUP = ["dataset", "attack", "eps", "defense"]


def summarise(recipe: Recipe, tables: Sequence[pd.DataFrame]) -> tuple[list[Row], list[AttackRow]]:
    """Rows of every set, attack and defence, and rows of the attacks, from the per-image results of each set.

    An attack that knows the defence has one row per defence, a suite also one per member.
    """
    attacks = {(item.label, item.eps): item for item in recipe.attacks}
    defenses = {item.label: item.defense for item in recipe.defenses}
    rows: list[Row] = []
    attack_rows: list[AttackRow] = []
    groups = (table.groupby(_GROUP, sort=False, observed=True) for table in tables)
    for (dataset, label, eps, defense), group in itertools.chain.from_iterable(groups):
        row = Row(dataset, label, eps, defense, recipe.threat, recipe.scoring, **_numbers(recipe, group))
        rows.append(row)
        item = attacks.get((label, eps))
        # Other attacks made the same images for all defences, so the first one's rows hold everything.
        if item is not None and (item.adaptive or defense == recipe.defenses[0].label):
            members = [member.name for member in item.attack.members_for(defenses[defense])]
            attack_rows += _attack_rows(recipe, item, row, group, members)
    return rows + [row for table in tables for row in _worst_case_rows(recipe, table)], attack_rows


def _worst_case_rows(recipe: Recipe, table: pd.DataFrame) -> Iterator[Row]:
    """The worst case per image over the attacks of ``worst_of``: right only if it is right under each of them.

    Its budget is the largest of these attacks, gates and passes are means over them.
    """
    items = recipe.worst_case_over()
    if not items:
        return
    titles = {(item.label, item.eps) for item in items}
    chosen = table[[title in titles for title in zip(table["attack"], table["eps"], strict=True)]]
    by_image = {"attacked": "any", "correct": "all", "gated": "mean", "passes": "mean", "backward_passes": "mean"}
    same = dict.fromkeys(("label", "clean_prediction", "attack"), "first")
    for (dataset, defense), group in chosen.groupby(["dataset", "defense"], sort=False, observed=True):
        images = group.groupby(["draw", "index"], sort=True).agg({**by_image, **same}).reset_index()
        name, eps = f"worst of {len(items)}", max(item.eps for item in items)
        yield Row(dataset, name, eps, defense, recipe.threat, recipe.scoring, **_numbers(recipe, images))


def _numbers(recipe: Recipe, group: pd.DataFrame) -> dict[str, Any]:
    """The numbers of a row from all draws of one defence under one attack on one set."""
    first = group[group["draw"] == 0]
    clean_correct = (first["clean_prediction"] == first["label"]).to_numpy()
    attacked = first["attacked"].to_numpy()
    correct, gated = (group[name].to_numpy().reshape(recipe.draws, -1) for name in ("correct", "gated"))
    accuracy, low, high = metrics.wilson(metrics.accuracy(correct), len(first))
    leaked = metrics.leakage(clean_correct, attacked, correct)
    # Under attack, gates are counted on attacked images that CLIP gets right clean.
    clean = first["attack"].iloc[0] == CLEAN
    return {
        "n": len(first),
        "attacked": int(attacked.sum()),
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "worst": metrics.worst_of(correct),
        "majority": metrics.majority(correct),
        "leakage": leaked,
        "leakage_share": leaked / len(first),
        "gate_rate": metrics.gate_rate(gated, clean_correct if clean else clean_correct & attacked),
        "passes": float(group["passes"].mean()),
        "backward_passes": float(group["backward_passes"].mean()),
    }


def _attack_rows(
    recipe: Recipe, item: LabelledAttack, row: Row, group: pd.DataFrame, members: Sequence[str]
) -> list[AttackRow]:
    """The row of an attack and those of its members; ``group`` holds all draws of one defence."""
    first = group[group["draw"] == 0]
    attacked = first["attacked"].to_numpy()
    share = first["attack_success"].to_numpy().astype(float)
    if item.adaptive:
        share = 1.0 - group["correct"].to_numpy().reshape(recipe.draws, -1).mean(0)
    whole = AttackRow(
        dataset=row.dataset,
        attack=row.attack,
        eps=row.eps,
        config=repr(item.attack),
        attacked=row.attacked,
        success_rate=_mean(share[attacked]),
        lost_to_rounding=int((first["crafted_success"].to_numpy() & (share <= 0.5)).sum()),
        queries=_mean(first["queries"].to_numpy()[attacked]),
        defense=row.defense if item.adaptive else "",
    )
    rows = [whole]
    for name in members:
        tried = first[PART + name].dropna().to_numpy()
        part = replace(whole, part=name, attacked=len(tried), success_rate=_mean(tried))
        rows.append(replace(part, lost_to_rounding=0, queries=math.nan))
    return rows


def _mean(values: np.typing.NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """The unweighted mean over sets of every attack and defence; counts are summed."""
    return [_mean_row(group) for group in grouped(rows, "attack", "eps", "defense").values()]


def _mean_row(group: list[Row]) -> Row:
    accuracy, low, high = metrics.mean_over_sets([row.accuracy for row in group], [row.n for row in group])
    values: dict[str, Any] = {name: sum(getattr(row, name) for row in group) for name in ("n", "attacked", "leakage")}
    for name in ("worst", "majority", "gate_rate", "passes", "backward_passes"):
        measured = [value for row in group if not math.isnan(value := getattr(row, name))]
        values[name] = math.fsum(measured) / len(measured) if measured else math.nan
    values["leakage_share"] = values["leakage"] / values["n"]
    return replace(group[0], dataset=MEAN, accuracy=accuracy, low=low, high=high, **values)


def write_per_image(path: Path, tables: Sequence[pd.DataFrame]) -> None:
    """Write the per-image results of all sets as one compressed Parquet file, whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = [name for name in tables[0].columns if name != "crafted_success" and not name.startswith(PART)]
    merged = pa.concat_tables([pa.Table.from_pandas(table[columns], preserve_index=False) for table in tables])
    sink = pa.BufferOutputStream()
    parquet.write_table(merged.unify_dictionaries(), sink, compression="zstd")
    with storage.atomic_path(path) as temporary:
        # Written by Python, so that a full disk is an OSError with a reason.
        temporary.write_bytes(sink.getvalue())
