"""Real server processes on the small CLIP, and photos to send them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import react_clip as rc

SECRET = "a secret of the tests, long enough"
LABELS = ("cat", "dog", "teapot")
GUARD = rc.ReACT(tau=1.48)
"""A threshold in the middle of what the small CLIP's drifts are, so that gates open and stay closed."""


@dataclass
class Server:
    """A running process and a client for it."""

    process: subprocess.Popen[str]
    url: str
    client: httpx.Client

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


Launch = Callable[..., Server]


@pytest.fixture(scope="session")
def launch(tiny_folder: Path, command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a server with some flags and environment; all are ended with the tests."""
    started: list[Server] = []
    config = tmp_path_factory.mktemp("serve") / "guard.json"
    GUARD.save(config)

    def start(*flags: object, env: dict[str, str] | None = None, log: Path | None = None) -> Server:
        base = {
            "REACT_CLIP_SERVE_SECRET": SECRET,
            # Other tests share the cores; threads that wait for each other would take minutes.
            "OMP_NUM_THREADS": "1",
            "REACT_CLIP_SERVE_MODEL": str(tiny_folder),
            "REACT_CLIP_SERVE_LABELS": ", ".join(LABELS),
            "REACT_CLIP_SERVE_CONFIG": str(config),
            "REACT_CLIP_SERVE_PORT": "0",
            "REACT_CLIP_SERVE_JSON": "1",
        }
        process = subprocess.Popen(
            [*command, "serve", *map(str, flags)],
            env=os.environ | base | (env or {}),
            stdout=subprocess.PIPE,
            stderr=log.open("w") if log else subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the server ended with {process.wait()}"
        url = json.loads(line)["url"]
        server = Server(process, url, httpx.Client(base_url=url, timeout=60))
        started.append(server)
        return server

    yield start
    for server in started:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def server(launch: Launch) -> Server:
    """The server as most people start it, with open metrics."""
    return launch("--open-metrics")


def png(seed: int, size: tuple[int, int] = (50, 40)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    # Smooth photos and noise have different drifts; both kinds must occur.
    image = Image.fromarray(pixels) if seed % 2 else Image.fromarray(pixels[:4, :4]).resize(size[::-1])
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="session")
def photos() -> list[bytes]:
    return [png(seed) for seed in range(12)]


@pytest.fixture(scope="session")
def encoder(tiny_folder: Path) -> rc.Encoder:
    return rc.load(tiny_folder, device="cpu")


@pytest.fixture(scope="session")
def direct(encoder: rc.Encoder) -> Callable[..., rc.Defended]:
    """What the library says, called directly with the server's secret."""

    def call(images: list[bytes], labels: tuple[str, ...] = LABELS, guard: rc.ReACT = GUARD) -> rc.Defended:
        with torch.no_grad():
            clf = rc.ZeroShotClassifier(encoder, labels)
            return guard(clf, images, seed=SECRET.encode())

    return call
