"""Defended features of a collection that no memory holds: ``defend_dataset``, on this machine or on a Ray cluster."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from react_clip.defenses import Defense, ReACT
from react_clip.errors import ReactClipError
from react_clip.noise import Seed
from react_clip.optional import require
from react_clip.scale.files import in_this_process, local_path
from react_clip.scale.parcels import Parcel
from react_clip.scale.parts import Parts, Tally
from react_clip.scale.plan import Plan
from react_clip.scale.work import Defender, decode
from react_clip.zeroshot import ZeroShotClassifier

Engine = Literal["local", "ray"]
Outcome = Tally | ReactClipError
"""What came of a parcel: its sums, or why it is missing."""

MOST_IN_PARCEL = 4096
_DECODERS = 2
"""Parcels that the local engine decodes ahead of the encoder."""


@dataclass(frozen=True)
class Summary:
    """What the output folder holds after a job."""

    out: str
    images: int
    errors: int
    """Images among them that could not be decoded: rows with an error and nothing else."""
    opened: int
    """Images whose gate opened."""
    passes: int
    """Encoder passes spent on all of them."""
    parts: int
    missing: tuple[str, ...]
    """One line for each parcel or shard that could not be read; a job that continues tries them again."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "missing": list(self.missing)}


def defend_dataset(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    clf: ZeroShotClassifier,
    guard: Defense | None = None,
    *,
    seed: Seed = 0,
    engine: Engine = "ray",
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    parcel: int = 256,
    top: int = 5,
    column: str = "image",
    resume: bool = False,
    progress: bool = False,
) -> Summary:
    """Defend every image of a collection and write its feature, answers and diagnostics to Parquet.

    The numbers are those of ``guard(clf, images, seed)``, image by image, on whatever machines. Every finished part
    stays, whatever happens later, and is never made again.

    Args:
        source: photos, webdataset shards (``.tar``), Parquet files with encoded images, folders of these, or patterns
            with ``*``; several may be given, as paths or fsspec URLs (``s3://...``).
        out: a folder, or an fsspec URL, that all workers see.
        clf: CLIP with its classes. Workers load its encoder by name.
        guard: the defence; what was calibrated for the encoder by default.
        seed: of the noise.
        engine: ``"ray"``, or ``"local"`` for this process alone. Both write the same parts.
        address: the Ray cluster's, as ``host:port``; without it one is started on this machine.
        workers: model copies in the cluster; by default two a GPU, or one a CPU core where there is no GPU.
        device: where Ray workers run the model; GPUs where the cluster has any by default.
        parcel: images that are read, defended and written as one.
        top: how many answers a row lists.
        column: where Parquet files keep the images: bytes, or a struct with a field ``bytes``.
        resume: continue in a folder that holds finished parts of this very job.
        progress: show a bar.
    """
    base = str(Path.cwd())
    sources = [os.fspath(one) for one in ([source] if isinstance(source, str | Path) else source)]
    guard = ReACT.constants_for(clf.encoder) if guard is None else guard
    _check(parcel=parcel, top=top, workers=1 if workers is None else workers)
    parts = Parts(os.fspath(out), base)
    _check_places(sources, parts.url, base, engine)
    with parts.held():
        earlier = parts.read_plan()
        asked = _asked(sources, clf, guard, seed=seed, parcel=parcel, top=top, column=column)
        plan = Plan.make(sources, base, asked, earlier)
        if not any(plan.parcels()):
            raise ReactClipError(next(iter(plan.broken.values()), f"{', '.join(sources)}: there is no image in them"))
        done: dict[int, Outcome] = {**parts.claim(plan, earlier, resume=resume)}
        waiting = [piece for piece in plan.parcels() if piece.number not in done]
        job = Job(clf, guard, parts.url, plan.identity, base, column, seed, top)
        if engine == "local":
            outcomes = _on_this_machine(job, waiting)
        else:
            from react_clip.scale.ray_data import on_cluster

            outcomes = on_cluster(job, waiting, address=address, workers=workers, device=device)
        total = sum(piece.count for piece in plan.parcels())
        first = total - sum(piece.count for piece in waiting)
        size = {piece.number: piece.count for piece in waiting}
        with tqdm(total=total, initial=first, unit="image", disable=None if progress else True) as bar:
            for number, outcome in outcomes:
                done[number] = outcome
                bar.update(size[number])
    return _summary(parts.url, list(done.values()), list(plan.broken.values()))


