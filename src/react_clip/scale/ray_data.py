"""The Ray engine of ``defend_dataset``: one pool of actors decodes, another one holds the model and defends.

One block of the data set is one parcel, from the first stage to the last, so that a retry, wherever it happens, repeats
one parcel and nothing else. Decoded pixels pass the object store once; actors write the parts themselves, and what
comes back to the driver is a line a parcel. Tasks that are run again after a failure find the part of a finished parcel
and leave it alone.
"""

from __future__ import annotations

import copy
import json
import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from react_clip.defenses.base import Defense
from react_clip.encoders import load
from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.noise import Seed
from react_clip.optional import require
from react_clip.scale.cluster import connected
from react_clip.scale.embedding import Job, Outcome
from react_clip.scale.parcels import Parcel
from react_clip.scale.parts import Parts, Tally
from react_clip.scale.work import Decoded, Defender, decode
from react_clip.zeroshot import ZeroShotClassifier

_BUSY, _IDLE = 0.75, 0.25
"""Shares of a core: it has room for one worker and one decoder, whichever of them has more to do."""

_WORKERS_PER_DECODER = 4
"""Without GPUs. A photo is decoded in a few hundredths of the time that CPUs need to encode and probe it."""

_WORKERS_PER_GPU = 2
"""One prepares and writes while the other computes."""


@dataclass(frozen=True, eq=False)
class _Order:
    """What travels to the workers."""

    model: str
    dtype: torch.dtype
    device: str
    weights: str
    size: int
    names: tuple[str, ...]
    features: Any
    guard: Defense
    out: str
    identity: str
    base: str
    column: str
    seed: Seed
    top: int
    software: dict[str, str]


def on_cluster(
    job: Job, parcels: Sequence[Parcel], *, address: str | None, workers: int | None, device: str | None
) -> Iterator[tuple[int, Outcome]]:
    """Have the parcels done; what came of each, in the order in which they end."""
    if not parcels:
        return
    require("ray.data", "working on a cluster", extra="scale")
    with connected(address) as ray:
        pool = _Pool.of(ray, workers, device, len(parcels))
        order = _order(job, pool.device)
        held = 2 * (pool.workers + pool.decoders) * max(parcel.count for parcel in parcels) * order.size**2 * 3
        try:
            with _settings(ray, held):
                finished = _pipeline(ray, order, parcels, pool)
            for batch in finished.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                for note in map(json.loads, batch.column("note").to_pylist()):
                    yield note["number"], _outcome(note)
        except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
            raise ReactClipError(
                f"the cluster gave up ({first_line(error)}); what was finished is kept, --resume continues"
            ) from None


