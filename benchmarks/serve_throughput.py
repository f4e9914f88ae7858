"""Throughput of the service relative to the library: both measured by turns in one run, on the same photos.

    python benchmarks/serve_throughput.py --images 96 --rounds 3 -- --model clip-vit-b-16
    python benchmarks/serve_throughput.py --small --photos PHOTOS --before OTHER/src --out serve-overhead.json

Everything after ``--`` goes to ``react-clip serve``, and the library is set up from the same flags: model, precision,
device, threads, labels, defence, and acceleration on a GPU. The library's number is measured as ``react-clip bench``
does it: pixels are ready, and ``--batch`` of them arrive together, as many as there are callers by default. The server
gets the same photos as JPEG files, one a request, from ``--concurrency`` callers at once; it and its callers share the
machine. Both key their noise alike, so the same gates open. Only one of the two works at a time. The callers write
prepared bytes to sockets: a client library such as httpx takes several milliseconds of processor time a request, as
much as the service itself.

``--small`` takes a random tower of one layer instead of a model, so that the time around the model shows; PHOTOS is
then one folder with a folder of photos per class. ``--before`` measures the service of another version of this package
too, by turns with this one. The result is benchmarks/results/serve-throughput.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import torch
from _common import SERVICE, Server, where, write
from torch import Tensor

from react_clip import SecondLook, ZeroShotClassifier
from react_clip.bench import Comparison, measure
from react_clip.cli import parse_args
from react_clip.cli.common import build_classifier, build_guard, load_encoder
from react_clip.cli.photos import bundled_photos, expand_inputs
from react_clip.cli.serve import settings_of
from react_clip.defenses import Defense
from react_clip.preprocess import read_image, to_pixels
from react_clip.serve.settings import variable

SECRET = "not secret, the same for both"
BOUNDARY = "a-boundary-that-no-photo-contains"
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
        encoder = load_encoder(args).accelerate()
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
    """Counters from the server's metrics, and the seconds its threads have spent on processors."""

    images: float
    passes: float
    batches: float
    computing: float
    """Seconds of all batches."""
    seconds: float

    @classmethod
    def read(cls, served: Server) -> Count:
        with urlopen(f"{served.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = {name: value for name, _, value in (line.partition(" ") for line in lines)}
        return cls(
            images=float(values["react_clip_batch_images_sum"]),
            passes=float(values["react_clip_encoder_passes_total"]),
            batches=float(values["react_clip_batch_images_count"]),
            computing=float(values["react_clip_batch_seconds_sum"]),
            seconds=served.work()[0],
        )


def as_request(photo: bytes) -> bytes:
    """The bytes of an HTTP request with one photo in a form."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="photo.jpg"\r\n'
    body = part.encode() + b"Content-Type: image/jpeg\r\n\r\n" + photo + f"\r\n--{BOUNDARY}--\r\n".encode()
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\n{head}".encode() + body


async def answer_all(
    url: str, requests: list[bytes], *, concurrency: int, status: int = 200
) -> tuple[float, list[float]]:
    """Seconds until all requests are answered, and seconds of each one; any other status ends the run."""
    waiting: Iterator[bytes] = iter(requests)
    each: list[float] = []
    address = urlsplit(url)

    async def call() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for request in waiting:
            began = time.perf_counter()
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]))
            if not head.startswith(f"http/1.1 {status} ".encode()):
                sys.exit(f"the server answered {head.splitlines()[0].decode()}")
            each.append(time.perf_counter() - began)
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(concurrency)))
    return time.perf_counter() - began, each


@dataclass
class Service:
    """A running server and what was measured of it in all rounds."""

    served: Server
    requests: list[bytes]
    concurrency: int
    start_seconds: float
    """From the start of the process until it answers: weights, labels, and on a GPU its graphs."""
    latencies: list[float]

    @classmethod
    def start(cls, flags: list[str], requests: list[bytes], concurrency: int, source: Path | None) -> Service:
        """Start the server from ``source`` (by default this version) and send one request of each caller."""
        # A batch may take longer than the deadline that callers usually want.
        flags = ["--open-metrics", "--log-level", "warning", "--deadline", "900", *flags]
        began = time.perf_counter()
        served = Server.start(flags, source=source)
        service = cls(served, requests, concurrency, time.perf_counter() - began, [])
        asyncio.run(answer_all(service.served.url, requests[:concurrency], concurrency=concurrency))
        return service

    def measure(self, library_speed: float) -> dict[str, float]:
        """Images a second, passes an image, images a batch, processor time, and HTTP alone, of one round.

        ``time_in_batches`` is the share of the time in which the model computes.
        """
        before, own = Count.read(self.served), time.process_time()
        seconds, each = asyncio.run(answer_all(self.served.url, self.requests, concurrency=self.concurrency))
        own, after = time.process_time() - own, Count.read(self.served)
        self.latencies += each
        # As long as the photos, but refused by their first bytes: the time of HTTP and of the form alone.
        refused = [request.replace(b"\xff\xd8\xff", b"\0\0\0") for request in self.requests]
        http_seconds, _ = asyncio.run(answer_all(self.served.url, refused, concurrency=self.concurrency, status=415))
        images = after.images - before.images
        return {
            "server_images_per_second": round(images / seconds, 3),
            "ratio": round(images / seconds / library_speed, 3),
            "server_passes": round((after.passes - before.passes) / images, 3),
            "images_per_batch": round(images / (after.batches - before.batches), 2),
            "time_in_batches": round((after.computing - before.computing) / seconds, 3),
            "server_processor_ms": round(1000 * (after.seconds - before.seconds) / images, 3),
            "callers_processor_ms": round(1000 * own / images, 3),
            "http_requests_per_second": round(len(refused) / http_seconds, 3),
        }

    def summary(self, rounds: list[dict[str, float]]) -> dict[str, Any]:
        """Medians over the rounds, and latencies."""
        latencies = {"median": statistics.median(self.latencies), "most": max(self.latencies)}
        return {
            **{key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]},
            "start_seconds": round(self.start_seconds, 3),
            "latency_seconds": {name: round(value, 3) for name, value in latencies.items()},
        }


def small_tower(folder: Path, photos: list[Path]) -> list[str]:
    """Flags for an image tower that costs next to nothing, with the classes of a folder of photos."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    [classes] = photos
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = CLIPVisionConfig(**shape, projection_dim=512, image_size=64, patch_size=8, hidden_act="quick_gelu")
    CLIPVisionModelWithProjection(config).save_pretrained(folder)
    SecondLook(threshold=2.0).save(folder / "guard.json")
    return ["--model", str(folder), "--config", str(folder / "guard.json"), "--photos", str(classes)]


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


def measure_all(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Run all rounds and summarize them."""
    files = [as_jpeg(path) for path in expand_inputs(args.photos or bundled_photos())[: args.images]]
    photos = [files[i % len(files)] for i in range(args.images)]
    library = Library(flags, photos, batch=args.batch)
    requests = [as_request(photo) for photo in photos]
    os.environ[variable("secret")] = SECRET
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        library.measure()  # so that its own memory does not grow later
    occupied = gpu_memory() if on_gpu else 0
    versions = {"server": None} | ({"before": args.before} if args.before else {})
    services: dict[str, Service] = {}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in versions}
    try:
        for side, source in versions.items():
            services[side] = Service.start(flags, requests, args.concurrency, source)
        for number in range(args.rounds):
            speed, passes = library.measure()
            # Every second round in the other order: other work on the machine comes and goes.
            for side, service in list(services.items())[:: -1 if number % 2 else 1]:
                values = {"library_images_per_second": round(speed, 3), "library_passes": round(passes, 3)}
                rounds[side].append(values | service.measure(speed))
                print(side, rounds[side][-1], file=sys.stderr)
        memory = {"server_memory": services["server"].served.memory()}
        if on_gpu and not args.before:  # else another server is part of it
            memory["server_gpu_memory"] = gpu_memory() - occupied
    finally:
        codes = [service.served.stop()[0] for service in services.values()]
    sides = {side: service.summary(rounds[side]) | {"rounds": rounds[side]} for side, service in services.items()}
    return {
        **where(*SERVICE),
        "server": services["server"].served.command,
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
        **sides.pop("server"),
        **sides,
        **memory,
        "exit_code": max(codes, key=abs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs="*", type=Path, help="files or folders (bundled ones by default)")
    parser.add_argument("--images", type=int, default=96, help="images a round; photos are repeated (%(default)s)")
    parser.add_argument("--batch", type=int, help="images at a time for the library (as many as callers)")
    parser.add_argument("--concurrency", type=int, default=32, help="callers at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of either side; the median counts (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a random tower of one layer instead of a model")
    parser.add_argument("--before", type=Path, help="src folder of another version, whose service is measured too")
    parser.add_argument("--out", default="serve-throughput.json")
    parser.add_argument("flags", nargs="*", help="for react-clip serve, after --")
    args = parser.parse_args()
    args.batch = args.concurrency if args.batch is None else args.batch
    if min(args.images, args.batch, args.concurrency, args.rounds) < 1:
        parser.error("every number must be at least 1")
    if args.small and len(args.photos or []) != 1:
        parser.error("--small needs --photos with one folder that has a folder of photos per class")
    # SIGTERM must end the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as folder:
        flags = [*(small_tower(Path(folder), args.photos) if args.small else []), *args.flags]
        result = measure_all(args, flags)
    # The folder of the small tower is gone by now.
    write(args.out, json.loads(json.dumps(result).replace(folder, "small-tower")))
    return int(result["exit_code"] != 0)


if __name__ == "__main__":
    sys.exit(main())
