"""Per-image results as one Parquet file: every number of every table can be computed again from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from react_clip import storage
from react_clip.evaluation.recipe import Recipe
from react_clip.evaluation.runner import Block
from react_clip.optional import require


def to_table(recipe: Recipe, blocks: Sequence[Block]) -> Any:
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
        "passes": number("passes", pa.int32()),
        "backward_passes": number("backward_passes", pa.int32()),
        "queries": number("queries", pa.int64()),
        "seed": pa.array(np.full(count, block.seed, np.int64)),
        "attack_seed": pa.array(np.full(count, recipe.seed, np.int64)),
    }
    return pa.table(columns)


def write(path: Path, tables: Sequence[Any]) -> None:
    """One compressed file, whole or not at all."""
    pa = require("pyarrow", "writing per-image results", extra="eval")
    parquet = require("pyarrow.parquet", "writing per-image results", extra="eval")
    merged = pa.concat_tables(tables).unify_dictionaries()
    sink = pa.BufferOutputStream()
    parquet.write_table(merged, sink, compression="zstd")
    with storage.atomic_path(path) as temporary:
        # Written by Python, so that a full disk is an OSError with a reason.
        temporary.write_bytes(sink.getvalue())
