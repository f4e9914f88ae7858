"""Real server processes with a small CLIP, shared by the tests of a session, and photos to send to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from serve_client import GUARD, KEYS, LABELS, SECOND_LOOK, SECRET, Server, png

import react_clip as rc
from programs import start_command

Launch = Callable[..., Server]


@pytest.fixture(scope="session")
def launch(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Start a server with some flags and environment variables; all servers end with the session."""
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
        command = start_command("serve", *flags, env=base | (env or {}), log=folder / f"{len(started)}.log")
        started.append(Server(command))
        return started[-1]

    yield start
    for server in started:
        server.end()


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
def second_look(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server with SecondLook, diagnostics and open metrics."""
    config = tmp_path_factory.mktemp("second_look") / "guard.json"
    SECOND_LOOK.save(config)
    return launch("--config", config, "--diagnostics", "--open-metrics")


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

    def call(images: list[bytes], labels: tuple[str, ...] = LABELS, guard: rc.Defense = GUARD) -> rc.Defended:
        with torch.no_grad():
            clf = rc.ZeroShotClassifier(encoder, labels)
            return guard(clf, images, seed=SECRET.encode())

    return call