@dataclass(frozen=True)
class _Pool:
    """How many workers hold the model, how many decoders feed them, and what each of them gets."""

    device: str
    workers: int
    worker_cpus: float
    worker_gpus: float
    decoders: int
    decoder_cpus: float

    @classmethod
    def of(cls, ray: Any, workers: int | None, device: str | None, parcels: int) -> _Pool:
        """What the cluster has room for; never more workers than parcels."""
        have = ray.cluster_resources()
        cores, gpus = int(have.get("CPU", 0)), int(have.get("GPU", 0))
        if device is None:
            device = "cuda" if gpus else "cpu"
        if device == "cpu":
            if (workers or cores) > cores:
                raise ReactClipError(f"--workers is {workers}; the cluster has {cores} CPU cores, one for each")
            size = min(workers or cores, parcels)
            return cls(device, size, _BUSY, 0, -(-size // _WORKERS_PER_DECODER), _IDLE)
        if not gpus:
            raise ReactClipError(f"--device is {device}, but the cluster has no GPU; leave it out to use CPUs")
        size = min(workers or _WORKERS_PER_GPU * gpus, parcels)
        return cls("cuda", size, _IDLE, 1 / -(-size // gpus), min(cores, parcels), _BUSY)


def _pipeline(ray: Any, order: _Order, parcels: Sequence[Parcel], pool: _Pool) -> Any:
    """Decoders are actors like the workers: a process that has loaded the library is too dear to start for a parcel.

    Ray Data restarts actors that die and runs their tasks again, as often as it takes.
    """
    whole = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
    actors = ray.data.ActorPoolStrategy
    decoded = blocks(ray, parcels).map_batches(
        _Decoder,
        **whole,
        fn_constructor_args=(order.out, order.identity, order.base, order.size, order.column),
        compute=actors(size=pool.decoders, max_tasks_in_flight_per_actor=2),
        num_cpus=pool.decoder_cpus,
    )
    return decoded.map_batches(
        _Worker,
        **whole,
        fn_constructor_args=(order,),
        compute=actors(size=pool.workers, max_tasks_in_flight_per_actor=2),
        num_cpus=pool.worker_cpus,
        num_gpus=pool.worker_gpus or None,
    )


def blocks(ray: Any, parcels: Sequence[Parcel]) -> Any:
    """The data set to begin with: one block a parcel, so that one parcel is what is sent, and sent again."""
    rows = [{"parcel": parcel.to_json()} for parcel in parcels]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


# ---------------------------------------------------------------------- in the workers


class _Decoder:
    """An actor that turns a parcel into a note and its pixels; a finished or unreadable one into a note alone."""

    def __init__(self, out: str, identity: str, base: str, size: int, column: str) -> None:
        self._parts, self._identity = Parts(out, base), identity
        self._base, self._size, self._column = base, size, column

    def __call__(self, table: Any) -> Any:
        parcel = Parcel.from_json(table.column("parcel")[0].as_py())
        note: dict[str, Any] = {"number": parcel.number}
        try:
            if (tally := self._parts.finished(parcel.number, self._identity)) is not None:
                return _block({**note, "tally": asdict(tally)})
            decoded = decode(parcel, self._size, self._base, self._column)
        except ReactClipError as error:
            return _block({**note, "missing": str(error)})
        return _block({**note, "keys": decoded.keys, "errors": decoded.errors}, decoded.pixels)


class _Worker:
    """An actor that holds the model; it loads it with its first parcel, so that what fails there is a line as well."""

    def __init__(self, order: _Order) -> None:
        self._order = order
        self._parts = Parts(order.out, order.base)
        self._defender: Defender | None = None

    def __call__(self, table: Any) -> Any:
        note = json.loads(table.column("note")[0].as_py())
        if "keys" not in note:
            return _block(note)
        number, size = note["number"], self._order.size
        pixels = np.frombuffer(table.column("pixels")[0].as_buffer(), np.uint8).reshape(-1, size, size, 3)
        try:
            # A task that is run again because its answer got lost, not its part.
            tally = self._parts.finished(number, self._order.identity)
            if tally is None:
                self._defender = self._defender or _defender(self._order)
                tally = self._defender(Decoded(number, note["keys"], note["errors"], pixels))
        except ReactClipError as error:
            return _block({"number": number, "fatal": str(error)})
        except Exception as error:  # out of memory, say; Ray would wrap it in a page
            reason = f"{type(error).__name__}: {first_line(error)}"
            return _block({"number": number, "fatal": f"a worker failed on parcel {number} ({reason})"})
        return _block({"number": number, "tally": asdict(tally)})


def _defender(order: _Order) -> Defender:
    """Load the model here, and make sure that this machine is one of those that were meant."""
    here = platform.node()
    if (ours := versions()) != order.software:
        raise ReactClipError(f"node {here} has {ours}, the driver {order.software}; install the same versions on both")
    parts = Parts(order.out, order.base)
    if parts.read_plan() is None:
        raise ReactClipError(f"node {here} does not see {order.out}; give a folder or URL that all nodes share")
    # Names of models may be paths, which count from where the driver was started.
    with chdir(order.base) if Path(order.base).is_dir() else nullcontext():
        encoder = load(order.model, device=order.device, dtype=order.dtype)
    if (found := encoder.fingerprint()) != order.weights:
        raise ReactClipError(
            f"node {here} has other weights of {order.model!r} ({found}, the driver {order.weights}); copy the model "
            "there"
        )
    features = torch.tensor(order.features)
    clf = ZeroShotClassifier.from_features(encoder, order.names, features, unique=False)
    clf.class_features.copy_(features)  # to the last bit: scaling unit features to unit length may move it
    return Defender(clf, order.guard, parts, order.identity, seed=order.seed, top=order.top)


def _block(note: dict[str, Any], pixels: Any = None) -> Any:
    """A row with a note, and the pixels as they lie in memory."""
    import pyarrow as pa

    columns = {"note": pa.array([json.dumps(note)])}
    if pixels is not None:
        ends = pa.py_buffer(np.array([0, pixels.nbytes], np.int64))
        columns["pixels"] = pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(pixels)])
    return pa.table(columns)


# ---------------------------------------------------------------------- in the driver


def _order(job: Job, device: str) -> _Order:
    encoder = job.clf.encoder
    return _Order(
        model=encoder.name,
        dtype=encoder.dtype,
        device=device,
        weights=encoder.fingerprint(),
        size=encoder.image_size,
        names=job.clf.names,
        features=job.clf.class_features.float().cpu().numpy(),
        guard=job.guard,
        out=job.out,
        identity=job.identity,
        base=job.base,
        column=job.column,
        seed=job.seed,
        top=job.top,
        software=versions(),
    )


def _outcome(note: dict[str, Any]) -> Outcome:
    """What came of a parcel; what would befall every other parcel too ends the job."""
    if "fatal" in note:
        raise ReactClipError(f"{note['fatal']}; what was finished is kept, --resume continues")
    return Tally(**note["tally"]) if "tally" in note else ReactClipError(note["missing"])


@contextmanager
def _settings(ray: Any, held: int) -> Iterator[None]:
    """Ray Data's settings for one data set: silent, and holding no more decoded pixels than the workers need next."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters of it is raised as well
    context = ray.data.DataContext
    before = context.get_current()
    ours = copy.deepcopy(before)
    ours.enable_progress_bars = False
    ours.print_on_execution_start = False
    ours.execution_options.preserve_order = False
    ours.execution_options.resource_limits = ours.execution_options.resource_limits.copy(object_store_memory=held)
    context._set_current(ours)
    try:
        yield
    finally:
        context._set_current(before)
