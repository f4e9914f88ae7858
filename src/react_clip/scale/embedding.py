"""``defend_dataset``: defended features of a whole collection, by this process or by the workers of a Ray cluster.

Both engines run the same worker on the same chunks. A chunk is defended in one call, so that the first passes of its
images fill batches together, and so do the further views of those images that need them. No batch spans two chunks:
a part holds the same bits whichever worker made it, in whatever order, however often the job was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from react_clip.defenses import resolve_guard
from react_clip.defenses.base import MEASUREMENTS, Defended, Defense, diagnostics
from react_clip.defenses.look_calibration import Photos
from react_clip.encoders import load
from react_clip.environment import __version__, device_name
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.optional import require
from react_clip.preprocess import Preprocessing, as_preprocessing, from_8bit, read_image
from react_clip.scale import collection
from react_clip.scale.cluster import connected
from react_clip.scale.collection import Chunk
from react_clip.scale.output import OutputFolder, PartStats, part_name
from react_clip.scale.runner import Allocation, WorkerPool
from react_clip.zeroshot import ZeroShotClassifier

MAX_CHUNK = 4096
_THREADS = {"cpu": 2, "cuda": 4}
"""Chunks that a worker handles at the same time: one is computed, the others are read, decoded or written."""

_WORKERS_PER_GPU = 2
"""Two, so that one reads and writes while the other computes."""

log = logging.getLogger("react_clip.scale")


@dataclass(frozen=True)
class Summary:
    """Counts over all parts in the output folder after a job."""

    out: str
    images: int
    errors: int
    """Images that could not be decoded: rows with an error and nothing else."""
    gated: int
    """Images whose features the defence changed."""
    passes: float
    """Encoder passes spent on all images; a pass at a smaller size counts as its share of the tokens."""
    parts: int
    missing: tuple[str, ...]
    """One line for each chunk or shard that could not be read; a resumed job tries them again."""


def defend_dataset(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    clf: ZeroShotClassifier,
    guard: Defense | str | None = None,
    *,
    photos: Photos | None = None,
    seed: Seed = 0,
    engine: Literal["local", "ray"] = "ray",
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    chunk: int = 256,
    top: int = 5,
    column: str = "image",
    resume: bool = False,
    progress: bool = False,
) -> Summary:
    """Defend every image of a collection and write its feature, answers and diagnostics to Parquet.

    A row holds the numbers of ``guard(clf, image, seed)``, whichever machine computed it. A finished part stays when
    the job fails, and is not computed again when it is resumed.

    Args:
        source: photos, webdataset shards (``.tar``), Parquet files with encoded images, folders of these, or patterns
            with ``*``; several may be given, as paths or fsspec URLs (``s3://...``).
        out: a folder, or an fsspec URL, that all workers see.
        clf: CLIP with its classes. Workers load its encoder by name.
        guard: the defence; by default the one for the encoder (:func:`react_clip.defenses.default_for`). ``"auto"``
            calibrates SecondLook on ``photos``.
        photos: for ``guard="auto"``: some hundred clean photos like those of the collection.
        seed: of the defence's random numbers.
        engine: ``"ray"``, or ``"local"`` for this process alone. Both write the same parts.
        address: of the Ray cluster, as ``host:port``; without it one is started on this machine.
        workers: model copies in the cluster; by default two per GPU, or one per CPU core if there is no GPU.
        device: where Ray workers run the model; by default GPUs if the cluster has any.
        chunk: images that are read, defended and written together.
        top: number of answers in a row.
        column: of Parquet files, with the images: bytes, or a struct with a field ``bytes``.
        resume: continue in a folder that holds finished parts of this very job.
        progress: show a bar.
    """
    sources = [os.fspath(one) for one in ([source] if isinstance(source, str | Path) else source)]
    if not 1 <= chunk <= MAX_CHUNK:
        raise ReactClipError(f"--chunk is {chunk}; give 1 to {MAX_CHUNK}")
    for name, value in (("top", top), ("workers", workers)):
        if value is not None and value < 1:
            raise ReactClipError(f"--{name} is {value}; give at least 1")
    output = OutputFolder(os.fspath(out))
    _check_locations(sources, output, engine)
    guard = resolve_guard(guard, clf.encoder, photos, features=True)
    with output.locked():
        files = collection.find_files(sources)
        chunks, missing = collection.cut(files, chunk, column)
        if not chunks:
            raise ReactClipError(missing[0] if missing else f"{', '.join(sources)}: there is no image in them")
        plan = {
            "sources": sources,
            **collection.fingerprints(files),
            **_model_plan(clf, guard, seed),
            **{"chunk": chunk, "top": top, "column": column, "version": __version__},
        }
        job = _Job(output.url, guard, seed, plan)
        parts = output.claim(plan, resume=resume)
        _check_parts(job, chunks, parts)
        waiting = [one for one in chunks if one.name not in parts]
        if engine == "local":
            results = _run_locally(_Worker(clf, job), waiting, _THREADS.get(clf.device.type, 2))
        else:
            results = _run_on_cluster(clf, job, waiting, address, workers, device)
        left, total = (sum(one.count for one in some) for some in (waiting, chunks))
        with tqdm(total=total, initial=total - left, unit="image", disable=None if progress else True) as bar:
            for one, result in results:
                if isinstance(result, PartStats):
                    parts[one.name] = result
                elif result not in missing:
                    missing.append(result)
                bar.update(one.count)
    sums = {key: sum(getattr(part, key) for part in parts.values()) for key in ("images", "errors", "gated")}
    # fsum gives the same in any order of the parts.
    passes = math.fsum(part.passes for part in parts.values())
    return Summary(out=output.url, **sums, passes=passes, parts=len(parts), missing=tuple(missing))


@dataclass(frozen=True, eq=False)
class _Job:
    """Inputs of a worker beside its model."""

    out: str
    guard: Defense
    seed: Seed
    plan: dict[str, Any]
    """Everything that decides what the rows hold, as JSON values; a resumed job must have the same."""

    def source(self, chunk: Chunk) -> str:
        """Hash of the job and a chunk; the chunk's part carries it."""
        return hashlib.sha256(json.dumps([self.plan, asdict(chunk)], sort_keys=True).encode()).hexdigest()[:16]


def _model_plan(clf: ZeroShotClassifier, guard: Defense, seed: Seed) -> dict[str, Any]:
    classes = hashlib.sha256(json.dumps(clf.names).encode())
    classes.update(clf.class_features.float().cpu().numpy().tobytes())
    return {
        "model": clf.encoder.name,
        "weights": clf.encoder.fingerprint(),
        "classes": classes.hexdigest()[:16],
        "guard": json.loads(json.dumps(guard.to_dict())),
        # A secret seed is only shown as a hash.
        "seed": seed if isinstance(seed, int) else "secret " + hashlib.blake2b(seed, digest_size=8).hexdigest(),
    }


def _check_locations(sources: Sequence[str], output: OutputFolder, engine: str) -> None:
    if engine not in ("local", "ray"):
        raise ReactClipError(f"engine is {engine!r}; choose local or ray")
    if not sources:
        raise ReactClipError("no source is given; name at least one folder, file or URL")
    require("pyarrow", "writing Parquet", extra="scale")
    for source in sources:
        folder, out = collection.local_path(source), output.local
        if folder is not None and out is not None and out.resolve().is_relative_to(folder.resolve()):
            raise ReactClipError(f"{output.url} lies in {source}, which is read; choose an --out outside of it")


def _check_parts(job: _Job, chunks: Sequence[Chunk], parts: Mapping[str, PartStats]) -> None:
    """Raise if a finished part was made from other content of its shard."""
    for chunk in chunks:
        if chunk.name in parts and parts[chunk.name].source != job.source(chunk):
            part = f"{job.out}/{part_name(chunk.name)}"
            raise ReactClipError(f"{part} was made from another {chunk.files[0].url}; choose another --out")


# ---------------------------------------------------------------------- engines

Result = PartStats | str
"""The counts of a part, or the line that says why a chunk could not be read."""


def _run_locally(worker: _Worker, chunks: Sequence[Chunk], threads: int) -> Iterator[tuple[Chunk, Result]]:
    # torch.set_num_threads counts for the calling thread only.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as pool:
        yield from zip(chunks, pool.map(worker, chunks), strict=True)


def _run_on_cluster(
    clf: ZeroShotClassifier,
    job: _Job,
    chunks: Sequence[Chunk],
    address: str | None,
    workers: int | None,
    device: str | None,
) -> Iterator[tuple[Chunk, Result]]:
    if not chunks:
        return
    with connected(address) as ray:
        allocation = Allocation.choose(ray, workers, device, per_gpu=_WORKERS_PER_GPU)
        allocation = replace(allocation, workers=min(allocation.workers, len(chunks)))
        features = clf.class_features.float().cpu()
        build = partial(_build_worker, job, allocation.device, clf.encoder.dtype, clf.names, features)
        try:
            with WorkerPool(ray, build, allocation, threads=_THREADS[allocation.device], log=log) as pool:
                yield from pool.run(chunks)
        except ReactClipError as error:
            raise ReactClipError(f"{error}; what was finished is kept, --resume continues") from error


def _build_worker(job: _Job, device: str, dtype: torch.dtype, names: Sequence[str], features: Tensor) -> _Worker:
    """Load the model in a worker's process; raises if this node has other weights or does not see the output."""
    node, model, weights = platform.node(), job.plan["model"], job.plan["weights"]
    if OutputFolder(job.out).read_plan() != job.plan:
        raise ReactClipError(f"node {node} does not see {job.out}; give a folder or URL that all nodes share")
    encoder = load(model, device=device, dtype=dtype)
    if (here := encoder.fingerprint()) != weights:
        raise ReactClipError(
            f"node {node} has other weights of {model!r} ({here}, the driver {weights}); copy the model there"
        )
    clf = ZeroShotClassifier.from_features(encoder, names, features, unique=False)
    clf.class_features.copy_(features)  # bit by bit: normalising unit features again may change the last one
    return _Worker(clf, job)


class _Worker:
    """Turns chunks into parts. Threads may share it: they decode at the same time and use the model in turn."""

    def __init__(self, clf: ZeroShotClassifier, job: _Job) -> None:
        self._clf, self._job, self._output = clf, job, OutputFolder(job.out)
        self._lock = threading.Lock()
        self.device = device_name(clf.device)

    def __call__(self, chunk: Chunk) -> Result:
        """Write the part of a chunk and return its counts; a line if the chunk cannot be read."""
        # A worker may have died between writing a part and reporting it.
        if (stats := self._output.finished(chunk.name)) is not None:
            return stats
        job = self._job
        try:
            rows, pixels = decode(chunk, self._clf.encoder.preprocessing, job.plan["column"])
        except ReactClipError as error:
            return str(error)
        good = [row for row in rows if row["error"] is None]
        if good:
            with self._lock:
                defended = job.guard(self._clf, _to_float(pixels, self._clf.device), seed=job.seed)
            _add_answers(good, defended, self._clf, job.plan["top"])
        stats = PartStats(
            source=job.source(chunk),
            images=len(rows),
            errors=len(rows) - len(good),
            gated=sum(row["gated"] for row in good),
            passes=math.fsum(row["passes"] for row in good),
        )
        self._output.write(chunk.name, _table(rows, self._clf.encoder.dim), stats)
        return stats


# ---------------------------------------------------------------------- one chunk

Row = dict[str, Any]
"""Columns of one image; a missing one becomes null."""


def decode(chunk: Chunk, how: Preprocessing | int, column: str) -> tuple[list[Row], NDArray[np.uint8]]:
    """Rows with ``key`` and ``error`` of all images, and pixels ``[images without error, size, size, 3]``.

    Raises if the chunk as a whole cannot be read.
    """
    prepare = as_preprocessing(how)
    pixels = np.empty((chunk.count, prepare.size, prepare.size, 3), np.uint8)
    rows: list[Row] = []
    good = 0
    for key, content in collection.read_chunk(chunk, column):
        error = None
        try:
            if isinstance(content, ReactClipError):
                raise content
            pixels[good] = np.asarray(prepare(read_image(content)))
            good += 1
        except ReactClipError as failure:
            error = str(failure)
        rows.append({"key": key, "error": error})
    return rows, pixels[:good]


def _to_float(pixels: NDArray[np.uint8], device: torch.device) -> Tensor:
    """``[B, 3, S, S]`` in [0, 1], bit by bit as :func:`react_clip.preprocess.to_pixels`."""
    return from_8bit(torch.tensor(pixels).to(device).permute(0, 3, 1, 2).contiguous())


def _add_answers(rows: list[Row], defended: Defended, clf: ZeroShotClassifier, top: int) -> None:
    """Add features, answers and measurements to the rows of decoded images."""
    best = defended.probs.topk(min(top, len(clf.names)), dim=-1)
    features, probs = defended.features.float().cpu().numpy(), best.values.float().cpu().numpy()
    measured = diagnostics(defended)
    for i, (row, classes) in enumerate(zip(rows, best.indices.tolist(), strict=True)):
        labels = [clf.names[k] for k in classes]
        row |= {"feature": features[i], "label": labels[0], "labels": labels, "probs": probs[i], **measured[i]}


def _table(rows: list[Row], dim: int) -> Any:
    """A pyarrow table with one row per image."""
    pa = require("pyarrow", "writing Parquet", extra="scale")
    columns = {"key": pa.string(), "error": pa.string(), "feature": pa.list_(pa.float32(), dim)}
    columns |= {"label": pa.string(), "labels": pa.list_(pa.string()), "probs": pa.list_(pa.float32())}
    columns |= dict.fromkeys((*MEASUREMENTS, "passes"), pa.float32()) | {"gated": pa.bool_()}
    return pa.Table.from_pylist(rows, pa.schema(columns))
