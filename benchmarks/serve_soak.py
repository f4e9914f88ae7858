"""A mixed load for many minutes, quiet, then SIGTERM: latency, memory, and whether every accepted request is answered.

    python benchmarks/serve_soak.py --minutes 60 --callers 4 --pause 4 -- --model clip-vit-b-16
    python benchmarks/serve_soak.py --minutes 3 --callers 32 --allocator untrimmed --out serve-memory/untrimmed.json

Everything after ``--`` goes to ``react-clip serve``. The result is benchmarks/results/serve-soak.json: the memory of
the server after each stage of its start, every ten seconds of the load, and after half a minute without requests.
``--allocator`` compares ways to bound that memory. With ``--processes`` among the server's flags only the memory of all
processes together is recorded.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from _common import SERVICE, Server, where, write
from _observed_server import ALLOCATORS
from PIL import Image
from serve_fuzz import cases, send

PHOTOS = 64
SIZES = ((224, 224), (320, 500), (640, 480), (1600, 1200), (3000, 2000))
"""Widths and heights of the photos."""
EVERY, STOPPING, LAST_CALLERS = 10.0, 3.0, 4
"""Seconds between two records of the memory; seconds of load before SIGTERM, and its callers."""
LISTS = (None, None, ["cat", "dog"], ["car", "boat", "airplane"])
"""Label lists of the requests; the names are in the label bank too."""


class Load:
    """Counts and times of all callers."""

    def __init__(self, url: str, callers: int, pause: float) -> None:
        self.url, self.callers, self.pause = url, callers, pause
        self.over, self.resting = threading.Event(), threading.Event()
        self.stopping = threading.Event()
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.changed = 0
        self.dropped: list[str] = []
        self._answers: dict[str, str] = {}
        self._lock = threading.Lock()

    def count(self, kind: str, status: int, seconds: float, key: str | None = None, answer: str | None = None) -> None:
        with self._lock:
            self.statuses[f"{kind}: {status}"] += 1
            if status == 200 and kind == "good":
                self.seconds.append(seconds)
            if key is not None and answer is not None:
                # The same photo with the same labels must get the same answer in any batch.
                self.changed += self._answers.setdefault(key, answer) != answer

    def rest(self) -> None:
        """Let callers send no more requests, and wait until all are answered."""
        self.resting.set()
        while httpx.get(f"{self.url}/metrics", timeout=600).text.count("react_clip_requests_in_flight 1.0") == 0:
            time.sleep(0.5)

    def resume_for(self, seconds: float) -> None:
        """Load by a few callers without pauses for some seconds, then expect refused connections."""
        self.pause, self.callers = 0.0, LAST_CALLERS
        self.resting.clear()
        time.sleep(seconds)
        self.stopping.set()

    def call(self, number: int, seed: int, photos: list[bytes]) -> None:
        """Caller ``number``: valid requests, mostly on a connection that is kept open."""
        rng = random.Random(seed + number)
        client = httpx.Client(base_url=self.url, timeout=600)
        while not self.over.wait(rng.uniform(0, 2 * self.pause)):
            if self.resting.is_set() or number >= self.callers:
                time.sleep(0.1)
                continue
            index, labels, many = rng.randrange(len(photos)), rng.choice(LISTS), rng.choice([1, 1, 1, 4])
            chosen = [photos[(index + i) % len(photos)] for i in range(many)]
            fresh = rng.random() < 0.1 or self.stopping.is_set()
            began = time.monotonic()
            try:
                if fresh:
                    with httpx.Client(base_url=self.url, timeout=600) as own:
                        answer = self._post(own, chosen, labels, rng)
                else:
                    answer = self._post(client, chosen, labels, rng)
            except httpx.ConnectError:
                if self.stopping.is_set():
                    return
                self.dropped.append("connection refused")
                continue
            except httpx.HTTPError as error:
                # A kept connection may be closed between two requests; that request was never accepted.
                if not (self.stopping.is_set() and not fresh):
                    self.dropped.append(repr(error))
                continue
            names = None
            if answer.status_code == 200 and "results" in answer.json():
                names = ",".join(result["label"] for result in answer.json()["results"])
            key = f"{index} {many} {labels}" if names is not None else None
            self.count("good", answer.status_code, time.monotonic() - began, key, names)

    def _post(
        self, client: httpx.Client, photos: list[bytes], labels: list[str] | None, rng: random.Random
    ) -> httpx.Response:
        path = rng.choice(["/v1/classify", "/v1/classify", "/v1/embed"])
        if rng.random() < 0.5:
            fields: dict[str, Any] = {"images": [base64.b64encode(data).decode() for data in photos]}
            return client.post(path, json=fields | ({"labels": labels} if labels else {}))
        files = [("images", ("photo", data)) for data in photos]
        return client.post(path, files=files, data={"labels": ",".join(labels)} if labels else {})

    def send_malformed(self, seed: int) -> None:
        """A caller that sends malformed requests only."""
        while not self.over.is_set() and not self.stopping.is_set():
            for case in cases(60, seed):
                while self.resting.is_set():
                    time.sleep(0.1)
                if self.stopping.is_set():
                    return
                began = time.monotonic()
                try:
                    status, _ = send(self.url, case)
                except OSError:
                    continue
                self.count("malformed", status, time.monotonic() - began)
                time.sleep(max(0.05, self.pause / 4))
            seed += 1


def photo(rng: random.Random) -> bytes:
    """A file of any format and size."""
    width, height = rng.choice(SIZES)
    small = (width // 16, height // 16)
    image = Image.frombytes("RGB", small, rng.randbytes(small[0] * small[1] * 3)).resize((width, height))
    stream = io.BytesIO()
    image.save(stream, rng.choice(["PNG", "JPEG", "WEBP"]))
    return stream.getvalue()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else float("nan")


def measure(args: argparse.Namespace, record: Path) -> dict[str, Any]:
    """Start a server whose memory is written to ``record``, run the load and return the result."""
    flags = [*args.flags, "--open-metrics"]
    if "--processes" in flags:
        served = Server.start(flags)
        threading.Thread(target=record_memory, args=(served, record), daemon=True).start()
    else:
        observed = str(Path(__file__).with_name("_observed_server.py"))
        served = Server.start(flags, (observed, str(record), str(EVERY), args.allocator))
    load = Load(served.url, args.callers, args.pause)
    rng = random.Random(args.seed)
    photos = [photo(rng) for _ in range(PHOTOS)]
    httpx.post(f"{served.url}/v1/classify", files={"images": ("photo", photos[0])}, timeout=600).raise_for_status()
    first = len(wait_for_record(record))
    (busy, faults), began = served.work(), time.monotonic()
    threads = [threading.Thread(target=load.call, args=(i, args.seed, photos)) for i in range(args.callers)]
    threads.append(threading.Thread(target=load.send_malformed, args=(args.seed,)))
    for thread in threads:
        thread.start()
    time.sleep(60 * args.minutes)
    metrics = httpx.get(f"{served.url}/metrics", timeout=600).text
    seconds, requests, (busy_then, faults_then) = time.monotonic() - began, sum(load.statuses.values()), served.work()
    last = len(read_record(record))
    load.rest()
    wait_for_record(record)
    after_rest = len(wait_for_record(record))
    load.resume_for(STOPPING)
    code, stop_seconds = served.stop()
    load.over.set()
    for thread in threads:
        thread.join()
    memory = read_record(record)
    images = _value(metrics, "react_clip_batch_images_sum")
    return {
        **where(*SERVICE),
        "allocator": args.allocator,
        "server": served.command,
        "minutes": round(seconds / 60, 2),
        "callers": args.callers,
        "mean_pause_seconds": args.pause,
        "seed": args.seed,
        "requests": requests,
        "requests_per_second": round(requests / seconds, 2),
        "images": int(images),
        "cpu_seconds_per_image": round((busy_then - busy) / max(1.0, images), 3),
        "page_faults_per_image": round((faults_then - faults) / max(1.0, images)),
        "statuses": dict(sorted(load.statuses.items())),
        "latency_seconds": {f"p{int(100 * share)}": percentile(load.seconds, share) for share in (0.5, 0.9, 0.99)},
        "images_per_batch": _mean(metrics, "react_clip_batch_images"),
        "gate_rate": 1 - _value(metrics, 'react_clip_images_total{branch="keep"}') / max(1.0, images),
        "answers_that_changed": load.changed,
        "dropped": load.dropped[:20],
        "dropped_count": len(load.dropped),
        "exit_code": code,
        "stop_seconds": round(stop_seconds, 2),
        "memory_of_stages": [line for line in memory[: first - 1] if line["stage"] != "serving"],
        "memory_after_one_request": memory[first - 1],
        "memory_of_load": {
            "mean": round(statistics.mean(line["resident"] for line in memory[first:last])),
            "most": max(memory[first:last], key=lambda line: line["resident"]),
            "last": memory[last - 1],
        },
        "memory_after_rest": memory[after_rest - 1],
        "memory_over_time": {
            "seconds": [round(line["seconds"]) for line in memory[first:after_rest]],
            **{
                f"{name}_mib": [line[name] >> 20 for line in memory[first:after_rest]]
                for name in ("resident", "heaps", "malloc_used")
                if name in memory[-1]
            },
        },
    }


def record_memory(served: Server, record: Path) -> None:
    """Write the memory of all processes of a server to ``record`` every ten seconds, until it ends."""
    began = time.monotonic()
    with suppress(OSError), record.open("w", buffering=1) as lines:
        while served.process.poll() is None:
            line = {"stage": "serving", "seconds": time.monotonic() - began, "resident": served.memory()}
            lines.write(json.dumps(line) + "\n")
            time.sleep(EVERY)


def read_record(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    return [json.loads(line) for line in record.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_record(record: Path) -> list[dict[str, Any]]:
    """The record when it has two more lines, so that the last one began after this call."""
    lines = len(read_record(record)) + 2
    while len(read_record(record)) < lines:
        time.sleep(0.5)
    return read_record(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds of a caller between two requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="shipped", help="the service as it is, or otherwise")
    parser.add_argument("--out", default="serve-soak.json")
    parser.add_argument("flags", nargs="*", help="for react-clip serve, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder) / "memory.jsonl")
    write(args.out, result)
    failed = any(status[-3:].startswith("5") and not status.endswith("503") for status in result["statuses"])
    return int(failed or result["dropped_count"] > 0 or result["answers_that_changed"] > 0 or result["exit_code"] != 0)


def _value(metrics: str, name: str) -> float:
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} ")), 0.0)


def _mean(metrics: str, name: str) -> float:
    return round(_value(metrics, f"{name}_sum") / max(1.0, _value(metrics, f"{name}_count")), 3)


if __name__ == "__main__":
    sys.exit(main())
