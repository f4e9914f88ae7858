"""Throughput of the service relative to the library: both measured by turns in one run, on the same photos.

    python benchmarks/serve_throughput.py --images 96 --rounds 3 -- --model clip-vit-b-16

Everything after ``--`` goes to ``react-clip serve``, and the library is set up from the same flags: model, precision,
device, threads, labels, defence. The library's number is measured as ``react-clip bench`` does it: pixels are ready,
and ``--batch`` of them arrive together. The server gets the same photos as JPEG files, one a request, from
``--concurrency`` callers at once; it and its callers share the machine. Both key their noise alike, so the same gates
open. Only one of the two works at a time. The result is benchmarks/results/serve-throughput.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from _common import Server, where, write
from torch import Tensor

from react_clip import ZeroShotClassifier
from react_clip.bench import Comparison, measure
from react_clip.cli import parse_args
from react_clip.cli.common import build_classifier, build_guard, load_encoder
from react_clip.cli.photos import bundled_photos, expand_inputs
from react_clip.cli.serve import settings_of
from react_clip.defenses import Defense
from react_clip.preprocess import read_image, to_pixels
from react_clip.serve.settings import variable

SECRET = "not secret, the same for both"
SIDES = ("library", "server")
LONGEST = 640
"""Photos are scaled to this many pixels before they are saved as JPEG."""


def answer(clf: ZeroShotClassifier, guard: Defense, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Passes of the defended answers, with the server's noise: the same gates open on both sides."""
    with torch.no_grad():
        out = guard(clf, pixels, seed=SECRET.encode())
        out.labels.cpu()
    return out.passes.cpu(), out.backward_passes.cpu()


class Library:
    """The server's defence as ``react-clip bench`` measures it."""

    def __init__(self, flags: list[str], photos: list[bytes], *, batch: int) -> None:
        args = argparse.Namespace(**settings_of(parse_args(["serve", "--quiet", *flags])).model_dump())
        if args.threads:
            torch.set_num_threads(args.threads)
        encoder = load_encoder(args)
        clf = build_classifier(args, encoder)
        guard = build_guard(args, encoder).replace(max_batch=batch, lazy=not args.constant_work)
        self._contenders = {guard.kind: lambda pixels: answer(clf, guard, pixels)}
        self.defense = guard.to_dict()
        self.model, self.dtype, self.classes = encoder.name, str(encoder.dtype).removeprefix("torch."), len(clf.names)
        self._images: Tensor = torch.stack([to_pixels(photo, encoder.image_size) for photo in photos]).to(clf.device)
        self._batch = batch

    def measure(self) -> tuple[float, float]:
        """Images a second, and passes an image."""
        comparison = Comparison(self._contenders, self._images, batch=self._batch)
        for _ in measure([comparison], rounds=1, singles=1):
            pass
        [timing] = comparison.timings()
        return timing.images_per_second, timing.passes


@dataclass(frozen=True)
class Count:
    """Counters from the server's metrics."""

    images: float
    passes: float
    batches: float

    @classmethod
    def read(cls, url: str) -> Count:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        values = {name: value for name, _, value in (line.partition(" ") for line in lines)}
        names = ("react_clip_batch_images_sum", "react_clip_encoder_passes_total", "react_clip_batch_images_count")
        return cls(*(float(values[name]) for name in names))


async def answer_all(url: str, photos: list[bytes], *, concurrency: int) -> tuple[float, list[float]]:
    """Seconds until all photos are answered, and seconds of each request; any status but 200 ends the run."""
    waiting: Iterator[bytes] = iter(photos)
    each: list[float] = []

    async def call(client: httpx.AsyncClient) -> None:
        for photo in waiting:
            began = time.perf_counter()
            answer = await client.post("/v1/classify", files={"images": ("photo.jpg", photo, "image/jpeg")})
            answer.raise_for_status()
            each.append(time.perf_counter() - began)

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits, trust_env=False) as client:
        began = time.perf_counter()
        await asyncio.gather(*(call(client) for _ in range(concurrency)))
        return time.perf_counter() - began, each


def as_jpeg(path: Path) -> bytes:
    image = read_image(path)
    image.thumbnail((LONGEST, LONGEST))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def gpu_memory() -> int:
    """Bytes of the GPU's memory in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and summarize them."""
    files = [as_jpeg(path) for path in expand_inputs(args.photos or bundled_photos())[: args.images]]
    photos = [files[i % len(files)] for i in range(args.images)]
    library = Library(args.flags, photos, batch=args.batch)
    os.environ[variable("secret")] = SECRET
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        library.measure()  # so that its own memory does not grow later
    occupied = gpu_memory() if on_gpu else 0
    # A batch may take longer than the deadline that callers usually want.
    served = Server.start(["--open-metrics", "--log-level", "warning", "--deadline", "900", *args.flags])
    rounds, latencies = [], []
    try:
        asyncio.run(answer_all(served.url, photos[: args.concurrency], concurrency=args.concurrency))
        for _ in range(args.rounds):
            speed, passes = library.measure()
            before = Count.read(served.url)
            seconds, each = asyncio.run(answer_all(served.url, photos, concurrency=args.concurrency))
            after = Count.read(served.url)
            latencies += each
            images = after.images - before.images
            rounds.append(
                {
                    "library_images_per_second": round(speed, 3),
                    "server_images_per_second": round(len(photos) / seconds, 3),
                    "ratio": round(len(photos) / seconds / speed, 3),
                    "library_passes": round(passes, 3),
                    "server_passes": round((after.passes - before.passes) / images, 3),
                    "images_per_batch": round(images / (after.batches - before.batches), 2),
                }
            )
            print(rounds[-1], file=sys.stderr)
        memory = {"server_memory": served.memory()}
        if on_gpu:
            memory["server_gpu_memory"] = gpu_memory() - occupied
    finally:
        code, _ = served.stop()
    speeds = {side: statistics.median(one[f"{side}_images_per_second"] for one in rounds) for side in SIDES}
    return {
        **where("fastapi", "uvicorn", "starlette", "pillow"),
        "server": served.command,
        "defense": library.defense,
        "model": library.model,
        "dtype": library.dtype,
        "classes": library.classes,
        "threads": torch.get_num_threads(),
        "images": args.images,
        "photos": len(files),
        "bytes_per_photo": round(statistics.mean(map(len, files))),
        "batch": args.batch,
        "concurrency": args.concurrency,
        "rounds": rounds,
        **{f"{side}_images_per_second": round(speed, 3) for side, speed in speeds.items()},
        "ratio": round(speeds["server"] / speeds["library"], 3),
        "latency_seconds": {"median": round(statistics.median(latencies), 3), "most": round(max(latencies), 3)},
        **memory,
        "exit_code": code,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs="*", type=Path, help="files or folders (bundled ones by default)")
    parser.add_argument("--images", type=int, default=96, help="images a round; photos are repeated (%(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="of the library (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="callers at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of either side; the median counts (%(default)s)")
    parser.add_argument("--out", default="serve-throughput.json")
    parser.add_argument("flags", nargs="*", help="for react-clip serve, after --")
    args = parser.parse_args()
    if min(args.images, args.batch, args.concurrency, args.rounds) < 1:
        parser.error("every number must be at least 1")
    # SIGTERM must end the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = measure_all(args)
    write(args.out, result)
    return int(result["exit_code"] != 0)


if __name__ == "__main__":
    sys.exit(main())
