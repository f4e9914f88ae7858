"""Load on the service: images a second of two versions by turns, more load than it can carry, or a long run with harm.

    python benchmarks/serve_load.py throughput --before OTHER/src --rounds 3 -- --model clip-vit-b-16
    python benchmarks/serve_load.py throughput --small --workers 2
    python benchmarks/serve_load.py overload --small --seconds 40 --factor 4 --deadline 10
    python benchmarks/serve_load.py soak --minutes 20 --workers 2 --harm 60 -- --model clip-vit-b-16

Everything after ``--`` goes to ``react-clip serve``. ``--small`` takes a random tower of one layer instead of a model,
so that the time around the model shows; for an overload one that takes most of the time. Callers write prepared bytes
to sockets, one photo a request, and share the machine with the server. An overload sends ``--factor`` times as many
requests a second as the service answers under full load, whatever becomes of the earlier ones. Every ``--harm`` seconds
of a soak the model's process, or one that answers, is stopped (it hangs) or killed. The result is an entry of
benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from _common import RESULTS, SERVICE, Server, where, write
from PIL import Image

SECRET = "a secret of the benchmark, long enough"
BOUNDARY = "a-boundary-of-the-benchmark"
Answers = dict[bytes, tuple[str, float]]
"""Label and probability of the first answer to each request."""
LARGER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
LARGER |= {"image_size": 224, "patch_size": 16}
"""Shape of the random tower of an overload: an eighth of the work of ViT-B/16."""
LATE = 60.0
"""Seconds after which a caller gives up."""


def as_request(*photos: bytes) -> bytes:
    """The bytes of an HTTP request with photos in a form."""
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="photo.jpg"\r\n'
    body = b"".join(part.encode() + b"Content-Type: image/jpeg\r\n\r\n" + photo + b"\r\n" for photo in photos)
    body += f"--{BOUNDARY}--\r\n".encode()
    head = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\n{head}".encode() + body


def photos(count: int) -> list[bytes]:
    """JPEG files of smooth random pictures, 500 pixels wide."""
    files = []
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (12, 16, 3), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


async def exchange(stream: Any, request: bytes) -> tuple[bytes, bytes]:
    """Send a request; head of the answer in lower case, and body."""
    stream[1].write(request)
    async with asyncio.timeout(LATE):
        head = (await stream[0].readuntil(b"\r\n\r\n")).lower()
        return head, await stream[0].readexactly(int(field(head, b"content-length")))


def field(head: bytes, name: bytes) -> bytes:
    """A header of an answer."""
    return head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0].strip()


async def load(
    url: str, requests: list[bytes], callers: int, seconds: float, pause: float = 0.0, answers: Answers | None = None
) -> tuple[Counter[str], list[float]]:
    """Send requests from several callers for some seconds; the number of answers of each status, and their times.

    An answer that differs from an earlier one for the same request counts as "wrong".
    """
    address, until = urlsplit(url), time.perf_counter() + seconds
    statuses, times, answers = Counter[str](), list[float](), {} if answers is None else answers

    async def call(number: int) -> None:
        stream: Any = None
        for request in itertools.islice(itertools.cycle(requests), number, None):
            began = time.perf_counter()
            if began > until:
                return
            try:
                stream = stream or await asyncio.open_connection(address.hostname, address.port)
                head, body = await exchange(stream, request)
                statuses[head[9:12].decode()] += 1
                times.append(time.perf_counter() - began)
                if head[9:12] == b"200":
                    [result] = json.loads(body)["results"]
                    label, probability = answers.setdefault(request, (result["label"], result["probability"]))
                    # Sums in another order, because a batch has another size, may differ in their last bits.
                    statuses["wrong"] += label != result["label"] or abs(probability - result["probability"]) > 1e-3
                    await asyncio.sleep(pause)
                if head[9:12] != b"200":
                    await asyncio.sleep(1)  # as Retry-After says
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                statuses["closed" if not isinstance(error, TimeoutError) else "late"] += 1
                if stream:
                    stream[1].close()
                stream = None
                await asyncio.sleep(0.1)

    await asyncio.gather(*map(call, range(callers)))
    return statuses, times


@contextmanager
def small_tower(**shape: int) -> Iterator[list[str]]:
    """Flags for an image tower that costs next to nothing, unless its shape says otherwise."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        least = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
        least |= {"image_size": 64, "patch_size": 8}
        config = CLIPVisionConfig(**(least | shape), projection_dim=512, hidden_act="quick_gelu")
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
        Path(folder, "guard.json").write_text(json.dumps({"kind": "second_look", "threshold": 2.0}))
        for name, data in zip(("one", "two"), photos(2), strict=True):
            Path(folder, "photos", name).mkdir(parents=True)
            Path(folder, "photos", name, "photo.jpg").write_bytes(data)
        yield ["--model", folder, "--config", f"{folder}/guard.json", "--photos", f"{folder}/photos"]