@dataclass(frozen=True, eq=False)
class Job:
    """What a worker has to know."""

    clf: ZeroShotClassifier
    guard: Defense
    out: str
    identity: str
    base: str
    column: str
    seed: Seed
    top: int

    def defender(self) -> Defender:
        """The one who does it."""
        parts = Parts(self.out, self.base)
        return Defender(self.clf, self.guard, parts, self.identity, seed=self.seed, top=self.top)


def _on_this_machine(job: Job, parcels: Sequence[Parcel]) -> Iterator[tuple[int, Outcome]]:
    """Threads decode the next parcels while the model works on this one."""
    defender, size = job.defender(), job.clf.encoder.image_size
    waiting = iter(parcels)
    with ThreadPoolExecutor(_DECODERS) as pool:

        def start(parcel: Parcel) -> tuple[int, Future[Any]]:
            return parcel.number, pool.submit(decode, parcel, size, job.base, job.column)

        ahead = deque(map(start, islice(waiting, _DECODERS)))
        while ahead:
            number, future = ahead.popleft()
            try:
                decoded = future.result()
            except ReactClipError as error:
                decoded = error
            ahead.extend(map(start, islice(waiting, 1)))
            yield number, decoded if isinstance(decoded, ReactClipError) else defender(decoded)


def _asked(
    sources: Sequence[str],
    clf: ZeroShotClassifier,
    guard: Defense,
    *,
    seed: Seed,
    parcel: int,
    top: int,
    column: str,
) -> dict[str, Any]:
    """All that decides what the rows hold, as JSON values."""
    from react_clip.environment import __version__

    classes = hashlib.sha256(json.dumps(clf.names).encode())
    classes.update(clf.class_features.float().cpu().numpy().tobytes())
    # A secret stays one: the plan only shows whether it is the same.
    shown = seed if isinstance(seed, int) else "secret " + hashlib.blake2b(seed, digest_size=8).hexdigest()
    return {
        "sources": list(sources),
        "model": clf.encoder.name,
        "weights": clf.encoder.fingerprint(),
        "classes": classes.hexdigest()[:16],
        "guard": json.loads(json.dumps(guard.to_dict())),
        "seed": shown,
        "parcel": parcel,
        "top": top,
        "column": column,
        "version": __version__,
    }


def _check(**counts: int) -> None:
    most = {"parcel": MOST_IN_PARCEL}
    for name, value in counts.items():
        if not 1 <= value <= most.get(name, value):
            limit = f"1 to {most[name]}" if name in most else "at least 1"
            raise ReactClipError(f"--{name} is {value}; give {limit}")


def _check_places(sources: Sequence[str], out: str, base: str, engine: str) -> None:
    if engine not in ("local", "ray"):
        raise ReactClipError(f"engine is {engine!r}; choose local or ray")
    if not sources:
        raise ReactClipError("no source is given; name at least one folder, file or URL")
    require("pyarrow", "writing Parquet", extra="scale")
    here = local_path(out, base)
    for place in (*sources, out):
        if engine == "ray" and in_this_process(place, base):
            raise ReactClipError(f"{place} is the memory of this process, which no worker sees; use --engine local")
    for source in sources:
        folder = local_path(source, base)
        if here is not None and folder is not None and here.resolve().is_relative_to(folder.resolve()):
            raise ReactClipError(f"{out} lies in {source}, which is read; choose an --out outside of it")


def _summary(out: str, outcomes: Sequence[Outcome], broken: Sequence[str]) -> Summary:
    tallies = [outcome for outcome in outcomes if isinstance(outcome, Tally)]
    return Summary(
        out=out,
        images=sum(tally.images for tally in tallies),
        errors=sum(tally.errors for tally in tallies),
        opened=sum(tally.opened for tally in tallies),
        passes=sum(tally.passes for tally in tallies),
        parts=len(tallies),
        missing=(*broken, *dict.fromkeys(str(outcome) for outcome in outcomes if isinstance(outcome, ReactClipError))),
    )
