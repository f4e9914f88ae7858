"""``defend_dataset``: defended features of a whole collection, by this process or by a Ray cluster.

Files are read and decoded by CPU tasks, batches are defended by workers that hold a model each, and rows go to Parquet
files in one folder. Keys that the folder already holds are skipped, so an interrupted job continues.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from react_clip.defenses import default_for
from react_clip.defenses.base import Defense
from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.preprocess import Preprocessing, to_8bit, to_float
from react_clip.scale.cluster import connected, require_versions, resources
from react_clip.scale.collection import Row, file_system, find_files, read_images
from react_clip.scale.output import OutputFolder, Summary
from react_clip.secret import Seed, described, seed_or_secret
from react_clip.storage import tensor_digest
from react_clip.zeroshot import ZeroShotClassifier

_IO_CPUS = 0.1
"""CPU share of a task that reads or writes; workers take the rest."""


def defend_dataset(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    clf: ZeroShotClassifier,
    guard: Defense | None = None,
    *,
    seed: Seed | None = None,
    secret: bytes | None = None,
    engine: Literal["local", "ray"] = "ray",
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    batch: int = 256,
    top: int = 5,
    column: str = "image",
    resume: bool = False,
    progress: bool = False,
) -> Summary:
    """Defend every image of a collection and write its feature, answers and diagnostics to Parquet.

    A row holds the numbers of ``guard(clf, image, seed)``, whichever machine computed it. ``OUT.json``, beside the
    folder, says how they were made.

    Args:
        source: photos, webdataset shards (``.tar``), Parquet files with encoded images, folders of these, or patterns
            with ``*``; several may be given, as paths or fsspec URLs (``s3://...``).
        out: a folder, or an fsspec URL, that all workers see.
        clf: CLIP with its classes.
        guard: the defence; by default the one for the encoder (:func:`react_clip.defenses.default_for`).
        seed: of the defence's random numbers, where others shall be able to repeat them.
        secret: their key, instead of a seed; by default that of the process. A job whose secret was drawn continues
            with another one.
        engine: ``"ray"``, or ``"local"`` for this process alone.
        address: of the Ray cluster, as ``host:port``; without it one is started on this machine.
        workers: model copies in the cluster; by default one per GPU, or per node if there is no GPU.
        device: where Ray workers run the model; by default GPUs if the cluster has any.
        batch: images that are defended together.
        top: number of answers in a row.
        column: of Parquet files, with the images: bytes, or a struct with a field ``bytes``.
        resume: continue in a folder that holds rows of such a job; files may have been added since.
        progress: show a bar.
    """
    sources = [os.fspath(one) for one in ([source] if isinstance(source, str | Path) else source)]
    for name, value in (("batch", batch), ("top", top), ("workers", workers)):
        if value is not None and value < 1:
            raise ReactClipError(f"--{name} is {value}; give at least 1")
    output = OutputFolder(os.fspath(out))
    for one in sources:
        if f"{output.root}/".startswith(f"{file_system(one)[1]}/"):
            raise ReactClipError(f"{out} lies in {one}, which is read; choose an --out outside of it")
    guard, seed = guard or default_for(clf.encoder), seed_or_secret(seed, secret)
    with output.locked():
        files = find_files(sources)
        done = output.claim(_description(clf, guard, seed, top), resume=resume)
        items = [{"file": file, "done": [*done[file]]} for file in files if file not in done[file]]
        if engine == "local":
            rows = itertools.chain.from_iterable(read_images(item, column) for item in items)
            _run_locally(rows, Defender(clf, guard, seed, top), output, batch, progress)
        elif items:
            with connected(address, advice="what was finished is kept, --resume continues") as ray:
                device, pool, share = resources(ray, workers, device)
                ray.data.DataContext.get_current().enable_progress_bars = progress
                read, to_pixels = partial(read_images, column=column), partial(decode, how=clf.encoder.preprocessing)
                job = (deepcopy(clf).cpu(), guard, seed, top, device, versions())
                (
                    ray.data.from_items(items, override_num_blocks=min(len(items), 1000))
                    .flat_map(read, num_cpus=_IO_CPUS)
                    .map(to_pixels, num_cpus=_IO_CPUS)
                    .map_batches(Defender, fn_constructor_args=job, batch_size=batch, compute=pool, **share)
                    .write_parquet(output.root, filesystem=output.fs, ray_remote_args={"num_cpus": _IO_CPUS})
                )
        return output.summary()


def _description(clf: ZeroShotClassifier, guard: Defense, seed: Seed, top: int) -> dict[str, Any]:
    """What decides the numbers in a row, as JSON values."""
    return {
        "model": clf.encoder.name,
        "weights": clf.encoder.fingerprint(),
        "classes": [*clf.names, tensor_digest(clf.class_features)[:16]],
        "guard": json.loads(json.dumps(guard.to_dict())),
        "seed": described(seed),
        "top": top,
    }


def _run_locally(rows: Iterator[Row], defender: Defender, output: OutputFolder, batch: int, progress: bool) -> None:
    to_pixels = partial(decode, how=defender.clf.encoder.preprocessing)
    with ThreadPoolExecutor() as pool, tqdm(unit="image", disable=None if progress else True) as bar:
        while some := list(itertools.islice(rows, batch)):
            decoded = list(pool.map(to_pixels, some))
            output.write(defender({name: np.array([row[name] for row in decoded]) for name in decoded[0]}))
            bar.update(len(some))


def decode(row: Row, how: Preprocessing) -> Row:
    """The row with uint8 ``pixels`` ``[3, size, size]`` instead of ``content``; zeros where there is an error."""
    pixels, error = np.zeros((3, how.size, how.size), np.uint8), row["error"]
    try:
        pixels = pixels if error else to_8bit(row["content"], how).numpy()
    except ReactClipError as problem:
        error = str(problem)
    return {"file": row["file"], "key": row["key"], "error": error, "pixels": pixels}


class Defender:
    """Turns a batch of decoded rows into a table of answers; on a cluster an actor with a copy of the model."""

    def __init__(
        self,
        clf: ZeroShotClassifier,
        guard: Defense,
        seed: Seed,
        top: int,
        device: str | None = None,
        driver: Mapping[str, str] | None = None,
    ) -> None:
        require_versions(driver or {})
        self.clf, self._guard, self._seed, self._top = clf.to(device or clf.device), guard, seed, top

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """A pyarrow table with one row per image: feature, answers and diagnostics, or an error."""
        pa = require("pyarrow", "writing Parquet", extra="eval")
        good = np.flatnonzero(batch["error"] == "")
        # All parts must have the same columns, so an empty image is defended where none is good.
        pixels = torch.tensor(batch["pixels"][good if len(good) else [0]])
        out = self._guard(self.clf, to_float(pixels.to(self.clf.device)), seed=self._seed)
        best = out.probs.topk(min(self._top, len(self.clf.names)), dim=-1)
        answers = (out.to_dict(), out.features.float().tolist(), best.values.tolist(), best.indices.tolist())
        rows = [{name: batch[name][i] or None for name in ("file", "key", "error")} for i in range(len(batch["error"]))]
        for row, measured, feature, probs, classes in zip(good, *answers, strict=False):
            labels = [self.clf.names[k] for k in classes]
            rows[row] |= {**measured, "feature": feature, "label": labels[0], "labels": labels, "probs": probs}
        real, text = pa.float32(), pa.string()
        kinds = dict.fromkeys(("file", "key", "error", "label"), text) | {"gated": pa.bool_(), "passes": real}
        kinds |= {"feature": pa.list_(real), "labels": pa.list_(text), "probs": pa.list_(real)}
        kinds |= {name: pa.bool_() if value.dtype == torch.bool else real for name, value in out.diagnostics.items()}
        return pa.Table.from_pylist(rows, pa.schema(kinds))
