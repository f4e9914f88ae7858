"""Real server processes with a small CLIP, shared by the tests of a session, and photos to send to them."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import pytest
import torch
from serve_client import GUARD, KEYS, LABELS, PRELOAD, SECRET, png, run_server

import react_clip as rc


@dataclass
class Server:
    """A running process and a client for it."""

    process: BaseProcess
    url: str
    client: httpx.Client
    log: Path

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


Launch = Callable[..., Server]


@pytest.fixture(scope="session")
def launch(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a server with some flags and environment variables; all servers end with the session.

    The processes are forked from one that has imported the libraries, which takes longer than everything else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD])
    started: list[Server] = []
    folder = tmp_path_factory.mktemp("serve")
    GUARD.save(folder / "guard.json")

    def start(*flags: object, env: dict[str, str] | None = None) -> Server:
        base = {
            "REACT_CLIP_SERVE_SECRET": SECRET,
            "REACT_CLIP_SERVE_MODEL": str(tiny_folder),
            "REACT_CLIP_SERVE_LABELS": ", ".join(LABELS),
            "REACT_CLIP_SERVE_CONFIG": str(folder / "guard.json"),
            "REACT_CLIP_SERVE_PORT": "0",
            "REACT_CLIP_SERVE_JSON": "1",
            "REACT_CLIP_SERVE_THREADS": "1",  # other tests share the cores
        }
        log = folder / f"{len(started)}.log"
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=run_server, args=([*map(str, flags)], base | (env or {}), writer, str(log)))
        process.start()
        writer.close()
        with open(reader.fileno(), closefd=False) as stdout:
            line = stdout.readline()
        assert line, f"the server ended: {log.read_text()}"
        url = json.loads(line)["url"]
        server = Server(process, url, httpx.Client(base_url=url, timeout=60), log)
        started.append(server)
        return server

    yield start
    for server in started:
        server.client.close()
        server.process.kill()
        server.process.join()


@pytest.fixture(scope="session")
def server(launch: Launch) -> Server:
    """A server with default settings and open metrics."""
    return launch("--open-metrics")


@pytest.fixture(scope="session")
def demo(launch: Launch) -> Server:
    """A server with the demo's attack and constant work, both switched on by environment variables."""
    env = {"REACT_CLIP_SERVE_DEMO": "true", "REACT_CLIP_SERVE_CONSTANT_WORK": "1", "REACT_CLIP_SERVE_NAME": "tiny-clip"}
    return launch("--deadline", 120, env=env)


@pytest.fixture(scope="session")
def guarded(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server with API keys, small limits, fixed labels and diagnostics; its client sends a key."""
    keys = tmp_path_factory.mktemp("guarded") / "keys"
    keys.write_text("# for the tests\n" + "\n".join(KEYS) + "\n")
    server = launch(
        *("--api-key-file", keys, "--fixed-labels", "--diagnostics", "--max-body", 60_000, "--max-buffered", 100_000),
        *("--max-images", 8, "--max-pixels", 10_000, "--max-connections", 30, "--body-timeout", 1.5, "--keep-alive", 1),
    )
    server.client.headers["authorization"] = f"Bearer {KEYS[1]}"
    return server


@pytest.fixture(scope="session")
def photos() -> list[bytes]:
    return [png(seed) for seed in range(12)]


@pytest.fixture(scope="session")
def encoder(tiny_folder: Path) -> rc.Encoder:
    return rc.load(tiny_folder, device="cpu")


@pytest.fixture(scope="session")
def direct(encoder: rc.Encoder) -> Callable[..., rc.Defended]:
    """The library's answers, computed with the server's secret."""

    def call(images: list[bytes], labels: tuple[str, ...] = LABELS, guard: rc.ReACT = GUARD) -> rc.Defended:
        with torch.no_grad():
            clf = rc.ZeroShotClassifier(encoder, labels)
            return guard(clf, images, seed=SECRET.encode())

    return call
