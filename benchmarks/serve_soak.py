"""A mixed load for many minutes, then SIGTERM: latency, memory, and whether every accepted request is answered.

    python benchmarks/serve_soak.py --minutes 20 -- --model clip-vit-b-16

Everything after ``--`` goes to ``react-clip serve``. The result is benchmarks/results/serve-soak.json.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
from _common import Server, where, write
from serve_fuzz import cases, photo, send

PHOTOS = 64
LISTS = (None, None, ["cat", "dog"], ["car", "boat", "airplane"])
"""Label lists of the requests; the names are in the label bank too."""


class Load:
    """Counts and times of all callers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.over = threading.Event()
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

    def call(self, seed: int, photos: list[bytes]) -> None:
        """One caller: valid requests, mostly on a connection that is kept open."""
        rng = random.Random(seed)
        client = httpx.Client(base_url=self.url, timeout=120)
        while not self.over.is_set():
            index, labels, many = rng.randrange(len(photos)), rng.choice(LISTS), rng.choice([1, 1, 1, 4])
            chosen = [photos[(index + i) % len(photos)] for i in range(many)]
            fresh = rng.random() < 0.1 or self.stopping.is_set()
            began = time.monotonic()
            try:
                if fresh:
                    with httpx.Client(base_url=self.url, timeout=120) as own:
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
                if self.stopping.is_set():
                    return
                began = time.monotonic()
                try:
                    status, _ = send(self.url, case)
                except OSError:
                    continue
                self.count("malformed", status, time.monotonic() - began)
                time.sleep(0.05)
            seed += 1


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="serve-soak.json")
    parser.add_argument("flags", nargs="*", help="for react-clip serve, after --")
    args = parser.parse_args()
    served = Server.start([*args.flags, "--open-metrics"])
    load = Load(served.url)
    rng = random.Random(args.seed)
    photos = [photo(rng, rng.choice(["PNG", "JPEG", "WEBP"])) for _ in range(PHOTOS)]
    threads = [threading.Thread(target=load.call, args=(args.seed + i, photos)) for i in range(args.callers)]
    threads.append(threading.Thread(target=load.send_malformed, args=(args.seed,)))
    for thread in threads:
        thread.start()
    began, memory = time.monotonic(), []
    while (now := time.monotonic() - began) < 60 * args.minutes:
        time.sleep(min(5.0, max(0.1, 60 * args.minutes - now)))
        memory.append(served.memory())
    metrics = httpx.get(f"{served.url}/metrics", timeout=60).text
    seconds, requests = time.monotonic() - began, sum(load.statuses.values())
    load.stopping.set()
    code, stop_seconds = served.stop()
    load.over.set()
    for thread in threads:
        thread.join()
    bad = {
        status: n for status, n in load.statuses.items() if status[-3:].startswith("5") and not status.endswith("503")
    }
    settled = memory[len(memory) // 4] if memory else 0
    result = {
        **where("fastapi", "uvicorn", "starlette", "pillow"),
        "server": served.command,
        "minutes": round(seconds / 60, 2),
        "callers": args.callers,
        "seed": args.seed,
        "requests": requests,
        "requests_per_second": round(requests / seconds, 2),
        "statuses": dict(sorted(load.statuses.items())),
        "latency_seconds": {f"p{int(100 * share)}": percentile(load.seconds, share) for share in (0.5, 0.9, 0.99)},
        "images_per_batch": _mean(metrics, "react_clip_batch_images"),
        "gate_rate": 1
        - _value(metrics, 'react_clip_images_total{branch="keep"}')
        / max(1.0, _value(metrics, "react_clip_batch_images_sum")),
        "answers_that_changed": load.changed,
        "dropped": load.dropped[:20],
        "dropped_count": len(load.dropped),
        "memory_first": memory[0] if memory else 0,
        "memory_settled": settled,
        "memory_last": memory[-1] if memory else 0,
        "memory_most": max(memory, default=0),
        "exit_code": code,
        "stop_seconds": round(stop_seconds, 2),
    }
    write(args.out, result)
    return int(bool(bad or load.dropped or load.changed or code != 0))


def _value(metrics: str, name: str) -> float:
    return next((float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} ")), 0.0)


def _mean(metrics: str, name: str) -> float:
    return round(_value(metrics, f"{name}_sum") / max(1.0, _value(metrics, f"{name}_count")), 3)


if __name__ == "__main__":
    sys.exit(main())