def throughput(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Images a second, latency and memory of this version, and of ``--before``, by turns."""
    requests = [as_request(photo) for photo in photos(64)]
    sources: dict[str, Path | None] = {"now": None} | ({"before": args.before} if args.before else {})
    speeds: dict[str, list[float]] = {side: [] for side in sources}
    latencies: dict[str, list[float]] = {side: [] for side in sources}
    processor: dict[str, list[float]] = {side: [] for side in sources}
    servers: dict[str, Server] = {}
    try:
        for side, source in sources.items():
            words = [*flags, "--workers", str(args.workers), "--deadline", "60"]
            servers[side] = Server.start(words, source=source)
            asyncio.run(load(servers[side].url, requests, args.callers, 3))
        for turn in range(args.rounds):
            for side in list(sources)[:: -1 if turn % 2 else 1]:
                spent = servers[side].work()[0]
                statuses, times = asyncio.run(load(servers[side].url, requests, args.callers, args.seconds))
                processor[side].append(1000 * (servers[side].work()[0] - spent) / statuses["200"])
                if set(statuses) != {"200"}:
                    sys.exit(f"{side}: {dict(statuses)}")
                speeds[side].append(statuses["200"] / args.seconds)
                latencies[side] += times
                print(side, round(speeds[side][-1], 2), file=sys.stderr)
        memory = {side: server.memory() for side, server in servers.items()}
    finally:
        codes = {side: server.stop()[0] for side, server in servers.items()}
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    result = {
        side: {
            "images_per_second": round(medians[side], 2),
            "rounds": [round(value, 2) for value in speeds[side]],
            "processor_ms_per_image": round(statistics.median(processor[side]), 2),
            "latency_median": round(statistics.median(latencies[side]), 3),
            "latency_most": round(max(latencies[side]), 3),
            "memory": memory[side],
            "exit_code": codes[side],
        }
        for side in sources
    }
    return result | ({"ratio": round(medians["now"] / medians["before"], 3)} if args.before else {})


class Sent(NamedTuple):
    """A request of an overload: when it was sent and answered, status, kind of error, Retry-After."""

    at: float
    answered: float
    status: int
    kind: str
    retry: int


async def send(url: str, request: bytes) -> Sent:
    """Send a request on a connection of its own."""
    address, at = urlsplit(url), time.perf_counter()
    stream = await asyncio.open_connection(address.hostname, address.port)
    try:
        head, body = await exchange(stream, request)
    finally:
        stream[1].close()
    kind = "" if head[9:12] == b"200" else json.loads(body)["error"]["type"]
    return Sent(at, time.perf_counter(), int(head[9:12]), kind, int(field(head, b"retry-after") or 0))


async def flood(url: str, requests: list[bytes], rate: float, seconds: float) -> tuple[list[Sent], Counter[str], int]:
    """Send requests at a rate; what became of them, answers of /readyz meanwhile, and how many failed."""
    tasks, ready, began = list[asyncio.Task[Sent]](), Counter[str](), time.perf_counter()
    ask = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(send(url, requests[number % len(requests)])))
        if number % max(1, int(rate / 4)) == 0:
            ready[str((await send(url, ask)).status)] += 1
    done = await asyncio.gather(*tasks, return_exceptions=True)
    sent = [each for each in done if isinstance(each, Sent)]
    return sent, ready, len(done) - len(sent)


async def try_retries(url: str, one: bytes, many: bytes, tries: int) -> list[tuple[int, Sent]]:
    """Fill the queue, have a request refused, wait as Retry-After says, ask again; the seconds, and the answer."""
    retries, fill = list[tuple[int, asyncio.Task[Sent]]](), list[asyncio.Task[Sent]]()
    for number in range(tries):
        fill += [asyncio.create_task(send(url, one)) for _ in range(80)]
        await asyncio.sleep(0.5)
        request = many if number % 2 else one
        refused = await send(url, request)
        if refused.kind == "overloaded":
            await asyncio.sleep(refused.retry)
            retries.append((refused.retry, asyncio.create_task(send(url, request))))
            await asyncio.sleep(0.5)  # nobody else comes until it is queued
    await asyncio.gather(*fill, return_exceptions=True)
    return [(seconds, await task) for seconds, task in retries]


def overload(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Goodput, latency and refusals under more load than the service can carry, and the truth of Retry-After."""
    files = photos(64)
    requests, rounds = [as_request(photo) for photo in files], []
    server = Server.start([*flags, "--workers", str(args.workers), "--deadline", str(args.deadline)])
    try:
        asyncio.run(load(server.url, requests, 8, 5))
        for _ in range(args.rounds):
            peaks = [asyncio.run(load(server.url, requests, 8, args.seconds / 2))[0]["200"] / (args.seconds / 2)]
            sent, ready, failed = asyncio.run(flood(server.url, requests, args.factor * peaks[0], args.seconds))
            # The machine may have become slower meanwhile.
            peaks += [asyncio.run(load(server.url, requests, 8, args.seconds / 2))[0]["200"] / (args.seconds / 2)]
            # While the queue fills, it takes more than the service can carry; after the last request, less is offered.
            start, end = min(each.at for each in sent) + args.deadline / 2, max(each.at for each in sent)
            answered = [each for each in sent if each.status == 200]
            times = sorted(each.answered - each.at for each in answered)
            refusals = sorted(each.answered - each.at for each in sent if each.kind == "overloaded")
            accepted = len(sent) + failed - len(refusals)
            good = [each for each in answered if start <= each.answered <= end]
            rounds.append(
                {
                    "peak_images_per_second": [round(peak, 2) for peak in peaks],
                    "offered_per_second": round(args.factor * peaks[0], 2),
                    "goodput_per_second": round(len(good) / (end - start), 2),
                    "goodput_of_peak": round(len(good) / (end - start) / statistics.mean(peaks), 3),
                    "requests": len(sent) + failed,
                    "refused": len(refusals),
                    "failed": failed,
                    "accepted_in_time": round(sum(one <= args.deadline for one in times) / accepted, 4),
                    "accepted_seconds": [round(times[int(q * (len(times) - 1))], 2) for q in (0.5, 0.99, 1)],
                    "refused_seconds": [round(refusals[int(q * (len(refusals) - 1))], 3) for q in (0.5, 0.99, 1)],
                    "readyz": dict(ready),
                    "load_average": os.getloadavg()[0],
                }
            )
            print(rounds[-1], file=sys.stderr)
        retries = asyncio.run(try_retries(server.url, requests[0], as_request(*files[:8]), args.retries))
    finally:
        code, _ = server.stop()
    truth = {"seconds": [seconds for seconds, _ in retries], "answered_then": [one.status == 200 for _, one in retries]}
    quantiles = "accepted_seconds and refused_seconds are median, 99 % and most"
    return {"deadline": args.deadline, "rounds": rounds, "retry_after": truth, "exit_code": code, "note": quantiles}


def workers_of(server: Server) -> list[int]:
    """The processes that answer; the one that has started them computes."""
    found = []
    for pid in server.pids():
        with suppress(OSError):  # it has ended just now
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def harm(server: Server, rng: random.Random) -> str:
    """Kill a process that answers, or stop one (uvicorn replaces it), or let the model hang for 15 seconds."""
    what = rng.choice(["worker killed", "worker hangs", "model hangs"])
    pid = server.process.pid if what.startswith("model") else rng.choice(workers_of(server))
    os.kill(pid, signal.SIGKILL if what.endswith("killed") else signal.SIGSTOP)
    if pid == server.process.pid:
        time.sleep(15)
        os.kill(pid, signal.SIGCONT)
    return what


def soak(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Answers, latency and memory of a long run; with ``--harm`` parts of the service hang or are killed meanwhile."""
    requests, rng = [as_request(photo) for photo in photos(64)], random.Random(0)
    server = Server.start([*flags, "--workers", str(args.workers), "--deadline", "10"])
    answers: Answers = {}
    # Workers that still import libraries would make the first memory too small.
    while len(workers_of(server)) < args.workers:
        time.sleep(1)
    time.sleep(60)
    total, times = asyncio.run(load(server.url, requests, args.callers, 60, args.pause, answers))
    harmed, memory = Counter[str](), [(len(workers_of(server)), server.memory())]
    until = time.monotonic() + 60 * args.minutes
    with ThreadPoolExecutor(1) as thread:
        while time.monotonic() < until:
            harming = thread.submit(harm, server, rng) if args.harm else None
            seconds = min(args.harm or 60, until - time.monotonic())
            statuses, own = asyncio.run(load(server.url, requests, args.callers, seconds, args.pause, answers))
            total, times, memory = total + statuses, times + own, [*memory, (len(workers_of(server)), server.memory())]
            if harming:
                harmed[harming.result()] += 1
    time.sleep(60)  # the last part that hangs is replaced
    last, _ = asyncio.run(load(server.url, requests, args.callers, 60, args.pause, answers))
    memory.append((len(workers_of(server)), server.memory()))
    code, seconds = server.stop()
    return {
        "minutes": args.minutes,
        "harm": dict(harmed),
        "statuses": dict(total),
        "statuses_after": dict(last),
        "wrong": total["wrong"] + last["wrong"],
        "latency_median": round(statistics.median(times), 3),
        "latency_most": round(max(times), 3),
        "workers_and_memory": memory,
        "load_average": os.getloadavg()[0],
        "exit_code": code,
        "stop_seconds": round(seconds, 1),
    }


NEIGHBOUR = """
import os, sys, time
import torch
import react_clip as rc

clf = rc.ZeroShotClassifier(rc.load(sys.argv[1], device="cpu"), ["cat", "dog", "teapot"])
guard, images = rc.defenses.default_for(clf.encoder), torch.rand(1, 3, 224, 224)
guard(clf, images)
print("ready", flush=True)
for line in sys.stdin:
    times, until = [], time.perf_counter() + float(line)
    while (began := time.perf_counter()) < until:
        guard(clf, images)
        times.append(time.perf_counter() - began)
    print(sorted(times)[len(times) // 2], flush=True)
"""


def neighbours(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Seconds for one image in a process of the library, alone and beside another, as OpenMP waits and as we set it."""
    seconds: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        for policy in ("", "PASSIVE")[:: -1 if turn % 2 else 1]:  # empty: OpenMP's own
            command = [sys.executable, "-W", "ignore", "-c", NEIGHBOUR, *(flags or ["clip-vit-b-16"])]
            env = {**os.environ, "OMP_WAIT_POLICY": policy}
            pipes: Any = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.DEVNULL,
                "text": True,
            }
            pair: list[Any] = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
            for each in pair:
                each.stdout.readline()
            for name, some in (("alone", pair[:1]), ("side by side", pair)):
                for each in some:
                    print(args.seconds, file=each.stdin, flush=True)
                found = [float(each.stdout.readline()) for each in some]
                seconds.setdefault(f"{name}, {policy.lower() or 'as OpenMP waits'}", []).extend(found)
                print(name, policy, found, file=sys.stderr)
            for each in pair:
                each.communicate()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        name: round(medians[f"{name}, passive"] / medians[f"{name}, as OpenMP waits"], 3)
        for name in ("alone", "side by side")
    }
    rounded = {name: [round(value, 3) for value in values] for name, values in seconds.items()}
    return {"seconds_per_image": rounded, "ratio_of_passive": ratios, "load_average": os.getloadavg()[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "overload", "soak", "neighbours"))
    parser.add_argument("--small", action="store_true", help="a random tower instead of a model")
    parser.add_argument("--before", type=Path, help="src folder of another version, measured by turns")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the requests of a caller of a soak")
    parser.add_argument("--harm", type=float, default=0.0, help="seconds between two parts that hang or are killed")
    parser.add_argument("--factor", type=float, default=4.0, help="load of an overload, as a multiple of the peak")
    parser.add_argument("--deadline", type=float, default=10.0, help="of an overload, in seconds (%(default)s)")
    parser.add_argument("--retries", type=int, default=12, help="refused requests that ask again, after the overload")
    parser.add_argument("--note", help="of the entry, such as what else used the cores")
    parser.add_argument("--name", help="of the entry in serve.json (what was measured)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.flags = words[end + 1 :]
    os.environ["REACT_CLIP_SERVE_SECRET"] = SECRET
    measure = {"throughput": throughput, "overload": overload, "soak": soak, "neighbours": neighbours}[args.what]
    if args.small:
        with small_tower(**(LARGER if args.what == "overload" else {})) as flags:
            result = measure(args, [*flags, *args.flags])
    else:
        result = measure(args, args.flags)
    path = RESULTS / "serve.json"
    entries = json.loads(path.read_text()) if path.exists() else {}
    entry = {**where(*SERVICE), "threads": torch.get_num_threads(), "flags": args.flags, **result}
    if args.small and args.what == "overload":
        entry["tower"] = LARGER
    if args.note:
        entry["note"] = "; ".join(filter(None, [entry.get("note"), args.note]))
    write(path.name, entries | {args.name or args.what: entry})
    return 0


if __name__ == "__main__":
    sys.exit(main())
